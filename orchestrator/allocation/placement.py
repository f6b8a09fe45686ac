"""The hot experts of a layer for a sequence, and the bits of the others.

See the near-data paper, sections 4.1 and 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from orchestrator.allocation.pools import nominal_bits, shares
from orchestrator.errors import PolicyError
from orchestrator.settings import Settings, setting

PLAIN, IMPORTANCE = "plain", "importance"

# The search enumerates the first two widths, derives the third, and the fourth gets the rest.
MAX_WIDTHS = 4


@dataclass(frozen=True)
class PlacementSettings(Settings):
    """Settings of the placement. With prior_tokens 0 and plain weights, it is the paper's form."""

    near_bits: float = setting(
        3.0,
        "Mean nominal bits of the experts of a layer that are not hot, such as 3 or 2.5.",
        within=(1.0, 32.0),
    )
    near_weights: str = setting(
        IMPORTANCE,
        "How bits are distributed: importance (by losses weighted with each expert's usage) or "
        "plain (by losses alone, as in the paper).",
        choices=(IMPORTANCE, PLAIN),
    )
    importance_mix: float = setting(
        0.5,
        "Share of activation counts in an expert's importance (alpha); the rest is gate sums.",
        within=(0.0, 1.0),
    )
    prior_tokens: float = setting(
        64.0,
        "Weight of the profile of earlier runs, in prompt tokens; 0 for none, as in the paper.",
        within=(0.0, 1e6),
    )


def best_of_each_width(tiers: Sequence[str]) -> list[str]:
    """Return the best of these tiers for each width in nominal bits, widest first.

    tiers: best first.
    """
    by_bits = {nominal_bits(tier): tier for tier in reversed(tiers)}
    return [by_bits[bits] for bits in sorted(by_bits, reverse=True)]


def importance(
    counts: np.ndarray,
    gates: np.ndarray,
    profile: np.ndarray,
    settings: PlacementSettings,
    n_expert_used: int,
) -> np.ndarray:
    """Return S = a P~ + (1 - a) W~ of section 4.1, float64 [n_layers, n_expert], rows sum to 1.

    counts P: uses of each expert; gates W: sums of its routing weights as the model applies them;
    profile: earlier usage, in any unit; all [n_layers, n_expert]. The paper's Norm is the division
    by the layer's sum. The profile counts as prior_tokens more tokens: P~ = (P + n0 k pi) / sum,
    where pi is the profile's shares, and W~ likewise.
    """
    pi = shares(profile)
    used = counts.sum(axis=1, keepdims=True, dtype=np.float64)
    prior = settings.prior_tokens * n_expert_used
    weight = np.where(used > 0, prior / np.where(used > 0, used + prior, 1), 1.0)
    mix = settings.importance_mix
    own = mix * shares(counts, pi) + (1 - mix) * shares(gates, pi)
    scores: np.ndarray = (1 - weight) * own + weight * pi
    return scores


def bit_budget(n_cold: int, settings: PlacementSettings) -> int:
    """Return the total nominal bits of the n_cold experts of a layer that are not hot."""
    return int(n_cold * settings.near_bits + 1e-9)


def place(
    scores: np.ndarray,
    n_hot: int,
    losses: np.ndarray,
    bits: Sequence[int],
    settings: PlacementSettings,
    most: Sequence[int] | None = None,
) -> np.ndarray:
    """Return the tier of each expert, uint8 [n_layers, n_expert].

    The n_hot most important experts of each layer have tier 0, ties by index. Experts with bits[i]
    have tier 1 + i.

    scores: S [n_layers, n_expert]. losses: float64 [n_layers, n_expert, len(bits)]. Experts that
    are not hot take at most near_bits on average, floor(E_n * near_bits) together. most: the
    maximum number of experts of a layer for each of bits. Raises PolicyError if the bits do not
    suffice.
    """
    tiers = np.zeros(scores.shape, np.uint8)
    order = np.argsort(-scores, axis=1, kind="stable")
    budget = bit_budget(scores.shape[1] - n_hot, settings)
    for layer, ranked in enumerate(order):
        cold = ranked[n_hot:]
        weights = scores[layer, cold] if settings.near_weights == IMPORTANCE else None
        counts = prefix_split(losses[layer, cold], bits, budget, weights, most)
        tiers[layer, cold] = np.repeat(np.arange(1, len(bits) + 1), counts)
    return tiers


