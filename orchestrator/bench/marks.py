"""What happened in a decode step beside decoding, so that slow ones can be told apart."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from typing import Any

import numpy as np

# The bit of each name is 1 << its place.
MARKS = ("published", "renewed", "read", "paged in", "preempted")


class Marks:
    """Marks of one step after the other: start() before a part's first step, take() after each.

    published: versions of experts changed before the step; renewed: the policy renewed its hot
    sets after it; read: a read in the background ended; paged in: the process touched memory that
    was not there; preempted: a thread of it had to leave its core.
    """

    def __init__(self, engine: Any) -> None:
        """engine: orchestrator.engine.Engine, in managed mode."""
        self._engine = engine
        self._last = self._now()

    def start(self) -> None:
        self._last = self._now()

    def take(self) -> int:
        """The bits of the step since the last call."""
        last, self._last = self._last, self._now()
        more = (now > before for now, before in zip(self._last, last, strict=True))
        return sum(1 << place for place, happened in enumerate(more) if happened)

    def _now(self) -> tuple[int, ...]:
        stats, usage = self._engine.store.stats(), resource.getrusage(resource.RUSAGE_SELF)
        return (
            stats.experts_promoted + stats.experts_demoted,
            getattr(self._engine.policy, "updates", 0),
            stats.read_us,
            usage.ru_minflt + usage.ru_majflt,
            usage.ru_nivcsw,
        )


def of_slowest(steps_ms: Sequence[float], marks: Sequence[int], share: float) -> dict[str, Any]:
    """By name of a mark, the part of the slowest steps that has it, and of all: [slow, all].
    share: how many of the steps are the slowest."""
    n = max(1, round(share * len(steps_ms)))
    slow = np.argsort(-np.asarray(steps_ms), kind="stable")[:n]
    bits = np.asarray(marks)
    return {
        name: [float((bits[slow] >> place & 1).mean()), float((bits >> place & 1).mean())]
        for place, name in enumerate(MARKS)
    }
