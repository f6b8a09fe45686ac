"""Base class of policies that choose the precision (tier) of experts by their recent usage.

Such policies change the tiers of experts in the background.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from orchestrator.allocation.settings import USUAL_RATE, Background
from orchestrator.events import Phase, StepReport
from orchestrator.policy.base import Learned, Policy, PolicyRequirements
from orchestrator.settings import setting

# Maximum number of exchanges that wait for a slot between two updates; each update makes a new
# list.
MAX_QUEUE = 64


@dataclass(frozen=True)
class Intervals(Background):
    """Settings of policies that update their usage statistics after each interval of steps."""

    update_steps: int = setting(
        32,
        "Number of decode steps between two updates of the experts' usage, by which precisions "
        "are chosen; 0 for never. Unless 0, each prefill step also updates the usage.",
        within=(0, 2**24),
    )
    update_ms: int | None = setting(
        None,
        "Milliseconds of compute time between two updates of the experts' usage, instead of "
        "--update-steps; 0 for never.",
        within=(0, 2**31),
    )
    hotness_decay: float = setting(
        0.8,
        "Decay factor (alpha) of the moving average of each expert's usage.",
        within=(0.0, 1.0),
    )
    hysteresis: float = setting(
        0.25,
        "Minimum difference in usage between an expert and the expert that it replaces, as a "
        "multiple of the mean usage in the layer.",
        within=(0.0, 1e6),
    )


def wants_to_learn(wants: PolicyRequirements, settings: Intervals) -> PolicyRequirements:
    """Return a copy of `wants` with the requirements of a policy that learns the usage of experts.

    The copy sets four fields:

    - counts: True, so that step reports have the number of tokens routed to each expert.
    - states: True, so that step reports have each expert's tier (precision), now and after a
      running change.
    - learns: True, because the policy's decisions depend on earlier steps.
    - transition_rate: the limit for changes of tiers, in bytes per second. It is the setting of
      this name, or USUAL_RATE if the setting is None.
    """
    rate = USUAL_RATE if settings.transition_rate is None else settings.transition_rate
    return replace(wants, counts=True, states=True, transition_rate=rate, learns=True)


class Learning(Policy):
    """Base class of policies that learn how often tokens use each expert.

    Each expert has an average usage S, which is updated at the end of each interval of steps
    (DynaExq, section 3.5):

        S = a * S + (1 - a) * f

    In this formula, f is the fraction of the layer's tokens in the interval that used the expert,
    and a = hotness_decay ** w. The setting hotness_decay is from 0 to 1. The exponent w is 1, or
    less if the layer computed only a few tokens in the interval. S then changes less.

    An interval ends after a prefill step, or after update_steps decode steps. If the setting
    update_ms is given, an interval ends after this many milliseconds of compute time instead.
    """

    settings: Intervals

    def _set_up(self) -> None:
        self.updates = 0  # finished intervals
        self._scores: np.ndarray = np.zeros((self.shape.n_layers, self.shape.n_expert))
        self._counts = np.zeros((self.shape.n_layers, self.shape.n_expert), np.int64)
        self._steps = self._tokens = 0
        self._us = 0.0
        # Whether no expert is in transition or waits for one. The policy then has nothing to do
        # until the interval ends. A subclass that needs the counts of each step leaves this False.
        self._at_rest = False

    def recall(self, hotness: np.ndarray) -> None:
        self._scores = np.array(hotness, np.float64).reshape(self._scores.shape)

    def learned(self) -> Learned:
        return Learned(hotness=self._scores.copy())

    def _choose_reports(self) -> None:
        """Request reports about experts only for the phases in which the policy needs them.

        The reports have the number of tokens routed to each expert, and the tiers of the experts.
        """
        phases = tuple(phase for phase in Phase if self._wants_report(phase))
        if phases != self.wants.told_in:
            self.wants = replace(self.wants, told_in=phases)

    def _wants_report(self, phase: Phase) -> bool:
        """Return whether the policy needs a report about experts after a step of this phase.

        The report has the number of tokens routed to each expert, and the tiers of the experts. The
        policy needs it while experts change their tier, and at the end of an interval.
        """
        return not self._at_rest or self._may_end_interval(phase)

    def _may_end_interval(self, phase: Phase) -> bool:
        """Return whether the next step would end an interval if it had this phase."""
        return self.settings.update_ms is not None or self._ends_interval(phase, self._steps + 1)

    def _ends_interval(self, phase: Phase, n_steps: int) -> bool:
        ms, steps = self.settings.update_ms, self.settings.update_steps
        if ms is not None:
            return 0 < 1000 * ms <= self._us
        return steps > 0 and (phase == Phase.PREFILL or n_steps >= steps)

    def _count(self, report: StepReport) -> bool:
        """Add a finished step to the current interval.

        If the step ends the interval, update the average usage of each expert (S) and return True.
        """
        if report.counts is not None:
            self._counts += report.counts
        self._steps += 1
        self._tokens += report.n_tokens
        self._us += report.us
        if not self._ends_interval(report.phase, self._steps):
            return False
        # The last layer computes only prompt tokens with an output, so its average decays less.
        seen = self._counts.sum(axis=1, keepdims=True) / self.shape.n_expert_used
        by_steps = self.settings.update_ms is None
        whole = max(self._tokens, self.settings.update_steps) if by_steps else self._tokens
        kept = self.settings.hotness_decay ** np.minimum(seen / whole, 1.0)
        # The paper uses token counts instead of fractions. With counts, a prefill step of 512
        # tokens would outweigh all decode steps, although it predicts the next steps no better than
        # some dozens of tokens do.
        frequency = self._counts / np.maximum(seen, 1)
        self._scores = kept * self._scores + (1 - kept) * frequency
        self._counts[:] = 0
        self._steps = self._tokens = 0
        self._us = 0.0
        self.updates += 1
        return True
