"""What lower precisions cost, foreseen: KL from a better tier, in nats.

An expert's output that is off by a mean square of L moves a token's output by about g^2 L, g its
gate weight, and the KL divergence of a small move grows with its square. So the sum over the
experts of a token, times factors that `moe-edge calibrate` fits once for a model, estimates its KL
in nats. A layer has a factor of its own, since what the first ones lose goes through all others.
Where nobody calibrated, `learned` makes an estimate of what experts put out in answers, and of what
skipping some of them did to answers that were computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from orchestrator.events import SKIP

# What an expert was not seen for counts as so many tokens with its layer's mean.
_PRIOR_TOKENS = 4.0
# Answers from which on their scatter says how well a scale is known.
_LEAST_ANSWERS = 3
# Half of the interval of a scale, as a share, below which no more is asked for, and the answers
# that it takes at least: a few may be alike by chance.
_EXACT_ENOUGH, _ENOUGH_ANSWERS = 0.12, 16
_NORMAL = 1.96
# By what share of its own the KL of an answer of the demo is off, taken as if so many were seen.
_USUAL_SCATTER, _USUAL_ANSWERS = 0.4, 2
_DEPTH = 0.5
# A scale grows by this power of how much less is allowed than it was probed with.
_SMALL_MOVES = 0.3
# An expert puts out much where its weights suit its inputs, and roundings of weights suit none. So
# its error is a smaller share of what it puts out, by this power of how much that is.
_LOUD = 0.3


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
class Probed:
    """What skipping experts did to answers that were computed twice: sums, of which
    nothing of an answer can be told.

    moments: float64 [7], over answers, of t, 1, x, y, x^2, x y and y^2: t an answer's tokens, y
    their KL, x the g^2 L of what they skipped, times depth_prior. gates: float64 [2, n_layers],
    how many experts were used in a layer, and the sum of their squared gate weights.
    """

    moments: np.ndarray
    gates: np.ndarray

    @classmethod
    def none(cls, n_layers: int) -> Probed:
        return cls(np.zeros(7), np.zeros((2, n_layers)))

    @classmethod
    def of_answer(cls, n: int, kl: float, lost: float, gates: np.ndarray) -> Probed:
        return cls(np.array([n, 1.0, lost, kl, lost * lost, lost * kl, kl * kl]), gates)

    def __add__(self, more: Probed) -> Probed:
        return Probed(self.moments + more.moments, self.gates + more.gates)

    @property
    def error(self) -> float | None:
        """Half of the 95 % interval of the logarithm of the scale, from how answers scatter around
        it; None where too few were probed."""
        n, lost, kl = self.moments[1:4].tolist()
        if n < _LEAST_ANSWERS or not (lost > 0 and kl > 0 and self.gates.all()):
            return None
        # The residuals y - (kl / lost) x, squared: the scale is a ratio of sums. A few answers that
        # are alike by chance scatter as others did.
        with np.errstate(all="ignore"):
            each = np.array([1.0, -2.0, 1.0]) * np.float64(kl / lost) ** np.array([2, 1, 0])
            squares = float(each @ self.moments[4:] * np.square(n / kl))
        if not math.isfinite(squares):
            return None  # numbers that no answer has
        squares = max(0.0, squares)
        free = n - 1 + _USUAL_ANSWERS
        scatter = (squares + _USUAL_ANSWERS * _USUAL_SCATTER**2) / free
        # Student's factor, as Cornish and Fisher have it.
        z = _NORMAL
        factor = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free * free)
        return float(factor * math.sqrt(scatter / n))

    @property
    def answers(self) -> int:
        return int(self.moments[1])

    @property
    def scale(self) -> float:
        """What makes nats of g^2 L times depth_prior; where something was lost."""
        return float(self.moments[3] / self.moments[2])

    @property
    def is_exact(self) -> bool:
        """Whether no more has to be known."""
        error = self.error
        enough = self.answers >= _ENOUGH_ANSWERS
        return bool(enough and error is not None and error <= _EXACT_ENOUGH)


def depth_prior(n_layers: int) -> np.ndarray:
    """How an error in each layer counts beside that in the first one, float64 [n_layers]. What goes
    on through a model grows with depth, and an error is a share of it. Calibrated factors of the
    demo model are within 1.43 of this in the mean, within 1.28 of 1 / n and 1.89 of 1: on texts
    unlike the one of its table 1 / n was no better, and what is wrong by depth is skipped most."""
    found: np.ndarray = np.arange(1, n_layers + 1) ** -_DEPTH
    return found


def _power_of_errors(power: np.ndarray, outputs: Outputs, errors: Outputs) -> np.ndarray:
    """The mean square by which each expert's output is off in a lower tier, as Outputs.power has
    that of the output: no more than that, and as much where nothing was sampled. Measured ones of
    the demo model are a half of this in the mean, and none of them is above it. power: of the
    outputs."""
    of_weights = errors.power()
    if of_weights is None:
        return power
    of_layer = outputs.squares.sum(axis=1) / outputs.tokens.sum(axis=1)
    with np.errstate(all="ignore"):
        share = of_weights * (of_layer[:, None] / power) ** _LOUD
    found: np.ndarray = power * np.fmin(share, 1.0)
    return found


def learned(
    tier: str, outputs: Outputs, probed: Probed, errors: Outputs | None = None
) -> KlEstimate | None:
    """What skipping costs in the best tier in use, at the upper end of the scale's interval, and
    lowering where there is another one; None where too little is known.

    errors: of the lower tier's weights, as of orchestrator.engine.sample. KL is a function of the
    whole sum, whichever tiers it comes from, so that the scale of skipping is that of lowering."""
    power, error = outputs.power(), probed.error
    if power is None or error is None:
        return None
    lowered = [] if errors is None else [_power_of_errors(power, outputs, errors)]
    uses, squares = probed.gates
    n_layers, n_expert = outputs.tokens.shape
    with np.errstate(all="ignore"):
        scale = probed.scale * np.exp(error) * depth_prior(n_layers)[:, None, None]
        nats = scale * np.stack([np.zeros_like(power), *lowered, power], axis=2)
        gates = np.repeat((squares / uses)[:, None], n_expert, axis=1)
        moved = float(probed.moments[3] / probed.moments[0])
    if not (np.isfinite(nats).all() and np.isfinite(gates).all() and math.isfinite(moved)):
        return None
    return KlEstimate(tier, nats, gates, moved)


@dataclass(frozen=True, slots=True)
class KlEstimate:
    """The KL of one model's tiers in use from the best of them.

    base: the name of the tier that it is counted from. nats: float64 [n_layers, n_expert,
    n_tiers + 1], what an expert with a gate weight of 1 costs a token in each tier, best first, and
    skipped; nothing in the base. gates: float64 [n_layers, n_expert], the mean square of the gate
    weights that each expert had where it was chosen. probed_at: how far answers moved by which it
    was learned, in nats a token; None where it was calibrated.
    """

    base: str
    nats: np.ndarray
    gates: np.ndarray
    probed_at: float | None = None
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

    @property
    def learned(self) -> bool:
        """Whether nobody calibrated it, so that it is an upper estimate."""
        return self.probed_at is not None

    def growth(self, allowed: float | None) -> float:
        """By what it grows where so much is allowed, in nats a token: small moves cost more than in
        proportion. Where more is allowed than answers were moved by, it is not less."""
        if self.probed_at is None or not allowed:
            return 1.0
        return float(max(1.0, self.probed_at / allowed) ** _SMALL_MOVES)

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
