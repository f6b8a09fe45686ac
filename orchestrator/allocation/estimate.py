"""Estimates of what lower precisions cost: KL divergence from a better tier, in nats.

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

# Tokens over which it is judged whether a text uses experts as the texts of a loss table do. Their
# range is that of windows of as many tokens.
ROUTING_TOKENS = 256


def surprise(counts: np.ndarray) -> np.ndarray:
    """How unusual one use of each expert is, float64 [n_layers, n_expert]: minus the logarithm of
    the expert's share of the uses of its layer, less the mean of that over these uses. counts: the
    uses, [n_layers, n_expert]."""
    share = (counts + 1.0) / (counts + 1.0).sum(axis=1, keepdims=True)
    unusual = -np.log(share)
    found: np.ndarray = unusual - (share * unusual).sum(axis=1, keepdims=True)
    return found


@dataclass(frozen=True, slots=True)
class Routing:
    """How the texts of a loss table use experts.

    surprise: as the function, by the uses in all of these texts. low, high: between them is the
    mean surprise of a use in each window of ROUTING_TOKENS tokens of these texts.
    """

    surprise: np.ndarray
    low: float
    high: float

    def holds(self, counts: np.ndarray) -> bool:
        """Whether uses [n_layers, n_expert] of about ROUTING_TOKENS tokens are within the range.
        True if there are none."""
        n = counts.sum()
        return not n or self.low <= float((counts * self.surprise).sum() / n) <= self.high


@dataclass(frozen=True, slots=True)
class KlEstimate:
    """The KL of one model's tiers in use from the best of them.

    base: the name of the tier that it is counted from. nats: float64 [n_layers, n_expert,
    n_tiers + 1], what an expert with a gate weight of 1 costs a token in each tier, best first, and
    skipped; nothing in the base. gates: float64 [n_layers, n_expert], the mean square of the gate
    weights that each expert had where it was chosen. Texts differ in how much the same errors move
    their tokens, so that nats are those of the sensitive ones: of the windows that the table was
    measured on, nine tenths lose less. spread: what the least sensitive tenth loses at most, as a
    share of nats. routing: None if it is not known.
    """

    base: str
    nats: np.ndarray
    gates: np.ndarray
    spread: float = 1.0
    routing: Routing | None = None
    # [n_layers, n_expert, 256], by the tier as a decision names it.
    _by_tier: np.ndarray = field(init=False)
    # The same memory, of which single values are read faster.
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
        """costs: as nats, against full precision, of these tiers and, last, the base; then skipped:
        float64 [n_layers, n_expert, n_tiers + 2]. Roundings of one expert in two precisions are
        independent, so that their squares add up."""
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
        """Nats of each token in one layer, float64 [T]: the sum of g^2 L over its experts.

        ids int, weights float [T, k]; tiers uint8 [n_expert], the tier that each expert is computed
        in, or SKIP.
        """
        squares = np.square(weights, dtype=np.float64)
        lost: np.ndarray = (squares * self._by_tier[layer, ids, tiers[ids]]).sum(axis=1)
        return lost

    def of_expert(self, layer: int, expert: int, weight: float, tier: int) -> float:
        """Nats of one token by one expert: g^2 L, as of_choice has them."""
        cost: float = self._lost[layer, expert, tier]
        return weight * weight * cost

    def of_uses(self, uses: np.ndarray, tiers: np.ndarray) -> float:
        """Nats of so many uses of each expert [n_layers, n_expert], whose gate weights are as they
        usually are, with each in a tier [n_layers, n_expert]. Of a plan in which every expert is
        resident: uses a token, the hotness, give the mean KL of a token."""
        return float((uses * self.of_use(tiers)).sum())

    def of_use(self, tiers: np.ndarray) -> np.ndarray:
        """Nats of one use of each expert in its tier, float64 [n_layers, n_expert], as of_uses."""
        lost = np.take_along_axis(self._by_tier, tiers[..., None].astype(np.int64), axis=2)
        found: np.ndarray = self.gates * lost[..., 0]
        return found
