"""Writes kept conversations into a folder without an end: a test kills it."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from orchestrator.prompts.folder import PromptFolder  # noqa: E402
from orchestrator.prompts.shelf import Copy  # noqa: E402
from orchestrator.states import Mark  # noqa: E402

KEY = "a key"
TURNS = 6


def made(conversation: int, turn: int) -> Copy:
    """A turn of a conversation: its state and its parts follow from its tokens."""
    tokens = np.arange(20 * (turn + 1), dtype=np.int32) + 1000 * conversation
    return Copy(KEY, tokens, state_of(tokens), True, (Mark(10, state_of(tokens[:10]), b"learned"),))


def state_of(tokens: np.ndarray) -> np.ndarray:
    seed = np.random.default_rng(int(tokens.sum()) + len(tokens))
    return seed.integers(0, 256, 300_000, dtype=np.uint8)


if __name__ == "__main__":
    folder = PromptFolder(Path(sys.argv[1]), 1 << 21)
    print("ready", flush=True)
    while True:
        for number in range(12):
            folder.save_copy(made(number % 2, number // 2 % TURNS))
