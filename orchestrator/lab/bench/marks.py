"""What happened in a decode step beside decoding, so that slow ones can be told apart."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from typing import Any

import numpy as np

# What is counted of a step: experts that changed their version before it, whether the policy
# renewed its hot sets after it, microseconds of reads that ended in it, pages that the process
# touched for the first time, and how often one of its threads had to leave its core.
MARKS = ("published", "renewed", "read us", "page faults", "preempted")


class Marks:
    """Counts of one step after the other: start() before a part's first step, take() after
    each."""

    def __init__(self, engine: Any) -> None:
        """engine: orchestrator.engine.engine.Engine, in managed mode."""
        self._engine = engine
        self._last = self._now()

    def start(self) -> None:
        self._last = self._now()

    def take(self) -> list[int]:
        """[len(MARKS)], since the last call."""
        last, self._last = self._last, self._now()
        return [now - before for now, before in zip(self._last, last, strict=True)]

    def _now(self) -> tuple[int, ...]:
        stats, usage = self._engine.store.stats(), resource.getrusage(resource.RUSAGE_SELF)
        return (
            stats.experts_promoted + stats.experts_demoted,
            getattr(self._engine.policy, "updates", 0),
            stats.read_us,
            usage.ru_minflt + usage.ru_majflt,
            usage.ru_nivcsw,
        )


def of_slowest(
    steps_ms: Sequence[float], marks: Sequence[Sequence[int]], share: float
) -> dict[str, list[float]]:
    """By name of a mark, its mean over the slowest steps, and over all: [slow, all].
    share: how many of the steps are the slowest."""
    n = max(1, round(share * len(steps_ms)))
    slow = np.argsort(-np.asarray(steps_ms), kind="stable")[:n]
    counts = np.asarray(marks, float)
    means = zip(counts[slow].mean(axis=0).tolist(), counts.mean(axis=0).tolist(), strict=True)
    return {name: list(pair) for name, pair in zip(MARKS, means, strict=True)}
