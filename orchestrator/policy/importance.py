"""Which of the routed experts matter (DyMoE, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def gate_order(weights: Sequence[float]) -> Sequence[int]:
    """Places of one token's routed experts, the most important first: I(E_j) = g_j, eq. 3,
    with g_j its routing weight [k]. Equal weights keep the router's order, which is that of
    the weights unless the router selects by something else (a bias, groups)."""
    places = range(len(weights))
    if sorted(weights, reverse=True) == weights:
        return places
    return sorted(places, key=weights.__getitem__, reverse=True)


def gate_critical(ids: np.ndarray, weights: np.ndarray, t: int, n_expert: int) -> np.ndarray:
    """Mask [n_expert] of the experts that are among the t most important of any token.

    ids int32 [T, k], weights float32 [T, k].
    """
    critical = np.zeros(n_expert, bool)
    if t > 0:
        places = np.argsort(-weights, axis=1, kind="stable")[:, :t]
        critical[np.take_along_axis(ids, places, axis=1)] = True
    return critical
