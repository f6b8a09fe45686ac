"""What lower precisions cost, foreseen: KL from a better tier, in nats.

An expert's output that is off by a mean square of L moves a token's output by about g^2 L, g its
gate weight, and the KL divergence of a small move grows with its square. So the sum over the
experts of a token, times factors that `moe-edge calibrate` fits once for a model, estimates its KL
in nats. A layer has a factor of its own, since what the first ones lose goes through all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from orchestrator.events import SKIP

# What an expert was not seen for counts as so many tokens with its layer's mean.
_PRIOR_TOKENS = 4.0


@dataclass(frozen=True, slots=True)
class Outputs:
    """What experts put out: what it costs to skip them, before factors make nats of it.

    float64 [n_layers, n_expert] both. tokens: for how many each was computed; squares: the sum over
    them of the mean square of its output, not weighted by its gate.
    """

    tokens: np.ndarray
    squares: np.ndarray

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> Outputs:
        return cls(np.zeros(shape), np.zeros(shape))

    def __add__(self, more: Outputs) -> Outputs:
        return Outputs(self.tokens + more.tokens, self.squares + more.squares)

    def __sub__(self, less: Outputs) -> Outputs:
        return Outputs(self.tokens - less.tokens, self.squares - less.squares)

    def scaled(self, share: float) -> Outputs:
        """As if less had been seen."""
        return Outputs(self.tokens * share, self.squares * share)

    def finite(self) -> Outputs:
        """Without experts whose outputs were no numbers."""
        fine = np.isfinite(self.squares)
        return Outputs(np.where(fine, self.tokens, 0.0), np.where(fine, self.squares, 0.0))

    def power(self) -> np.ndarray | None:
        """The mean square of each expert's output, float64 [n_layers, n_expert]. What was rarely
        seen is drawn to the mean of its layer's tokens; None where a layer was never seen."""
        of_layer = self.tokens.sum(axis=1, keepdims=True)
        if not of_layer.all():
            return None
        prior = _PRIOR_TOKENS * self.squares.sum(axis=1, keepdims=True) / of_layer
        found: np.ndarray = (self.squares + prior) / (self.tokens + _PRIOR_TOKENS)
        return found


@dataclass(frozen=True, slots=True)
class KlEstimate:
    """The KL of one model's tiers in use from the best of them.

    base: the name of the tier that it is counted from. nats: float64 [n_layers, n_expert,
    n_tiers + 1], what an expert with a gate weight of 1 costs a token in each tier, best first, and
    skipped; nothing in the base. gates: float64 [n_layers, n_expert], the mean square of the gate
    weights that each expert had where it was chosen.
    """

    base: str
    nats: np.ndarray
    gates: np.ndarray
    # [n_layers, n_expert, 256], by the tier as a decision names it.
    _by_tier: np.ndarray = field(init=False)
    # The same memory, of which single values are read faster.
    _lost: memoryview = field(init=False)

    @classmethod
    def of_costs(
        cls, costs: np.ndarray, names: Sequence[str], base: str, gates: np.ndarray
    ) -> KlEstimate:
        """costs: as nats, against full precision, of these tiers and, last, the base; then skipped:
        float64 [n_layers, n_expert, n_tiers + 2]. Roundings of one expert in two precisions are
        independent, so that their squares add up."""
        nats = np.delete(costs, -2, axis=2) + costs[..., -2:-1]
        if base in names:
            nats[..., list(names).index(base)] = 0
        return cls(base, nats, gates)

    def __post_init__(self) -> None:
        by_tier = np.zeros((*self.nats.shape[:2], 256))
        by_tier[..., : self.nats.shape[2] - 1] = self.nats[..., :-1]
        by_tier[..., SKIP] = self.nats[..., -1]
        object.__setattr__(self, "_by_tier", by_tier)
        object.__setattr__(self, "_lost", by_tier.data)

    def __deepcopy__(self, _memo: object) -> KlEstimate:
        """Nothing of it changes; and a view of memory cannot be copied."""
        return self

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
