"""95 % bootstrap intervals, the same for all results of this folder.

A bootstrap draws whole units, such as documents, because the tokens of a unit are not independent.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Draw = npt.NDArray[np.int64]
DRAWS = 2000
_SEED = 1


def draws(n: int, strata: Sequence[Hashable] | None = None) -> Draw:
    """Return how often each bootstrap draw contains each of n units, [DRAWS, n].

    Each draw has n units. Draw 0 contains each unit once, so its value is that of the sample. The
    random seed is fixed.

    strata: the stratum of each unit, such as its kind of text. Each draw has as many units of a
    stratum as the sample. None means one stratum.
    """
    random, found = np.random.default_rng(_SEED), np.ones((DRAWS, n), np.int64)
    labels = [None] * n if strata is None else list(strata)
    for label in dict.fromkeys(labels):
        at = [unit for unit in range(n) if labels[unit] == label]
        found[:, at] = random.multinomial(len(at), np.full(len(at), 1 / len(at)), DRAWS)
    found[0] = 1
    return found


def ends(values: Values) -> tuple[float, float, float]:
    """Return the value of draw 0, and the two ends of the 95 % interval of all draws."""
    low, high = np.percentile(values, (2.5, 97.5))
    return float(values[0]), float(low), float(high)


def interval(values: Values, units: Draw) -> tuple[float, float, float]:
    """Return the mean of values [n], and the two ends of its 95 % interval.

    `units` [n] is the number of each value's unit, such as its document.
    """
    _, at = np.unique(units, return_inverse=True)
    sums, counts = np.bincount(at, values), np.bincount(at)
    drawn = draws(len(counts))
    return ends((drawn @ sums) / (drawn @ counts))


def of_figure(
    figure: Callable[[npt.NDArray[np.int64]], float], drawn: npt.NDArray[np.int64]
) -> tuple[float, float, float]:
    """Return the value of a figure, and the two ends of its 95 % interval.

    - figure: computes the value from the weight of each unit, [n].
    - drawn: the weights in each draw, [DRAWS, n].
    """
    return ends(np.array([figure(weights) for weights in drawn]))


def shown(values: Sequence[float], digits: int = 3) -> str:
    """Format a value with its interval, for example as "0.120 (0.110 to 0.131)"."""
    return "{:.{d}f} ({:.{d}f} to {:.{d}f})".format(*values, d=digits)
