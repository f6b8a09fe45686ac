"""What policies have in common that place experts by how much each was used of late, and change
versions in the background."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from orchestrator.allocation.settings import USUAL_RATE, Background
from orchestrator.events import Phase, StepReport
from orchestrator.policy.base import Learned, Policy, Wants
from orchestrator.settings import setting

# Exchanges that wait for a slot between two updates; each update makes the list anew.
MAX_QUEUE = 64


@dataclass(frozen=True)
class Intervals(Background):
    """Settings of policies that learn from intervals."""

    update_steps: int = setting(
        32,
        "Decode steps between two updates of the hot sets, 0 for none; a prompt's part ends an "
        "interval too.",
        within=(0, 2**24),
    )
    update_ms: int | None = setting(
        None,
        "Milliseconds of steps between two updates of the hot sets, as in the paper, in the place "
        "of a number of steps; 0 for none.",
        within=(0, 2**31),
    )
    hotness_decay: float = setting(
        0.8, "The alpha of the hotness's moving average.", within=(0.0, 1.0)
    )
    hysteresis: float = setting(
        0.25,
        "By how many mean scores of its layer an expert has to be hotter than the one that it "
        "replaces.",
        within=(0.0, 1e6),
    )


def wants_to_learn(wants: Wants, settings: Intervals) -> Wants:
    """The same with what a policy requires that learns from intervals."""
    rate = USUAL_RATE if settings.transition_rate is None else settings.transition_rate
    return replace(wants, counts=True, states=True, transition_rate=rate, learns=True)


class Learning(Policy):
    """A policy that goes by S, a moving average over intervals of how much an expert is used.

    S <- a S + (1 - a) f (DynaExq, 3.5) at the end of each interval, with f the share of the
    interval's tokens that use the expert, 0 to 1, where the paper counts tokens: a prompt's part of
    512 tokens says no more of what comes than some dozens do. a = alpha ** w, with w the part of a
    whole interval that the layer saw: 1 by the clock; else as many of update_steps as there were
    tokens, 1 at most; of a prompt the last layer sees only tokens with an output, and forgets
    accordingly little.

    An interval is update_steps decode steps, and a prompt's part ends it too; or, as in the paper,
    update_ms of the steps' own time, as the step reports tell it.

    updates: intervals that ended. _scores: S, float64 [n_layers, n_expert]; zeros before the first
    of them. _at_rest: nothing is under way, or waits to be moved, so that the policy has nothing to
    do until the scores are new; what counts each of its steps leaves it False.
    """

    settings: Intervals

    def _set_up(self) -> None:
        self.updates = 0
        self._scores: np.ndarray = np.zeros((self.shape.n_layers, self.shape.n_expert))
        self._counts = np.zeros((self.shape.n_layers, self.shape.n_expert), np.int64)
        self._steps = self._tokens = 0
        self._us = 0.0
        self._at_rest = False

    def recall(self, hotness: np.ndarray) -> None:
        self._scores = np.array(hotness, np.float64).reshape(self._scores.shape)

    def learned(self) -> Learned:
        return Learned(hotness=self._scores.copy())

    def _choose_reports(self) -> None:
        """Set in which steps the next report has to carry what this policy wants."""
        told = tuple(phase for phase in Phase if self._wants_report(phase))
        if told != self.wants.told_in:
            self.wants = replace(self.wants, told_in=told)

    def _wants_report(self, phase: Phase) -> bool:
        """Not while every expert is where it should be, and the scores stay as they are."""
        return not self._at_rest or self._may_end_interval(phase)

    def _may_end_interval(self, phase: Phase) -> bool:
        """Whether the next step may end an interval, if it is one of this phase."""
        return self.settings.update_ms is not None or self._ends_interval(phase, self._steps + 1)

    def _ends_interval(self, phase: Phase, n_steps: int) -> bool:
        ms, steps = self.settings.update_ms, self.settings.update_steps
        if ms is not None:
            return 0 < 1000 * ms <= self._us
        return steps > 0 and (phase == Phase.PREFILL or n_steps >= steps)

    def _count(self, report: StepReport) -> bool:
        """Counts a step; whether it ended an interval, so that the scores are new."""
        if report.counts is not None:
            self._counts += report.counts
        self._steps += 1
        self._tokens += report.n_tokens
        self._us += report.us
        if not self._ends_interval(report.phase, self._steps):
            return False
        seen = self._counts.sum(axis=1, keepdims=True) / self.shape.n_expert_used
        by_steps = self.settings.update_ms is None
        whole = max(self._tokens, self.settings.update_steps) if by_steps else self._tokens
        kept = self.settings.hotness_decay ** np.minimum(seen / whole, 1.0)
        frequency = self._counts / np.maximum(seen, 1)
        self._scores = kept * self._scores + (1 - kept) * frequency
        self._counts[:] = 0
        self._steps = self._tokens = 0
        self._us = 0.0
        self.updates += 1
        return True
