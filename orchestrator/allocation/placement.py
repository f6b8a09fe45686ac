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
    """Settings that decide how many bits per weight each expert gets, by its importance.

    The method is from the paper "Context-Aware Mixture-of-Experts Inference on CXL-Enabled GPU-NDP
    Systems", with two additions. The importance of an expert includes its usage in earlier runs;
    prior_tokens = 0 turns this off. The quality losses of experts are weighted with their
    importance; near_weights = "plain" turns this off.
    """

    near_bits: float = setting(
        3.0,
        "Maximum mean bits per weight, such as 2.5, of a layer's experts that are not in the best "
        "precision. q4_k counts as 4 bits.",
        within=(1.0, 32.0),
    )
    near_weights: str = setting(
        IMPORTANCE,
        "How the policy weights each expert's quality loss when it chooses the lower precisions "
        "with the smallest sum of losses. importance: each loss is multiplied by the expert's "
        "importance (see --importance-mix). plain: all losses count equally.",
        choices=(IMPORTANCE, PLAIN),
    )
    importance_mix: float = setting(
        0.5,
        "Alpha in the importance of an expert: alpha * (share of all uses) + (1 - alpha) * (share "
        "of all gate weights).",
        within=(0.0, 1.0),
    )
    prior_tokens: float = setting(
        64.0,
        "Earlier runs count as much as this many prompt tokens in the importance of an expert. 0 "
        "ignores earlier runs.",
        within=(0.0, 1e6),
    )


def best_of_each_width(tiers: Sequence[str]) -> list[str]:
    """Return the name of the best tier for each number of bits per weight, most bits first.

    The number of bits is the one in the tier's name, such as 4 for q4_k. tiers: names, best first.
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
    """Return the importance of each expert for a conversation, float64 [n_layers, n_expert].

        importance = (1 - w) * (a * C + (1 - a) * G) + w * P

    C is the expert's part of the layer's sum in `counts`, G in `gates`, and P in `profile`. These
    arrays have the shape of the result:

    - counts: how often the conversation used each expert.
    - gates: the sum of the routing weights of these uses.
    - profile: how often earlier runs used each expert.

    a is the setting importance_mix. w is m / (m + n), or 1 if n = 0. Here n is the layer's sum of
    `counts`, and m is the setting prior_tokens times `n_expert_used` (experts per token).
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
    """Return the maximum sum of the bits per weight of a layer's experts in lower precisions.

    It is the number of these experts, `n_cold`, times their allowed average, the setting near_bits.
    The result is rounded down. For example, with near_bits = 2.5, the bits per weight of ten
    experts may add up to 25.
    """
    return int(n_cold * settings.near_bits + 1e-9)


def place(
    scores: np.ndarray,
    n_hot: int,
    losses: np.ndarray,
    bits: Sequence[int],
    settings: PlacementSettings,
    most: Sequence[int] | None = None,
) -> np.ndarray:
    """Return the tier (precision) of each expert, chosen by importance, uint8 [n_layers, n_expert].

    In each layer, the n_hot most important experts get tier 0, the best tier. The next most
    important experts get tier 1, the next tier 2, and so on. The number of experts in each lower
    tier is chosen for the least sum of losses. The mean bits per weight of all experts in lower
    tiers must be at most the setting near_bits.

    - scores: the importance of each expert, [n_layers, n_expert].
    - losses: the quality losses in the lower tiers, [n_layers, n_expert, len(bits)]. They are
      multiplied with `scores` if the setting near_weights is IMPORTANCE.
    - bits: the bits per weight of each lower tier, falling. bits[0] is for tier 1.
    - most: the maximum number of a layer's experts in each lower tier. None for no maximum.

    Raises PolicyError if near_bits is too small.
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
    """Return the near tiers, best first, as indices in `tiers`.

    Near tiers are the precisions for experts that are not in the best precision (tier 0). Of
    several tiers with the same bits per weight, only the best is returned.

    - tiers: the names of all tiers, best first.
    - asked: the names of the lower tiers that the user allows, with commas between them. None
      allows all lower tiers.

    Raises PolicyError for an unknown name, or if the result would have more than MAX_WIDTHS tiers.
    """
    names = list(tiers[1:])
    chosen = names if asked is None else [each.strip().lower() for each in asked.split(",")]
    unknown = [each for each in chosen if each not in names]
    if unknown:
        raise PolicyError(
            f"--near-tiers: the file has no precision {unknown[0]} below {tiers[0]}. Choose from "
            f"{', '.join(names)}"
        )
    found = best_of_each_width([each for each in names if each in chosen])
    if len(found) > MAX_WIDTHS:
        raise PolicyError(
            f"--near-tiers names precisions of {len(found)} different sizes (bits per weight). At "
            f"most {MAX_WIDTHS} different sizes are allowed. Name fewer precisions"
        )
    return [1 + names.index(each) for each in found]


def prefix_split(
    loss: np.ndarray,
    bits: Sequence[int],
    budget_bits: int,
    weights: np.ndarray | None = None,
    most: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Divide experts, sorted by importance, into groups of falling precision with minimal loss.

    Return the size of each group. For example, with bits = (4, 2), the result (3, 5) means that the
    3 most important experts get 4 bits per weight, and the next 5 get 2 bits.

    - loss: the quality loss of each expert with each number of bits, float64 [n, len(bits)]. The
      most important expert is first.
    - bits: the bits per weight of each group, falling. At most MAX_WIDTHS numbers.
    - budget_bits: the maximum sum of the bits per weight of all experts. In the example, the sum is
      3 * 4 + 5 * 2 = 22.
    - weights: a factor for each expert's loss, [n]. None for 1.
    - most: the maximum size of each group. None for no maximum.

    Raises PolicyError if no group sizes are possible within these limits.
    """
    # The result is an exact optimum. The search covers all sizes of the first two groups. The best
    # size of the third group follows from a running maximum of prefix sums, and the fourth group
    # has the rest. Bits that would increase the loss are not spent.
    n = len(loss)
    caps = [n] * len(bits) if most is None else [min(n, each) for each in most]
    if not 1 <= len(bits) <= MAX_WIDTHS or any(a <= b for a, b in pairwise(bits)):
        raise PolicyError(
            f"the bits per weight must be a list of 1 to {MAX_WIDTHS} numbers, each smaller than "
            f"the number before it, not {bits}"
        )
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
            f"--near-bits is too small: the {n} experts below the best precision need more than "
            f"{budget_bits / n:.2f} bits per weight on average (their precisions have "
            f"{', '.join(map(str, bits))} bits). Increase --near-bits"
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
    """Return the last position of the maximum of sums[begin..end], for each pair (begin, end)."""
    if (sums[1:] >= sums[:-1]).all():
        return end
    n = len(sums)
    places = np.arange(n)
    inside = np.where(places[None, :] >= places[:, None], sums[None, :], -np.inf)
    best = np.maximum.accumulate(inside, axis=1)
    at = np.maximum.accumulate(np.where(inside == best, places[None, :], 0), axis=1)
    places_of: np.ndarray = at[begin, end]
    return places_of
