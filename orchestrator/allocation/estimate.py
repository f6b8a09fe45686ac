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
    """Return how unusual one use of each expert is, float64 [n_layers, n_expert].

    An expert that is rarely used in its layer has a high value. The value is -log(p), minus the
    mean of -log(p) over all uses in the layer. p is the expert's fraction of its layer's uses.
    counts: the number of uses, [n_layers, n_expert].
    """
    share = (counts + 1.0) / (counts + 1.0).sum(axis=1, keepdims=True)
    unusual = -np.log(share)
    found: np.ndarray = unusual - (share * unusual).sum(axis=1, keepdims=True)
    return found


@dataclass(frozen=True, slots=True)
class Routing:
    """How often the texts of a loss table use each expert, to recognise texts that differ.

    A loss table gives the quality loss of each expert in lower precisions. It was measured on some
    texts, and is not valid for a text that uses experts very differently.

    - surprise: how unusual one use of each expert is in the measured texts, as returned by the
      function `surprise` of this module, float64 [n_layers, n_expert].
    - low, high: the table is valid for a window of ROUTING_TOKENS tokens if the mean surprise of
      its uses is between these limits.
    """

    surprise: np.ndarray
    low: float
    high: float

    def holds(self, counts: np.ndarray) -> bool:
        """Return whether the loss table, which was measured on other texts, is valid for a text.

        It is valid if the text uses each expert about as often as the measured texts.

        counts: how often each expert was used by about ROUTING_TOKENS tokens of the text,
            [n_layers, n_expert]. If all counts are 0, the result is True.
        """
        n = counts.sum()
        return not n or self.low <= float((counts * self.surprise).sum() / n) <= self.high


@dataclass(frozen=True, slots=True)
class KlEstimate:
    """Estimates how much quality a model loses if experts are computed in lower precisions (tiers).

    The loss of a token is a KL divergence in nats. It is the sum, over the token's experts, of the
    squared gate weight times `nats`.

    - base: the name of the tier without loss, to which other tiers are compared.
    - nats: each expert's loss in each tier for gate weight 1. The last column is for skipping the
      expert. float64 [n_layers, n_expert, n_tiers + 1]. The values are high estimates: nine of ten
      pieces of the measured text lose less.
    - gates: each expert's mean squared gate weight, float64 [n_layers, n_expert].
    - spread: a low estimate divided by the high one. One of ten pieces loses less than the low
      estimate.
    - routing: how often the measured text uses each expert, or None.
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
        """Make an estimate relative to the tier (precision) `base`, from losses of all tiers.

        The given losses are relative to full precision. The loss of a tier relative to `base` is
        the sum of both given losses, because the rounding errors of two tiers are independent. For
        `base` itself, it is 0.

        costs: the given losses in nats for gate weight 1, float64 [n_layers, n_expert, n_tiers +
            2]. On the last axis are the tiers `names`, then `base`, then skipping the expert.
        gates: each expert's mean squared gate weight, float64 [n_layers, n_expert].
        spread: the ratio of a low estimate (10th percentile) to `costs` (90th percentile).
        routing: how often the measured text uses each expert, or None.
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
        """Return the estimated quality loss of many uses of experts, in nats.

        A use is the computation of one expert for one token. Each expert has its usual gate weight
        and is always computed in the same tier (precision).

        uses: how often each expert is used. tiers: the tier of each expert. Both are [n_layers,
        n_expert]. If uses are per token, the result is the mean KL divergence per token.
        """
        return float((uses * self.of_use(tiers)).sum())

    def of_use(self, tiers: np.ndarray) -> np.ndarray:
        """Return the estimated quality loss if one token uses an expert, in nats, for each expert.

        The result is float64 [n_layers, n_expert]. Experts have their usual gate weights. tiers:
        the tier (precision) in which each expert is computed, [n_layers, n_expert].
        """
        lost = np.take_along_axis(self._by_tier, tiers[..., None].astype(np.int64), axis=2)
        found: np.ndarray = self.gates * lost[..., 0]
        return found
