"""Which of the routed experts matter (DyMoE, section 4.2)."""

from __future__ import annotations

import math
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


def heavy_hitters(scores: np.ndarray, share: float) -> np.ndarray:
    """Indices of the top-k tokens T_imp by the attention s_i that they receive (eq. 1),
    k = ceil(share * T), at least 1. scores float32 [T]; the order of the result is free."""
    k = max(1, math.ceil(share * len(scores)))
    if k >= len(scores):
        return np.arange(len(scores))
    return np.argpartition(-scores, k - 1)[:k]


def token_order(
    ids: np.ndarray, heavy: np.ndarray | None, n_expert: int, first: np.ndarray | None = None
) -> tuple[np.ndarray, int]:
    """(experts [n_expert], the most important first; how many of them any token uses).

    The importance of an expert is the number of heavy hitters routed to it, eq. 2; among
    equals that of all tokens decides, then whether it is one of `first` (bool [n_expert], as
    what is in memory), then the index. ids int32 [T, k]; heavy: indices of the heavy hitters,
    None for no distinction between tokens.
    """
    load = np.bincount(ids.ravel(), minlength=n_expert)
    score = load
    if heavy is not None:
        score = load + np.bincount(ids[heavy].ravel(), minlength=n_expert) * (ids.size + 1)
    if first is not None:
        score = 2 * score + first
    return np.argsort(-score, kind="stable"), int(np.count_nonzero(load))
