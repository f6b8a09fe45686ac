"""Adds up the estimated quality loss of the experts that a run computes."""

from __future__ import annotations

import numpy as np

from orchestrator.allocation.estimate import KlEstimate
from orchestrator.events import DecisionBuffer, Phase, RouteEvent, StoreView, served


class LossMeter:
    """Adds up the estimated quality loss (KL divergence) of a run with experts in lower precision.

    - nats, tokens: the loss in nats and the number of tokens since the start. Both are lists with
      one item for prompts (prefill) and one for answers (decode).
    - halved: whether a policy may use only half of its loss budget at present. This is True while
      the text uses other experts than the texts with which losses were measured.
    - halved_tokens: number of tokens that were decoded while `halved` was True.
    """

    def __init__(self, estimate: KlEstimate, exact: bool) -> None:
        """Begin with totals of 0. estimate: estimates the loss of an expert in each precision.

        exact: whether experts are computed in the precision that the policy chose, even if a better
        copy is in memory.
        """
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
        """Add the estimated quality loss of a layer for which the policy has chosen precisions.

        event: the experts that the router chose. view: the experts that are in memory. decision:
        the precisions that the policy chose. The loss becomes part of the totals when `step_done`
        is called, so a failed step adds nothing.
        """
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
        """Return the estimated loss of one layer, in nats, for a step with a single token.

        This function avoids numpy, because a numpy call takes longer than the few additions.
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
        """Whether `set_tiers` must still be called before `add_counts` can be used."""
        return self._tiers is None

    def set_tiers(self, tiers: np.ndarray) -> None:
        """Tell the meter the precision (tier) of each expert, before calls of `add_counts`.

        tiers: uint8 [n_layers, n_expert]; 0 is the best precision.
        """
        if self._tiers is None or not np.array_equal(tiers, self._tiers):
            self._tiers, self._of_use = tiers.copy(), self.estimate.of_use(tiers)

    def add_counts(self, counts: np.ndarray) -> None:
        """Add the estimated quality loss of a step, given how many of its tokens used each expert.

        Use this for a step in which the policy chose no precisions. Call `set_tiers` first, which
        tells the meter the precision of each expert. counts: number of tokens that used each
        expert, [n_layers, n_expert].
        """
        self._in_step += float(np.vdot(counts, self._of_use))

    def step_done(self, phase: int, n_tokens: int) -> None:
        """Add the tokens and the estimated quality loss of a computed step to the totals.

        The loss was estimated before: by `decided` if the policy chose the precisions of the step,
        or else by `add_counts`. phase: Phase.PREFILL or Phase.DECODE. n_tokens: number of tokens of
        the step.
        """
        self.nats[phase] += self._in_step
        self.tokens[phase] += n_tokens
        self.halved_tokens += n_tokens * (self.halved and phase == Phase.DECODE)
        self._in_step = 0.0

    def mean(self, phase: int) -> float | None:
        """Return the mean estimated quality loss since the start, in nats per token.

        phase: Phase.PREFILL for prompts, or Phase.DECODE for answers. Returns None if no tokens of
        this phase were computed.
        """
        return self.since(([0.0 for _ in Phase], [0 for _ in Phase]), phase)

    def mark(self) -> tuple[list[float], list[int]]:
        """Return the totals so far, as the starting point of a measurement with the method `since`.

        The result is (losses in nats, numbers of tokens). Each of the two lists has one item for
        prefill and one for decode.
        """
        return list(self.nats), list(self.tokens)

    def since(self, mark: tuple[list[float], list[int]], phase: int) -> float | None:
        """Return the mean estimated quality loss since a call of `mark`, in nats per token.

        mark: the result of that call. phase: Phase.PREFILL for prompts, or Phase.DECODE for
        answers. Returns None if no tokens of this phase were computed since that call.
        """
        n = self.tokens[phase] - mark[1][phase]
        return (self.nats[phase] - mark[0][phase]) / n if n else None
