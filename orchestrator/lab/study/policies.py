"""Decisions to compare a policy's with. Each wraps the policy that an engine runs, whose slots
stay as planned; a study puts it in the place of `engine.policy`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from orchestrator.allocation.slots import Transition
from orchestrator.events import DecisionBuffer, Phase, RouteEvent, StepReport, StoreView
from orchestrator.policy import Policy


class Wrapper:
    """A policy that is the inner one but for what it decides."""

    def __init__(self, inner: Policy) -> None:
        self.inner = inner

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Whoever asks what a policy is hears of the inner one."""
        return type(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class RandomCritical(Wrapper):
    """As many critical experts in each layer and step as the inner policy has, but any of those
    that the router chose: the null baseline of Figure 3. A seed fixes the choice for each step
    and layer."""

    def __init__(self, inner: Policy, seed: int) -> None:
        super().__init__(inner)
        self._seed = seed

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        """The inner policy's tiers, dealt out anew."""
        self.inner.decide(event, view, out)
        rng = np.random.default_rng((self._seed, event.step, event.layer))
        used = np.unique(event.ids_array)
        out.tier_array[used] = rng.permutation(out.tier_array[used])


class OneLayer(Wrapper):
    """Every expert of one MoE layer in one tier, all others in the best: Figure 5."""

    def __init__(self, inner: Policy, layer: int, tier: int) -> None:
        super().__init__(inner)
        self._layer, self._tier = layer, tier

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        """The tier in that layer; nothing, so the best one, in the others."""
        if event.layer == self._layer:
            out.tier_array[:] = self._tier


class Placed(Wrapper):
    """Every expert stays where it started."""

    def step_done(self, report: StepReport) -> Sequence[Transition]:
        """No transitions."""
        return ()

    def before_answer(self, resident: np.ndarray, target: np.ndarray) -> None:
        """Nor behind a prompt."""


class Counts(Placed):
    """Adds up what a policy that counts is told, and lets it change nothing."""

    def __init__(self, inner: Policy) -> None:
        super().__init__(inner)
        self._total: np.ndarray | None = None
        self.steps = 0

    @property
    def per_step(self) -> np.ndarray:
        """Tokens routed to each expert in a step, the mean, float64 [n_layers, n_expert]."""
        if self._total is None:
            raise ValueError("no step was counted")
        mean: np.ndarray = self._total / self.steps
        return mean

    def wants_report(self, phase: Phase) -> bool:
        """Every step is counted by itself."""
        return True

    def step_done(self, report: StepReport) -> Sequence[Transition]:
        """Counts; no transitions."""
        if report.counts is not None:
            counts = report.counts.astype(np.int64)
            self._total = counts if self._total is None else self._total + counts
            self.steps += 1
        return ()
