"""How many bits the cold experts of a layer get: the prefix split of the near-data paper, 4.2."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from orchestrator.errors import PolicyError

# More widths would need another dimension of the search.
MAX_WIDTHS = 4


def prefix_split(
    loss: np.ndarray,
    bits: Sequence[int],
    budget_bits: int,
    weights: np.ndarray | None = None,
    most: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """How many experts get each width, the most important ones the widest: n_b for each of bits.

    loss: float64 [E_n, len(bits)], L_i(b) of each expert, the most important expert first. bits:
    nominal bits a weight, falling, at most MAX_WIDTHS; a width that the file lacks is left out,
    so that its n_b is 0. budget_bits: the most that all experts together may take, E_n times the
    mean width of the paper. weights: [E_n], what a unit of each expert's loss counts; None: alike,
    as in the paper. most: the most experts of each width, where slots limit them.

    Of all such splits it returns one with the least weighted loss, exactly: it looks at every
    (n of the first width, n of the second), and the best n of the third follows from a running
    maximum of prefix sums. The paper spends the whole budget; where losses fall with the width
    that is what the best split does, and where they do not, bits that harm are left unspent.
    Among equals the one with more of the wider experts is taken.

    Raises PolicyError where no split keeps to the budget.
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
    # The third width goes from `reach` to `end`: as far as experts, slots and budget last, and at
    # least so far that the slots of the narrowest one hold what is left.
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
    # The last of the largest has the most experts of the first widths.
    chosen = len(gain) - 1 - int(np.argmax(gain[::-1]))
    ends = int(n_first[chosen]), int(reach[chosen]), int(at[chosen])
    counts = (ends[0], ends[1] - ends[0], ends[2] - ends[1], n - ends[2])
    return counts[missing:]


def _last_largest(sums: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Of prefix sums [n + 1], the last place of the largest of sums[begin..end], of each pair."""
    if (sums[1:] >= sums[:-1]).all():
        return end
    n = len(sums)
    places = np.arange(n)
    inside = np.where(places[None, :] >= places[:, None], sums[None, :], -np.inf)
    best = np.maximum.accumulate(inside, axis=1)
    at = np.maximum.accumulate(np.where(inside == best, places[None, :], 0), axis=1)
    places_of: np.ndarray = at[begin, end]
    return places_of
