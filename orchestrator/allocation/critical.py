"""The number of critical experts of a token, by gates and by depth.

See DyMoE, sections 4.2 and 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator.errors import ConfigError

SCHEDULES = ("cosine", "linear", "flat")
COSINE, LINEAR, FLAT = SCHEDULES


def gate_order(weights: Sequence[float]) -> Sequence[int]:
    """Return the positions of one token's routed experts, most important first.

    The importance I(E_j) is the routing weight g_j (eq. 3). weights: [k]. Equal weights keep the
    router's order, which is by weight unless the router selects by another criterion (a bias,
    groups).
    """
    places = range(len(weights))
    if sorted(weights, reverse=True) == weights:
        return places
    return sorted(places, key=weights.__getitem__, reverse=True)


def falling(schedule: str, n_layers: int) -> list[float]:
    """Return c(l) for every layer.

    The schedule falls from 1 in the first layer to 0 in the last.

    cosine: c(l) = (cos(pi * l / (L-1)) + 1) / 2 with L = n_layers, of eq. 4. For comparison:
    linear, c(l) = 1 - l / (L-1); flat, 0 in all layers. A single layer gets 0. Raises ConfigError
    for an unknown schedule.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"unknown schedule '{schedule}'; known: {', '.join(SCHEDULES)}")
    if schedule == FLAT or n_layers == 1:
        return [0.0] * n_layers
    places = [layer / (n_layers - 1) for layer in range(n_layers)]
    if schedule == LINEAR:
        return [1 - place for place in places]
    return [(math.cos(math.pi * place) + 1) / 2 for place in places]
