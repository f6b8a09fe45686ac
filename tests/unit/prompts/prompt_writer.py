"""Conversations to keep, and a writer of twelve of them, which a test kills."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from orchestrator.engine.prompt_copies import Copy, PromptFolder
from orchestrator.engine.steps import Mark

KEY = "a key"
TURNS = 6


def made(conversation: int, turn: int) -> Copy:
    """A turn of a conversation: its state and its parts follow from its tokens."""
    tokens = np.arange(20 * (turn + 1), dtype=np.int32) + 1000 * conversation
    return Copy(KEY, tokens, state_of(tokens), True, (Mark(10, state_of(tokens[:10]), b"learned"),))


def state_of(tokens: np.ndarray) -> np.ndarray:
    seed = np.random.default_rng(int(tokens.sum()) + len(tokens))
    return seed.integers(0, 256, 300_000, dtype=np.uint8)


def write(path: Path) -> None:
    """The turns of two conversations, one after the other, where two have room."""
    folder = PromptFolder(path, 1 << 21)
    for number in range(2 * TURNS):
        folder.save_copy(made(number % 2, number // 2))
