"""Which of the routed experts matter (DyMoE, section 4.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orchestrator.events import RouteEvent


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


class Ranking(NamedTuple):
    """Experts of a layer, the most important first: of order, the first n_high are critical, the
    first n_used are used at all."""

    order: np.ndarray
    n_high: int
    n_used: int


def by_sequence(event: RouteEvent) -> tuple[list[np.ndarray], np.ndarray]:
    """(of each sequence with several tokens in the event, which are a prompt's, their rows; the
    rows of all other tokens, which go by their gates: those of answers, and prompts' only ones), in
    the event's order."""
    sequences = event.sequences_array
    of = [np.flatnonzero(sequences == each) for each in sorted(set(sequences.tolist()))]
    single = [int(rows[0]) for rows in of if len(rows) == 1]
    return [rows for rows in of if len(rows) > 1], np.array(sorted(single), np.intp)


def last_of_sequences(event: RouteEvent) -> np.ndarray:
    """The rows of each sequence's last token, in the event's order."""
    last = {sequence: row for row, sequence in enumerate(event.sequences_array.tolist())}
    return np.array(sorted(last.values()), np.intp)


def together(rankings: Sequence[Ranking], n_expert: int) -> Ranking:
    """What several sequences need of a layer, each of them by itself: critical is what is so for
    one of them, and comes first; then the best rank that an expert has in any of them decides, then
    the index."""
    if len(rankings) == 1:
        return rankings[0]
    best, high = np.full(n_expert, n_expert), np.zeros(n_expert, bool)
    for order, n_high, n_used in rankings:
        np.minimum.at(best, order[:n_used], np.arange(n_used))
        high[order[:n_high]] = True
    order = np.lexsort((best, ~high))
    return Ranking(order, int(np.count_nonzero(high)), int(np.count_nonzero(best < n_expert)))
