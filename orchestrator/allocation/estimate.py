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

    It is minus the logarithm of the expert's share of its layer's uses, less the mean of that over
    the uses. counts: the uses, [n_layers, n_expert].
    """
    share = (counts + 1.0) / (counts + 1.0).sum(axis=1, keepdims=True)
    unusual = -np.log(share)
    found: np.ndarray = unusual - (share * unusual).sum(axis=1, keepdims=True)
    return found


@dataclass(frozen=True, slots=True)
class Routing:
    """The usage statistics of a loss table's texts.

    surprise: the result of `surprise` for all uses in these texts. low, high: the range of the mean
    surprise per use, over windows of ROUTING_TOKENS tokens of these texts.
    """

    surprise: np.ndarray
    low: float
    high: float

    def holds(self, counts: np.ndarray) -> bool:
        """Whether the mean surprise of these uses is within the range.

        counts: uses [n_layers, n_expert] of about ROUTING_TOKENS tokens. True if there are none.
        """
        n = counts.sum()
        return not n or self.low <= float((counts * self.surprise).sum() / n) <= self.high


@dataclass(frozen=True, slots=True)
class KlEstimate:
    """The estimated KL divergence of a model's tiers from the best tier in use.

    base: the name of that best tier. nats: the cost of an expert with a gate weight of 1 for a
    token, float64 [n_layers, n_expert, n_tiers + 1], in each tier, best first, and skipped; 0 in
    the base. gates: the mean squared gate weight of each expert when it was chosen, float64
    [n_layers, n_expert].

    The same errors change the tokens of some texts more than those of others. nats are for
    sensitive texts: nine tenths of the windows that the table was measured on lose less. spread:
    the loss that the least sensitive tenth does not exceed, as a share of nats. routing: None if
    unknown.
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
        """Make an estimate from costs against full precision.

        costs: like nats, float64 [n_layers, n_expert, n_tiers + 2], for the tiers `names`, then the
        base, then skipped. The rounding errors of one expert in two precisions are independent, so
        their squares add up.
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
        """Return the nats of each token in one layer, float64 [T].

        They are the sum of g^2 L over its experts.

        ids int, weights float [T, k]; tiers uint8 [n_expert], the tier in which each expert is
        computed, or SKIP.
        """
        squares = np.square(weights, dtype=np.float64)
        lost: np.ndarray = (squares * self._by_tier[layer, ids, tiers[ids]]).sum(axis=1)
        return lost

    def of_expert(self, layer: int, expert: int, weight: float, tier: int) -> float:
        """Return the nats of one expert for one token: g^2 L, as in of_choice."""
        cost: float = self._lost[layer, expert, tier]
        return weight * weight * cost

    def of_uses(self, uses: np.ndarray, tiers: np.ndarray) -> float:
        """Return the nats of `uses` uses of each expert, each expert in one tier.

        The experts have their usual gate weights.

        uses, tiers: [n_layers, n_expert]. If every expert is resident and uses is the usage per
        token (hotness), the result is the mean KL divergence per token.
        """
        return float((uses * self.of_use(tiers)).sum())

    def of_use(self, tiers: np.ndarray) -> np.ndarray:
        """Return the nats of one use of each expert in its tier, float64 [n_layers, n_expert]."""
        lost = np.take_along_axis(self._by_tier, tiers[..., None].astype(np.int64), axis=2)
        found: np.ndarray = self.gates * lost[..., 0]
        return found
