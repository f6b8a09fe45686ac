"""Adds up the estimated quality loss of the experts that a run computes."""

from __future__ import annotations

import numpy as np

from orchestrator.allocation.estimate import KlEstimate
from orchestrator.events import DecisionBuffer, Phase, RouteEvent, StoreView, served


class LossMeter:
    """Adds up the estimated quality loss of the experts that a run computes.

    nats and tokens: totals by phase since the start. halved: whether the limit of a policy with a
    loss budget is halved now. halved_tokens: tokens of answers that were decoded while it was.
    """

    def __init__(self, estimate: KlEstimate, exact: bool) -> None:
        """exact: the decided tier is computed even if a better copy is in memory."""
        self.estimate = estimate
        # Whether any tier in use has a loss, skipping aside; and whether the best one has.
        self.costs = bool(estimate.nats[..., :-1].any())
        self._best_costs = bool(estimate.nats[..., 0].any())
        self._exact = exact
        self._step = -1
        self._in_step = 0.0
        self._tiers: np.ndarray | None = None
        self._of_use = np.zeros(estimate.gates.shape)
        self.nats = [0.0 for _ in Phase]
        self.tokens = [0 for _ in Phase]
        self.halved, self.halved_tokens = False, 0

    def decided(self, event: RouteEvent, view: StoreView, decision: DecisionBuffer) -> None:
        """Count one layer of a step after its decision. The counts of a failed step are dropped."""
        if event.step != self._step:
            self._step = event.step
            self._in_step = 0.0
        if event.n_tokens == 1:
            self._in_step += self._of_token(event, view, decision)
            return
        tiers = decision.tier_array
        if not (self._best_costs or tiers.any()):
            return
        if not self._exact:
            tiers = served(tiers, view.resident_array[event.layer])
        ids, weights = event.ids_array, event.weights_array
        self._in_step += float(self.estimate.of_choice(event.layer, ids, weights, tiers).sum())

    def _of_token(self, event: RouteEvent, view: StoreView, decision: DecisionBuffer) -> float:
        """Return the nats of a step's only token in one layer.

        It does without numpy, whose calls would take longer than the rest.
        """
        layer, ids, asked, lost = event.layer, event.ids.tolist(), decision.tier, 0.0
        costly = [at for at, expert in enumerate(ids) if asked[expert] or self._best_costs]
        for at in costly:
            expert = ids[at]
            tier = asked[expert]
            if not self._exact:
                tier = served(tier, view.resident[layer][expert])
            lost += self.estimate.of_expert(layer, expert, event.weights[at], tier)
        return lost

    @property
    def needs_tiers(self) -> bool:
        """Whether `holds` was not called yet."""
        return self._tiers is None

    def holds(self, tiers: np.ndarray) -> None:
        """Set the tiers in which experts are computed, uint8 [n_layers, n_expert].

        They apply from now on in steps in which the policy is not asked.
        """
        if self._tiers is None or not np.array_equal(tiers, self._tiers):
            self._tiers, self._of_use = tiers.copy(), self.estimate.of_use(tiers)

    def counted(self, counts: np.ndarray) -> None:
        """Count a step in which the policy was not asked, in the tiers that `holds` set.

        counts: as StepReport.counts.
        """
        self._in_step += float(np.vdot(counts, self._of_use))

    def step_done(self, phase: int, n_tokens: int) -> None:
        """Add the losses of a step that has been computed."""
        self.nats[phase] += self._in_step
        self.tokens[phase] += n_tokens
        self.halved_tokens += n_tokens * (self.halved and phase == Phase.DECODE)
        self._in_step = 0.0

    def mean(self, phase: int) -> float | None:
        """Return the mean nats per token of a phase; None if it had no tokens."""
        return self.since(([0.0 for _ in Phase], [0 for _ in Phase]), phase)

    def mark(self) -> tuple[list[float], list[int]]:
        """Return the totals until now, for `since`."""
        return list(self.nats), list(self.tokens)

    def since(self, mark: tuple[list[float], list[int]], phase: int) -> float | None:
        """Return the mean nats per token of a phase since a mark; None if it had no tokens."""
        n = self.tokens[phase] - mark[1][phase]
        return (self.nats[phase] - mark[0][phase]) / n if n else None
