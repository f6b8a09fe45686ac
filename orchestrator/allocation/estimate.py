"""Estimates of the quality loss of lower precisions: KL divergence from a better tier, in nats.

An expert whose output has a mean squared error of L moves a token's output by about g^2 L, where g
is its gate weight. The KL divergence of a small move grows with the square of the move. So the sum
of g^2 L over the experts of a token, times factors that `moe-edge calibrate` fits once for a model,
estimates the token's KL in nats. Each layer has its own factor, because an error in an early layer
passes through all later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from orchestrator.events import SKIP

# Window length, in tokens, for comparing a text's use of experts with the texts of a loss table.
ROUTING_TOKENS = 256


def surprise(counts: np.ndarray) -> np.ndarray:
    """Return a number for each expert that is high if the expert is rarely used in its layer.

    The result is float64 [n_layers, n_expert]. The value is -log(p), minus the mean of -log(p) over
    all uses in the layer. p is the expert's fraction of its layer's uses. counts: the number of
    uses, [n_layers, n_expert].
    """
    share = (counts + 1.0) / (counts + 1.0).sum(axis=1, keepdims=True)
    unusual = -np.log(share)
    found: np.ndarray = unusual - (share * unusual).sum(axis=1, keepdims=True)
    return found


@dataclass(frozen=True, slots=True)
class Routing:
    """Recognises texts for which a loss table is not valid, by the experts that the texts use.

    A loss table gives the quality loss of each expert in lower precisions, measured on some texts.
    It is not valid for a text that uses rare experts much more often, or much less often, than
    these texts.

    - surprise: a number for each expert, which is high if the measured texts rarely use the expert,
      float64 [n_layers, n_expert]. The function `surprise` computes it.
    - low, high: limits for a piece of text with ROUTING_TOKENS tokens. The mean of `surprise` is
      taken over all uses of experts by these tokens. The table is valid if this mean is from `low`
      to `high`.
    """

    surprise: np.ndarray
    low: float
    high: float

    def holds(self, counts: np.ndarray) -> bool:
        """Return whether a loss table is valid for a text that uses each expert `counts` times.

        A loss table gives the quality loss of each expert in lower precisions. It is not valid for
        a text that uses experts very differently than the texts on which it was measured.

        counts: the uses of each expert by about ROUTING_TOKENS tokens of the text, [n_layers,
            n_expert]. If all counts are 0, the table counts as valid.
        """
        n = counts.sum()
        return not n or self.low <= float((counts * self.surprise).sum() / n) <= self.high


@dataclass(frozen=True, slots=True)
class KlEstimate:
    """Estimates how much quality a model loses if experts are computed in lower precisions (tiers).

    The quality loss of a token is a KL divergence in nats. The estimate is a sum over the token's
    experts: the expert's squared gate weight, times the value in `nats` for the expert and its
    tier.

    - base: the name of the tier with loss 0. The losses are relative to this tier.
    - nats: high estimates of the losses for gate weight 1, float64 [n_layers, n_expert, n_tiers +
      1]. The last column is for skipping the expert.
    - gates: each expert's mean squared gate weight, float64 [n_layers, n_expert].
    - spread: `nats` times this factor gives low estimates. For 8 of 10 pieces of the measured text,
      the loss was between the low and the high estimate.
    - routing: recognises texts for which the estimate is not valid, or None.
    """

    base: str
    nats: np.ndarray
    gates: np.ndarray
    spread: float = 1.0
    routing: Routing | None = None
    # [n_layers, n_expert, 256], indexed by tier or SKIP.
    _by_tier: np.ndarray = field(init=False)
    # The same memory as a memoryview, which is faster for single values.
    _lost: memoryview = field(init=False)

    @classmethod
    def of_costs(
        cls,
        costs: np.ndarray,
        names: Sequence[str],
        base: str,
        gates: np.ndarray,
        spread: float = 1.0,
        routing: Routing | None = None,
    ) -> KlEstimate:
        """Create a KlEstimate relative to the tier `base`, from losses relative to full precision.

        Outputs of another tier (precision) differ from those of `base` by the rounding errors of
        both tiers. These errors are independent, so their losses add up: the loss of the tier
        relative to `base` is the sum of the losses of both in `costs`. The loss of `base` is 0.

        - costs: the losses relative to full precision, in nats for gate weight 1, float64
          [n_layers, n_expert, n_tiers + 2]. The last axis has the tiers in `names`, then `base`
          (again, if `names` includes it), then skipping the expert. For names = ["q8_0", "q4_k"]
          and base = "q8_0", it is q8_0, q4_k, q8_0, skip.
        - names: the n_tiers tiers of the estimate. They may include `base`.
        - gates: each expert's mean squared gate weight, float64 [n_layers, n_expert].
        - spread: factor that turns `costs`, which are high estimates, into low estimates.
        - routing: recognises texts for which the estimate is not valid, or None.
        """
        nats = np.delete(costs, -2, axis=2) + costs[..., -2:-1]
        if base in names:
            nats[..., list(names).index(base)] = 0
        return cls(base, nats, gates, spread, routing)

    def __post_init__(self) -> None:
        by_tier = np.zeros((*self.nats.shape[:2], 256))
        by_tier[..., : self.nats.shape[2] - 1] = self.nats[..., :-1]
        by_tier[..., SKIP] = self.nats[..., -1]
        object.__setattr__(self, "_by_tier", by_tier)
        object.__setattr__(self, "_lost", by_tier.data)

    def of_choice(
        self, layer: int, ids: np.ndarray, weights: np.ndarray, tiers: np.ndarray
    ) -> np.ndarray:
        """Return the estimated quality loss of each token in one layer, in nats, float64 [T].

        The loss of a token is a sum over its k experts: the squared gate weight of the expert,
        times the expert's loss in its tier according to the field `nats`.

        - ids, weights: the k experts of each of T tokens and their gate weights, [T, k].
        - tiers: the tier (precision) in which each expert is computed, or SKIP, uint8 [n_expert].
        """
        squares = np.square(weights, dtype=np.float64)
        lost: np.ndarray = (squares * self._by_tier[layer, ids, tiers[ids]]).sum(axis=1)
        return lost

    def of_expert(self, layer: int, expert: int, weight: float, tier: int) -> float:
        """Return the estimated loss of a token if an expert is computed in this tier, in nats.

        weight: the gate weight of the expert for the token. tier: a tier or SKIP.
        """
        cost: float = self._lost[layer, expert, tier]
        return weight * weight * cost

    def of_uses(self, uses: np.ndarray, tiers: np.ndarray) -> float:
        """Return the estimated total quality loss of many uses of experts, a KL divergence in nats.

        A use is the computation of one expert for one token. Each use counts with the expert's mean
        loss, which `of_use` returns.

        uses: the number of uses of each expert, [n_layers, n_expert]. With numbers for a text, the
            result is the loss of the whole text. With mean numbers per token, the result is the
            mean loss per token.
        tiers: the tier (precision) in which each expert is computed, [n_layers, n_expert].
        """
        return float((uses * self.of_use(tiers)).sum())

    def of_use(self, tiers: np.ndarray) -> np.ndarray:
        """Return each expert's mean quality loss per use by a token, float64 [n_layers, n_expert].

        The loss is an estimated KL divergence in nats, relative to computing the expert in the tier
        `base`. Each use is assumed to have the expert's mean squared gate weight, which is in the
        field `gates`.

        tiers: the tier (precision) in which each expert is computed, or SKIP, [n_layers, n_expert].
        """
        lost = np.take_along_axis(self._by_tier, tiers[..., None].astype(np.int64), axis=2)
        found: np.ndarray = self.gates * lost[..., 0]
        return found
