"""What precision costs: perplexity of the packed demo model under each policy.

`python -m models.demo.quality HF_DIR --data DIR [MODEL.gguf]` runs the engine itself, token by
token, so that every expert's tier is a decode decision; a prefill would see later tokens. The
texts are the held-out conversations and stories of `models.demo.evaluate`.

A low request that finds the expert in memory in high uses it (DyMoE 4.4.2), so the cost depends
on the slots; `low` is the share of routed experts that were asked for in low or skipped, `in low`
the share of matrices really computed in low.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np

from models.demo.evaluate import Document, held_out_chat, held_out_stories
from models.demo.sources import load_sources
from models.demo.tokenizer import load_tokenizer
from orchestrator.config import Config
from orchestrator.engine import Engine
from orchestrator.events import Phase

DEMO = Path(__file__).parent / "moe-edge-demo.gguf"
SLOTS = 8 << 20  # about 60 % of the experts in q4_k

CASES: tuple[tuple[str, dict[str, object]], ...] = (
    ("q8_0", {"policy": "lru", "high_tier": "q8_0"}),
    ("q4_k", {"policy": "lru", "high_tier": "q4_k"}),
    ("q2_k", {"policy": "lru", "high_tier": "q2_k"}),
    ("4/2, r=0.9", {"policy": "dymoe", "low_tier": "q2_k", "retention": 0.9}),
    ("4/2, r=0.75", {"policy": "dymoe", "low_tier": "q2_k", "retention": 0.75}),
    ("4/0, r=0.9", {"policy": "dymoe", "low_tier": "skip", "retention": 0.9}),
    ("4/0, r=0.75", {"policy": "dymoe", "low_tier": "skip", "retention": 0.75}),
    (
        "4/0, r=0.75, renormalised",
        {"policy": "dymoe", "low_tier": "skip", "retention": 0.75, "renormalize": True},
    ),
)


def nll(engine: Engine, doc: Document, length: int) -> tuple[float, int]:
    """(sum of -log p, count) over a document's flagged tokens, each predicted in one step."""
    ids, learn = doc[0][:length], doc[1][:length]
    total, count = 0.0, 0
    engine.reset()
    for i, token in enumerate(ids[:-1]):
        logits = engine.eval([token], i, phase=Phase.DECODE)[-1].astype(np.float64)
        if learn[i + 1]:
            top = logits.max()
            total += top + math.log(np.exp(logits - top).sum()) - logits[ids[i + 1]]
            count += 1
    return total, count


def measure(
    model: Path, docs: list[Document], settings: dict[str, object], length: int
) -> dict[str, float]:
    """One row: perplexity and what the store really did. docs: token ids and learn flags."""
    config = Config.build(
        model=model, ctx=1024, threads=2, expert_ram=SLOTS, n_ubatch=64, **settings
    )
    with Engine.open(config) as engine:
        sums = [nll(engine, doc, length) for doc in docs]
        stats = engine.store.stats()
        routed = list(stats.routed[Phase.DECODE])
        computed = list(stats.computed[Phase.DECODE])
    asked = sum(routed)
    return {
        "perplexity": math.exp(sum(t for t, _ in sums) / max(1, sum(n for _, n in sums))),
        "tokens": sum(n for _, n in sums),
        "low": (asked - routed[0]) / asked,
        "in_low": sum(computed[1:]) / max(1, sum(computed)),
    }


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m models.demo.quality", description=__doc__)
    p.add_argument("hf_dir", type=Path, help="the checkpoint, for its tokenizer")
    p.add_argument("model", type=Path, nargs="?", default=DEMO)
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--chats", type=int, default=60)
    p.add_argument("--stories", type=int, default=8)
    p.add_argument("--length", type=int, default=256)
    p.add_argument("--json", action="store_true")
    args = p.parse_args(argv)
    tok = load_tokenizer(args.hf_dir)
    sets = {
        "chat": held_out_chat(load_sources(args.data), tok, args.chats),
        "stories": held_out_stories(args.data, tok, args.stories),
    }
    rows = {
        name: {
            kind: measure(args.model, docs, settings, args.length) for kind, docs in sets.items()
        }
        for name, settings in CASES
    }
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    print(f"{'':28}" + "".join(f"{kind + ' ppl':>12}{'low %':>8}{'in low %':>9}" for kind in sets))
    for name, row in rows.items():
        cells = "".join(
            f"{cell['perplexity']:12.3f}{100 * cell['low']:8.1f}{100 * cell['in_low']:9.1f}"
            for cell in row.values()
        )
        print(f"{name:28}{cells}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