def near_tiers(tiers: Sequence[str], asked: str | None) -> list[int]:
    """Return the tiers for experts that are not hot, best first, one of each width.

    tiers: all tiers, best first. asked: comma-separated names, or None for all below the best.
    Raises PolicyError for unknown names and for more than MAX_WIDTHS widths.
    """
    names = list(tiers[1:])
    chosen = names if asked is None else [each.strip().lower() for each in asked.split(",")]
    unknown = [each for each in chosen if each not in names]
    if unknown:
        raise PolicyError(
            f"--near-tiers: {unknown[0]} is not below {tiers[0]} in the file, which "
            f"holds {', '.join(names)} there"
        )
    found = best_of_each_width([each for each in names if each in chosen])
    if len(found) > MAX_WIDTHS:
        raise PolicyError(f"--near-tiers: at most {MAX_WIDTHS} widths, not {len(found)}")
    return [1 + names.index(each) for each in found]


def prefix_split(
    loss: np.ndarray,
    bits: Sequence[int],
    budget_bits: int,
    weights: np.ndarray | None = None,
    most: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return how many experts get each width, n_b for each of bits.

    The most important experts get the widest.

    loss: L_i(b), float64 [E_n, len(bits)], most important expert first. bits: nominal bits per
    weight, falling, at most MAX_WIDTHS; a width that the file lacks is left out, as if its n_b were
    0. budget_bits: the maximum of all experts together, E_n times the paper's mean width. weights:
    the weight of each expert's loss, [E_n]; None for uniform weights, as in the paper. most: the
    maximum number of experts of each width, if slots limit them.

    The result is an exact optimum: a split with the least weighted loss. The search covers every (n
    of the first width, n of the second), and the best n of the third follows from a running maximum
    of prefix sums. The paper spends the whole budget. If losses fall with the width, the optimum
    does so too; otherwise, bits that would increase the loss are left unspent. Ties go to the split
    with more of the wider experts.

    Raises PolicyError if no split meets the budget.
    """
    n = len(loss)
    caps = [n] * len(bits) if most is None else [min(n, each) for each in most]
    if not 1 <= len(bits) <= MAX_WIDTHS or any(a <= b for a, b in pairwise(bits)):
        raise PolicyError(f"a prefix split is of 1 to {MAX_WIDTHS} falling widths, not {bits}")
    counted = loss if weights is None else loss * weights[:, None]
    # Gains over the narrowest width, as prefix sums: C_b(k) of the first k experts.
    sums = np.zeros((len(bits), n + 1))
    np.cumsum((counted[:, -1:] - counted).T, axis=1, out=sums[:, 1:])
    missing = MAX_WIDTHS - len(bits)
    sums = np.concatenate([np.zeros((missing, n + 1)), sums])
    widths = [bits[0]] * missing + list(bits)
    limits = [0] * missing + caps
    extra = [width - bits[-1] for width in widths]

    spare = budget_bits - n * bits[-1]
    first = np.arange(limits[0] + 1)[:, None]
    second = np.arange(limits[1] + 1)[None, :] if missing < 3 else np.zeros((1, 1), np.int64)
    reach = first + second
    rest = spare - extra[0] * first - extra[1] * second
    # The third width covers experts from `reach` to `end`, limited by experts, slots and budget.
    # It ends no earlier than `begin`, so that the slots of the narrowest width hold the rest.
    afford = rest // extra[2] if extra[2] else np.zeros_like(rest)
    end = np.minimum(np.minimum(reach + limits[2], reach + afford), n)
    begin = np.maximum(reach, n - limits[3])
    possible = (rest >= 0) & (reach <= n) & (begin <= end)
    if not possible.any():
        raise PolicyError(
            f"{n} experts in {', '.join(map(str, bits))} bits cannot keep to {budget_bits} bits"
        )
    i, j = np.nonzero(possible)
    reach, n_first = reach[i, j], i
    at = _last_largest(sums[2], begin[i, j], end[i, j])
    gain = (sums[0] - sums[1])[n_first] + (sums[1] - sums[2])[reach] + sums[2][at]
    # Among equal maxima, the last one has the most experts of the first widths.
    chosen = len(gain) - 1 - int(np.argmax(gain[::-1]))
    ends = int(n_first[chosen]), int(reach[chosen]), int(at[chosen])
    counts = (ends[0], ends[1] - ends[0], ends[2] - ends[1], n - ends[2])
    return counts[missing:]


def _last_largest(sums: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the last position of the maximum of sums[begin..end] for each (begin, end).

    sums: prefix sums [n + 1].
    """
    if (sums[1:] >= sums[:-1]).all():
        return end
    n = len(sums)
    places = np.arange(n)
    inside = np.where(places[None, :] >= places[:, None], sums[None, :], -np.inf)
    best = np.maximum.accumulate(inside, axis=1)
    at = np.maximum.accumulate(np.where(inside == best, places[None, :], 0), axis=1)
    places_of: np.ndarray = at[begin, end]
    return places_of
