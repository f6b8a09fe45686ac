"""What policies have in common that go by how much each expert was used of late."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from orchestrator.allocation.hotness import Hotness, Intervals
from orchestrator.allocation.settings import rate_of
from orchestrator.allocation.slots import ModelShape, Rules
from orchestrator.events import Phase, StepReport
from orchestrator.policy.base import Policy


class Learning(Policy):
    """A policy that goes by `Hotness`, and changes versions in the background at the usual rate.

    _settled: nothing is under way, or waits to be moved, so that the policy has nothing to do until
    the scores are new. What counts each of its steps leaves it False."""

    learns = True
    settings: Intervals

    def __init__(
        self, shape: ModelShape, settings: Intervals | None = None, rules: Rules | None = None
    ) -> None:
        """Raises PolicyError where the policy cannot work with the model's tiers."""
        super().__init__(shape, settings, rules)
        rate = rate_of(self.settings.transition_rate)
        self.wants = replace(self.wants, counts=True, tiers=True, transition_rate=rate)
        self._hotness = Hotness(shape, self.settings)
        self._settled = False

    @property
    def fresh(self) -> bool:
        """Whether no step was reported yet."""
        return self._hotness.fresh

    @property
    def hotness(self) -> np.ndarray:
        """S, float64 [n_layers, n_expert], a copy; zeros before the first update."""
        return self._hotness.copy()

    def set_hotness(self, scores: np.ndarray) -> None:
        """Starts from the S of an earlier run, [n_layers, n_expert]."""
        self._hotness.set(scores)

    def wants_report(self, phase: Phase) -> bool:
        """Not while every expert is where it should be, and the scores stay as they are."""
        return not self._settled or self._hotness.may_end(phase)

    def _count(self, report: StepReport) -> bool:
        """Counts a step; whether the scores are new."""
        if not self._hotness.count(report):
            return False
        self.updates += 1
        return True
