"""Intervals of routing figures: `python -m models.real.routing MODEL --data FOLDER`.

The figures are those of `moe-edge paper` for skew, reuse, and similarity of neighbouring layers.
Each 95 % interval is a bootstrap over the contexts of the text, so tokens are not taken as
independent.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np

from gguf_tools.columns import aligned
from models.real.command import reporting_errors
from models.real.judge import Values
from models.real.make import report
from orchestrator.config import Config
from orchestrator.lab.eval.arithmetic import cosine
from orchestrator.lab.papers.measured import ROUTED, SEQUENCE, Measured, Source
from orchestrator.lab.study.activations import (
    CHOSEN,
    OUTPUT,
    ROUTER_INPUT,
    ROUTER_LOGITS,
    read_windows,
    recall,
    routers_of,
    top,
)
from orchestrator.lab.study.routing import Routes, changes, sorted_shares
from orchestrator.lab.study.subject import Subject

DRAWS = 1000


def measure(on: Subject) -> dict[str, tuple[float, float, float]]:
    """Return figures by name, each as the value and the ends of its 95 % interval."""
    ids, k = on.layer_ids, on.n_expert_used
    routers = routers_of(on)
    counts, kept, similar, ahead = [], [], [], []
    for window, read in read_windows(on, on.windows):
        chosen = np.stack([read[CHOSEN, il] for il in ids], axis=1).astype(np.int64)
        routes = Routes(window.domain, chosen, on.n_expert)
        counts.append(routes.counts())
        kept.append(changes([routes], [1])[0].kept)
        pairs = list(pairwise(ids))
        similar.append(
            [
                cosine(read[OUTPUT, a], read[OUTPUT, b]).mean()
                for a, b in pairs
                if (OUTPUT, a) in read
                and (OUTPUT, b) in read
                and read[OUTPUT, a].shape == read[OUTPUT, b].shape
            ]
        )
        ahead.append(
            np.mean(
                [
                    recall(top(read[ROUTER_INPUT, a] @ router.T, k), top(read[ROUTER_LOGITS, b], k))
                    for (a, b), router in zip(pairs, routers[1:], strict=True)
                    if router is not None
                ]
            )
        )
    used, cosines = np.array(counts), np.array(similar)
    n = len(used)
    figures: dict[str, Callable[[Values], float]] = {
        "most used expert": lambda draw: sorted_shares(np.tensordot(draw, used, 1))[0],
        "least used expert": lambda draw: sorted_shares(np.tensordot(draw, used, 1))[-1],
        "used by the next step too": lambda draw: float(draw @ np.array(kept) / n),
        "recall of the next layer's router": lambda draw: float(draw @ np.array(ahead) / n),
        "cosine of neighbouring layers, mean": lambda draw: float((draw @ cosines / n).mean()),
        "cosine of neighbouring layers, least": lambda draw: float((draw @ cosines / n).min()),
    }
    draws = np.random.default_rng(1).multinomial(n, np.full(n, 1 / n), DRAWS)
    found = {}
    for name, figure in figures.items():
        low, high = np.percentile([figure(draw) for draw in draws], (2.5, 97.5))
        found[name] = (float(figure(np.ones(n))), float(low), float(high))
    return found


@reporting_errors
def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m models.real.routing", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder of texts")
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, help="compute threads [default: free cores]")
    args = parser.parse_args(argv)
    config = Config.build(model=args.model, threads=args.threads)
    source = Source(args.data, args.max_tokens)
    with (
        tempfile.TemporaryDirectory() as folder,
        Measured(config, Path(folder), source, report, print) as on,
    ):
        subject = on.subject(ROUTED, SEQUENCE)
        rows = [["figure", "value", "95 %"]]
        for name, each in measure(subject).items():
            value, low, high = (f"{one:.3f}" for one in each)
            rows.append([name, value, f"{low} to {high}"])
        print("\n".join([f"{len(subject.windows)} contexts", *aligned(rows)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
