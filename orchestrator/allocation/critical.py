"""How many of a token's experts are critical, by their gates and by depth (DyMoE, sections 4.2 and
4.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator.errors import ConfigError

SCHEDULES = ("cosine", "linear", "flat")
COSINE, LINEAR, FLAT = SCHEDULES


def gate_order(weights: Sequence[float]) -> Sequence[int]:
    """Places of one token's routed experts, the most important first: I(E_j) = g_j, eq. 3,
    with g_j its routing weight [k]. Equal weights keep the router's order, which is that of
    the weights unless the router selects by something else (a bias, groups)."""
    places = range(len(weights))
    if sorted(weights, reverse=True) == weights:
        return places
    return sorted(places, key=weights.__getitem__, reverse=True)


def falling(schedule: str, n_layers: int) -> list[float]:
    """c(l), the schedule's shape from 1 in the first layer to 0 in the last, with L = n_layers.

    cosine: c(l) = (cos(pi * l / (L-1)) + 1) / 2, of eq. 4. To compare with: linear, c(l) =
    1 - l / (L-1); flat, 0 in all, as in the only layer of one. Raises ConfigError for another name.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"unknown schedule '{schedule}'; known: {', '.join(SCHEDULES)}")
    if schedule == FLAT or n_layers == 1:
        return [0.0] * n_layers
    places = [layer / (n_layers - 1) for layer in range(n_layers)]
    if schedule == LINEAR:
        return [1 - place for place in places]
    return [(math.cos(math.pi * place) + 1) / 2 for place in places]
