"""How many experts of each layer are critical (DyMoE, section 4.3)."""

from __future__ import annotations

import math
from bisect import bisect_right

from orchestrator.errors import ConfigError

SCHEDULES = ("cosine", "linear", "flat")
COSINE, LINEAR, FLAT = SCHEDULES

# r(l) * M is exact in theory where it lands on an integer; the ceiling must not turn
# rounding noise into one more expert.
_NOISE = 1e-9


def _depth(schedule: str, n_layers: int) -> list[float]:
    """c(l), the schedule's shape from 1 in the first layer to 0 in the last; flat: 0 in all."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"unknown schedule '{schedule}'; known: {', '.join(SCHEDULES)}")
    if schedule == FLAT or n_layers == 1:
        return [0.0] * n_layers
    places = [layer / (n_layers - 1) for layer in range(n_layers)]
    if schedule == LINEAR:
        return [1 - place for place in places]
    return [(math.cos(math.pi * place) + 1) / 2 for place in places]


def ratios(lam: float, n_layers: int, schedule: str = COSINE) -> list[float]:
    """r(l) = (1 - lambda) * c(l) + lambda, the share of critical experts in MoE layer l.

    cosine: c(l) = (cos(pi * l / (L-1)) + 1) / 2, eq. 4, with L = n_layers. To compare with:
    linear, c(l) = 1 - l / (L-1); flat, r(l) = lambda. With one layer, r(0) = lambda.
    Raises ConfigError for another name.
    """
    return [(1 - lam) * c + lam for c in _depth(schedule, n_layers)]


def critical_count(ratio: float, m: int) -> int:
    """t_l = ceil(r(l) * M), eq. 5, at least 1: lambda = 0 alone would leave the last layer
    of a 4/0 plan without any expert."""
    return min(m, max(1, math.ceil(ratio * m - _NOISE)))


def critical_counts(lam: float, n_layers: int, m: int, schedule: str = COSINE) -> list[int]:
    """t_l of every layer."""
    return [critical_count(r, m) for r in ratios(lam, n_layers, schedule)]


def realised(counts: list[int], m: int) -> float:
    """Mean of t_l / M over the MoE layers."""
    return sum(counts) / (m * len(counts))


def solve(
    retention: float, n_layers: int, m: int, schedule: str = COSINE
) -> tuple[float, list[int]]:
    """(lambda, t_l) such that the mean of t_l / M comes nearest to the user's retention.

    M is the number of experts that t_l is taken of: those a token selects when decoding, those
    that a prompt uses in prefill. lambda lies in [0, 1], so shares below about one half cannot be
    reached but with the flat schedule: eq. 4 keeps the mean of r(l) at (1 + lambda) / 2.
    """
    if n_layers == 1:
        return retention, critical_counts(retention, 1, m, schedule)
    # The counts change only just after a lambda at which some r(l) * M is an integer.
    steps = {0.0, 1.0}
    for c in _depth(schedule, n_layers):
        if c < 1.0:
            for j in range(math.ceil(c * m), m + 1):
                lam = (j / m - c) / (1 - c)
                if 0.0 <= lam <= 1.0:
                    steps.add(lam)
    edges = sorted(steps)

    def mean(index: int) -> float:
        return realised(critical_counts(edges[index], n_layers, m, schedule), m)

    above = bisect_right(range(len(edges)), retention, key=mean)
    choices = [i for i in (above - 1, above) if 0 <= i < len(edges)]
    best = min(choices, key=lambda i: (abs(mean(i) - retention), -i))
    return edges[best], critical_counts(edges[best], n_layers, m, schedule)
