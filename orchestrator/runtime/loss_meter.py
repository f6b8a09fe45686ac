"""The estimated loss of a run's experts, added up token by token."""

from __future__ import annotations

import numpy as np

from orchestrator.allocation.estimate import KlEstimate
from orchestrator.events import DecisionBuffer, Phase, RouteEvent, StoreView, served


class LossMeter:
    """Adds up the estimated loss of the experts of a run.

    nats, tokens: by phase, since the start. halved: whether the limit of a policy that spends a
    loss is halved now; halved_tokens: those of the answers for which it was.
    """

    def __init__(self, estimate: KlEstimate, exact: bool) -> None:
        """exact: a better copy in memory is not used in the place of the tier that was decided."""
        self.estimate = estimate
        # Whether anything in use, but for skipping, costs anything; the best tier in use alone.
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
        """One layer of a step, once it is decided. What a failed step counted is dropped."""
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
        """The nats of a step's only token in one layer, without numpy, whose calls would take
        longer than all else."""
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
        """Whether nobody said yet in which tiers experts are computed where nobody decides."""
        return self._tiers is None

    def holds(self, tiers: np.ndarray) -> None:
        """In which tiers experts are computed from here on where nobody decides: uint8 [n_layers,
        n_expert]."""
        if self._tiers is None or not np.array_equal(tiers, self._tiers):
            self._tiers, self._of_use = tiers.copy(), self.estimate.of_use(tiers)

    def counted(self, counts: np.ndarray) -> None:
        """A step in which nobody decided; counts as of StepReport, in the tiers of holds."""
        self._in_step += float(np.vdot(counts, self._of_use))

    def step_done(self, phase: int, n_tokens: int) -> None:
        """Add the losses of a step that has been computed."""
        self.nats[phase] += self._in_step
        self.tokens[phase] += n_tokens
        self.halved_tokens += n_tokens * (self.halved and phase == Phase.DECODE)
        self._in_step = 0.0

    def mean(self, phase: int) -> float | None:
        """Mean nats of a token of a phase; None where there was none."""
        return self.since(([0.0 for _ in Phase], [0 for _ in Phase]), phase)

    def mark(self) -> tuple[list[float], list[int]]:
        """Where it stands, for `since`."""
        return list(self.nats), list(self.tokens)

    def since(self, mark: tuple[list[float], list[int]], phase: int) -> float | None:
        """Mean nats of a token of a phase since a mark; None where there was none."""
        n = self.tokens[phase] - mark[1][phase]
        return (self.nats[phase] - mark[0][phase]) / n if n else None
