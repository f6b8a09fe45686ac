"""The factors that make nats of a loss table: what lowering experts does to a model's answers.

The model reads the text once in its best tier, and then again with a loss in it, a pass for each
kind of it: experts skipped, drawn for each pair of a token and an expert, in one part of the depth,
which is another one in each window; skipped in all layers; and lowered in all layers, drawn for
each expert and step, in one tier after the other. Windows differ by up to eight times in how easily
their answers move, whatever moves them, so that each has a sensitivity of its own c: with the
factors f of the parts,

    KL of a window = c * sum of f g^2 L over its parts.

The passes with skipping give f and c by turns; the mean of c is the scale. A tier has a scale of
its own beside that, since large moves change answers less than in proportion. A token's first
expert is never skipped, as no policy skips it: that costs more than the losses of the others
foretell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orchestrator.cost.losses import Fit
from orchestrator.engine.texts import log_softmax
from orchestrator.errors import ConfigError
from orchestrator.events import SKIP_TIER, DecisionBuffer, RouteEvent
from orchestrator.lab.calibrate.capture import Progress
from orchestrator.lab.calibrate.reader import TextReader
from orchestrator.lab.eval.arithmetic import kl_divergence
from orchestrator.lab.eval.perplexity import ReferencePart

# Shares of the experts that are lowered, and skipped in a part and in all layers: each moves
# answers by about as much as a user allows.
_LOWERED, _ALONE, _SKIPPED = 0.5, 0.25, 0.05
# Parts of the depth with a factor of their own, layers of about as many each.
_PARTS = 8
_TURNS = 32
_SEED = 1
_DRAWS = 1000

# Passes beside those of the lower tiers.
PARTS, ALL = "skip in parts", "skip"


class Moved(NamedTuple):
    """What a pass did to n windows. kl: float64 [n], the mean KL of a token; lost: float64 [n,
    n_layers], the mean g^2 L of a token in each layer."""

    kl: np.ndarray
    lost: np.ndarray


def passes(tiers: Sequence[str]) -> list[tuple[str, str | None]]:
    """(name, the tier that experts are lowered to, None for skipping) of each."""
    return [*((name, None) for name in (PARTS, ALL)), *((tier, tier) for tier in tiers[1:])]


def parts_of(n_layers: int, n_windows: int) -> np.ndarray:
    """The part of the depth that each layer belongs to, int [n_layers]: no more than windows."""
    n = min(_PARTS, n_layers, n_windows)
    return np.arange(n_layers) * n // n_layers


def moved(
    reader: TextReader,
    name: str,
    costs: np.ndarray,
    against: ReferencePart,
    progress: Progress,
) -> Moved:
    """One pass. costs: float64 [n_layers, n_expert], what an expert loses in the pass with a gate
    weight of 1, without factors."""
    n_layers, n_windows = len(costs), len(reader.scored)
    part = parts_of(n_layers, n_windows)
    n_parts = int(part[-1]) + 1
    kl, lost, seen = np.zeros(n_windows), *np.zeros((2, n_windows, n_layers))
    lowers = name not in (PARTS, ALL)
    at = 0

    def change(event: RouteEvent, decision: DecisionBuffer) -> np.ndarray | None:
        layer, of = event.layer, np.array(reader.reading)[event.sequences_array]
        random = np.random.default_rng([_SEED, reader.reading[0], layer])
        squares = np.square(event.weights_array, dtype=np.float64)
        bills = squares * costs[layer, event.ids_array]
        skipped = None
        if lowers:
            chosen = random.random(len(decision.tier_array)) < _LOWERED
            decision.tier_array[chosen] = 1
            bills = bills * chosen[event.ids_array]
        else:
            shares = np.full(len(of), _SKIPPED)
            if name == PARTS:
                shares = np.where(of % n_parts == part[layer], _ALONE, 0.0)
            skipped = random.random(bills.shape) < shares[:, None]
            if event.k > 1:
                skipped[np.arange(len(of)), event.weights_array.argmax(axis=1)] = False
            bills = bills * skipped
        lost[:, layer] += np.bincount(of, bills.sum(axis=1), n_windows)
        seen[:, layer] += np.bincount(of, minlength=n_windows)
        return skipped

    for done, step in enumerate(reader.read(change, masks=not lowers), 1):
        for window, logits in zip(np.array(step.windows)[step.of], step.logits, strict=True):
            row = against.row(at).astype(np.float64)
            kl[window] += kl_divergence(row, log_softmax(logits))
            at += 1
        progress(done / len(reader.steps))
    scored = np.array([each.sum() for each in reader.scored])
    return Moved(kl / scored, lost / np.maximum(seen, 1))


def fitted(tiers: Sequence[str], found: dict[str, Moved], text: str, weights: np.ndarray) -> Fit:
    """tiers: of the file, best first; found: by the names of `passes`; weights: float64 [n], the
    tokens of each window. Raises ConfigError where nothing moves."""
    n_layers = found[ALL].lost.shape[1]
    part = parts_of(n_layers, len(weights))
    n_parts = int(part[-1]) + 1
    weights = weights / weights.sum()

    def by_part(lost: np.ndarray) -> np.ndarray:
        return np.stack([lost[:, part == each].sum(axis=1) for each in range(n_parts)], axis=1)

    every = by_part(found[ALL].lost)
    alone = by_part(found[PARTS].lost)
    of_part = weights * found[PARTS].kl @ (alone > 0)
    factors = np.ones(n_parts)
    for _ in range(_TURNS):
        sensitivity = weights * found[ALL].kl / np.maximum(every @ factors, 1e-300)
        foreseen = sensitivity @ alone
        tells = (of_part > 0) & (foreseen > 0)
        if not (tells.any() and (found[ALL].kl > 0).all()):
            raise ConfigError(
                "the model says the same in every precision, or the text is too short"
            )
        # A part of which a short text says nothing is like the others.
        usual = of_part[tells].sum() / foreseen[tells].sum()
        factors = np.where(tells, of_part / np.where(tells, foreseen, 1), usual)
    factors = factors * float(weights @ found[ALL].kl) / float(weights @ (every @ factors))
    error = spread(weights * found[ALL].kl, weights * (every @ factors))
    scales = {}
    for tier in tiers[1:]:
        foreseen_kl = float(weights @ (by_part(found[tier].lost) @ factors))
        scales[tier] = float(weights @ found[tier].kl) / max(foreseen_kl, 1e-300)
    # The best tier loses nothing, or as little as the next one.
    scales = {tiers[0]: next(iter(scales.values()), 1.0), **scales, SKIP_TIER: 1.0}
    if not all(0 < each < np.inf for each in (*factors, *scales.values())):
        raise ConfigError("the model says the same in every precision, or the text is too short")
    return Fit(tuple(factors[part].tolist()), tuple(scales), text, error, tuple(scales.values()))


def spread(measured: np.ndarray, foreseen: np.ndarray) -> float:
    """The standard error of log(sum of measured / sum of foreseen) over windows [n], drawn anew
    again and again; the draws have a seed of their own."""
    n = len(measured)
    drawn = np.random.default_rng(_SEED).integers(0, n, (_DRAWS, n))
    return float(np.std(np.log(measured[drawn].sum(axis=1) / foreseen[drawn].sum(axis=1))))
