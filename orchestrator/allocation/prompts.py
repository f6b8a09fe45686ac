"""Prefill with slots per layer.

Ranking of experts (DyMoE, section 4.2), streaming, and prefetching (section 4.4.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from orchestrator.allocation.slots import Rules
from orchestrator.events import SKIP, DecisionBuffer, RouteEvent, StoreView, distinct

# Share of a layer's high slots for the experts that a prompt uses most; PASSING_SHARE is for
# streaming the rest of its experts (docs/experiments/engine.md).
_STAYS_SHARE = 0.75


def gate_order(weights: Sequence[float]) -> Sequence[int]:
    """Return the positions of one token's experts, sorted by falling routing weight (DyMoE, eq. 3).

    Experts with equal weights keep the order in which the router chose them. weights: the routing
    weights of the token's k experts, [k].
    """
    places = range(len(weights))
    if sorted(weights, reverse=True) == weights:
        return places
    return sorted(places, key=weights.__getitem__, reverse=True)


def heavy_hitters(scores: np.ndarray, share: float) -> np.ndarray:
    """Return the indices of the tokens that receive the most attention (DyMoE, eq. 1).

    The indices are in no particular order.

    scores: the attention that each of T tokens receives, float32 [T]. share: the fraction of the
    tokens to return, rounded up to at least one token.
    """
    k = max(1, math.ceil(share * len(scores)))
    if k >= len(scores):
        return np.arange(len(scores))
    return np.argpartition(-scores, k - 1)[:k]


class Ranking(NamedTuple):
    """The experts of a layer in the order of their importance for a step.

    - order: the indices of the experts, most important first.
    - n_high: the first n_high experts are critical, that is, requested in the best precision.
    - n_used: the first n_used experts are used by the step's tokens.
    """

    order: np.ndarray
    n_high: int
    n_used: int


def by_sequence(event: RouteEvent) -> tuple[list[np.ndarray], np.ndarray]:
    """Divide the tokens of a route event into prompts and single tokens. Return (prompts, singles).

    A route event has the experts that the router chose for the tokens of a step in one layer.

    prompts: the indices of a sequence's tokens, for each sequence with several tokens in the event.
    singles: the indices of all other tokens. They are tokens of answers, or prompts of one token.
    """
    sequences = event.sequences_array
    of = [np.flatnonzero(sequences == each) for each in sorted(set(sequences.tolist()))]
    single = [int(rows[0]) for rows in of if len(rows) == 1]
    return [rows for rows in of if len(rows) > 1], np.array(sorted(single), np.intp)


def last_of_sequences(event: RouteEvent) -> np.ndarray:
    """Return the index of the last token of each sequence in a route event, in rising order.

    A route event has the experts that the router chose for the tokens of a step in one layer.
    """
    last = {sequence: row for row, sequence in enumerate(event.sequences_array.tolist())}
    return np.array(sorted(last.values()), np.intp)


def together(rankings: Sequence[Ranking], n_expert: int) -> Ranking:
    """Merge several rankings of a layer's experts into one ranking.

    There is, for example, one ranking for each prompt of a step, in the order of the experts'
    importance for the prompt. An expert is critical (requested in the best precision) if one of the
    rankings says so. Critical experts come first. Critical experts, and the others, are sorted by
    their best position in any ranking, then by index.

    n_expert: the number of experts in the layer.
    """
    if len(rankings) == 1:
        return rankings[0]
    best, high = np.full(n_expert, n_expert), np.zeros(n_expert, bool)
    for order, n_high, n_used in rankings:
        np.minimum.at(best, order[:n_used], np.arange(n_used))
        high[order[:n_high]] = True
    order = np.lexsort((best, ~high))
    return Ranking(order, int(np.count_nonzero(high)), int(np.count_nonzero(best < n_expert)))


# Returns a mask [n_expert] of the experts that tokens ranked by gates need in tier 0. Arguments:
# layer, their experts and weights [T, k], and the store view.
Gated = Callable[[int, np.ndarray, np.ndarray, StoreView], np.ndarray]


@dataclass
class Prompts:
    """Chooses the tier (precision) of each expert while a model processes prompts.

    In each layer, a prompt's experts are ranked by the number of its important tokens that use
    them. The first experts are called critical, and get tier 0, the best tier. The others get the
    tier `low`.

    - critical: function (layer, n_used) that returns how many of the n_used experts are critical.
    - low: a tier, or SKIP.
    - heavy_share: the fraction of a prompt's tokens that count as important. These tokens receive
      the most attention.
    - passes: whether the least important experts of a prompt are evicted before all other experts.
    - gated: function that returns the critical experts of answers that are processed together with
      prompts. None if all experts of answers are critical.
    - room: the number of memory slots, indexed [layer][tier].
    """

    rules: Rules
    critical: Callable[[int, int], int] = lambda layer, n_used: n_used
    low: int = SKIP
    heavy_share: float = 1.0
    passes: bool = True
    gated: Gated | None = None
    room: Sequence[Sequence[int]] = ()

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer, ahead: bool) -> None:
        """Choose the tier (precision) of each expert of a layer, and write the choice to `out`.

        event: the experts that the router chose. view: the experts in memory. ahead: whether to
        prefetch the experts that are predicted for the next layer.
        """
        layer, n_expert, ids = event.layer, len(out.tier), event.ids_array
        prompts, gated = by_sequence(event)
        scores = event.importance_array
        pairs = [
            (rows, None if scores is None else heavy_hitters(scores[rows], self.heavy_share))
            for rows in prompts
        ]
        # Among equally important experts, resident ones come first, because they need no read.
        here = (view.resident_array[layer] == 0) & (not self.rules.exact)
        rankings = [self._ranked(layer, ids[rows], h, here) for rows, h in pairs]
        if len(gated):
            rankings.append(self._by_gates(event, view, gated))
        order, n_high, n_used = together(rankings, n_expert)
        if n_high < n_used:
            out.renormalize = self.rules.renormalize
            out.tier_array[order[n_high:]] = self.low
        out.passing_array[self._streamed(layer, order)] = 1
        out.passing_array[ids[gated]] = 0
        if not (event.n_ahead and ahead):
            return
        layer, ids, here = layer + 1, event.ahead_ids_array[0], view.resident_array[layer + 1] == 0
        if layer + 1 == len(self.room):  # the last layer computes the last token of each sequence
            pairs, gated = [], last_of_sequences(event)
        rankings = [self._ranked(layer, ids[rows], h, here) for rows, h in pairs]
        t = self.critical(layer, event.k)
        rankings += [Ranking(row, t, event.k) for row in ids[gated]]
        predicted = together(rankings, n_expert)
        passing = np.zeros(n_expert, bool)
        passing[self._streamed(layer, predicted.order)] = True
        passing[ids[gated]] = False
        self._load_ahead(layer, predicted, passing, view, out)

    def _ranked(
        self, layer: int, ids: np.ndarray, heavy: np.ndarray | None, first: np.ndarray
    ) -> Ranking:
        """Rank the experts of a layer for one prompt.

        The importance of an expert is the number of heavy hitters (important tokens) that use it
        (DyMoE, eq. 2). Ties are broken by the number of all tokens that use the expert, then by
        `first`, then by index.

        - ids: the experts of each token, int32 [T, k].
        - heavy: the indices of the heavy hitters. None means that all tokens are equally important.
        - first: a mask of the experts that win ties, bool [n_expert], such as those in memory.
        """
        n_expert = len(first)
        score = load = np.bincount(ids.ravel(), minlength=n_expert)
        if heavy is not None:
            score = load + np.bincount(ids[heavy].ravel(), minlength=n_expert) * (ids.size + 1)
        n_used = int(np.count_nonzero(load))
        order = np.argsort(-(2 * score + first), kind="stable")
        return Ranking(order, self.critical(layer, n_used), n_used)

    def _by_gates(self, event: RouteEvent, view: StoreView, rows: np.ndarray) -> Ranking:
        """Rank the experts of tokens of answers: those that they need in the high tier come first.

        rows: the indices of these tokens in the event.
        """
        ids, weights = event.ids_array[rows], event.weights_array[rows]
        used = distinct(ids)
        if self.gated is None:
            return Ranking(used, len(used), len(used))
        high = self.gated(event.layer, ids, weights, view)[used]
        order = np.concatenate([used[high], used[~high]])
        return Ranking(order, int(np.count_nonzero(high)), len(used))

    def _streamed(self, layer: int, order: np.ndarray) -> np.ndarray:
        """Return the experts that a prompt streams: all except the most used ones of `order`.

        order: the indices of the experts, most used first. The most used ones may fill three
        quarters of the layer's high slots.
        """
        stays = int(self.room[layer][0] * _STAYS_SHARE) if self.passes else len(order)
        return order[stays:]

    def _load_ahead(
        self,
        layer: int,
        predicted: Ranking,
        passing: np.ndarray,
        view: StoreView,
        out: DecisionBuffer,
    ) -> None:
        """Prefetch the experts that the tokens of a step are predicted to use in a layer.

        The requests are in the order of the predicted importance (DyMoE, eq. 7). Critical experts
        are requested in tier 0. The others are requested in tier `low`, or not at all if that is
        SKIP. No more missing experts are requested than there are slots. Experts in memory are
        requested too, so that no read evicts them.

        - predicted: the ranking of the predicted experts.
        - passing: the experts to stream, bool [n_expert].
        """
        resident, low = view.resident_array[layer], self.low
        order, n_high, n_used = predicted
        parts = [(0, 0, n_high)] if low == SKIP else [(0, 0, n_high), (low, n_high, n_used)]
        for (tier, begin, end), most in zip(parts, self.room[layer], strict=False):
            experts = order[begin:end]
            absent = resident[experts] > tier
            for expert in experts[~absent | (absent.cumsum() <= most)].tolist():
                out.prefetch(layer, expert, tier, passing=int(passing[expert]))
