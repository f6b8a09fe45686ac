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
    """Return the positions of one token's routed experts, most important first.

    The importance I(E_j) is the routing weight g_j (eq. 3). weights: [k]. Equal weights keep the
    router's order, which is by weight unless the router selects by another criterion (a bias,
    groups).
    """
    places = range(len(weights))
    if sorted(weights, reverse=True) == weights:
        return places
    return sorted(places, key=weights.__getitem__, reverse=True)


def heavy_hitters(scores: np.ndarray, share: float) -> np.ndarray:
    """Return the indices of the top-k tokens T_imp by the attention s_i that they receive (eq. 1).

    k is ceil(share * T), at least 1. scores: float32 [T]. The order of the result is undefined.
    """
    k = max(1, math.ceil(share * len(scores)))
    if k >= len(scores):
        return np.arange(len(scores))
    return np.argpartition(-scores, k - 1)[:k]


class Ranking(NamedTuple):
    """The experts of a layer, most important first.

    The first n_high of order are critical; the first n_used are used.
    """

    order: np.ndarray
    n_high: int
    n_used: int


def by_sequence(event: RouteEvent) -> tuple[list[np.ndarray], np.ndarray]:
    """Split the rows of an event's tokens into prompts and single tokens.

    Returns the rows of each sequence with several tokens, which are prompts, and the rows of all
    other tokens, which are ranked by their gates: tokens of answers, and prompts of one token. All
    are in the event's order.
    """
    sequences = event.sequences_array
    of = [np.flatnonzero(sequences == each) for each in sorted(set(sequences.tolist()))]
    single = [int(rows[0]) for rows in of if len(rows) == 1]
    return [rows for rows in of if len(rows) > 1], np.array(sorted(single), np.intp)


def last_of_sequences(event: RouteEvent) -> np.ndarray:
    """Return the row of each sequence's last token, in the event's order."""
    last = {sequence: row for row, sequence in enumerate(event.sequences_array.tolist())}
    return np.array(sorted(last.values()), np.intp)


def together(rankings: Sequence[Ranking], n_expert: int) -> Ranking:
    """Merge the rankings of several sequences.

    An expert is critical if it is critical for one of them. Critical experts come first; then the
    best rank of an expert in any ranking decides, then the index.
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
    """Decisions for steps with prompt tokens.

    The experts that a prompt uses most may fill three quarters of a layer's high slots. The others
    are streamed through at most half of them. A step may have tokens of several prompts and of
    answers. Each sequence is ranked separately, and an expert gets the best tier that one of them
    requests. Experts of tokens that are ranked by gates are not streamed, as in a decode step.

    critical(layer, n_used): how many of the n_used experts of a prompt in a layer are requested in
    tier 0; the others are requested in tier `low`. heavy_share: the share of a prompt's tokens that
    are heavy hitters, if their importance is known. passes: stream the less used experts; otherwise
    they may take all slots. gated: returns which experts tokens of answers need in tier 0; None for
    all. room: the number of slots of each layer in each tier.
    """

    rules: Rules
    critical: Callable[[int, int], int] = lambda layer, n_used: n_used
    low: int = SKIP
    heavy_share: float = 1.0
    passes: bool = True
    gated: Gated | None = None
    room: Sequence[Sequence[int]] = ()

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer, ahead: bool) -> None:
        """Choose the tiers of one layer's experts and, if `ahead`, prefetch for the next layer."""
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
        """Return the ranking of a layer's experts for one prompt.

        The importance of an expert is the number of heavy hitters routed to it (eq. 2). Ties are
        broken by the number of all tokens, then by membership in `first` (bool [n_expert], such as
        the resident experts), then by index. ids: int32 [T, k]. heavy: indices of the heavy
        hitters, or None to treat all tokens equally.
        """
        n_expert = len(first)
        score = load = np.bincount(ids.ravel(), minlength=n_expert)
        if heavy is not None:
            score = load + np.bincount(ids[heavy].ravel(), minlength=n_expert) * (ids.size + 1)
        n_used = int(np.count_nonzero(load))
        order = np.argsort(-(2 * score + first), kind="stable")
        return Ranking(order, self.critical(layer, n_used), n_used)

    def _by_gates(self, event: RouteEvent, view: StoreView, rows: np.ndarray) -> Ranking:
        """Return the ranking of experts for tokens that are ranked by gates.

        Experts needed in the high tier come first.
        """
        ids, weights = event.ids_array[rows], event.weights_array[rows]
        used = distinct(ids)
        if self.gated is None:
            return Ranking(used, len(used), len(used))
        high = self.gated(event.layer, ids, weights, view)[used]
        order = np.concatenate([used[high], used[~high]])
        return Ranking(order, int(np.count_nonzero(high)), len(used))

    def _streamed(self, layer: int, order: np.ndarray) -> np.ndarray:
        """Return the experts of an order that are streamed.

        Experts that a token ranked by gates needs are not streamed.
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
        """Prefetch the experts of a layer that tokens are predicted to select.

        The order is that of the predicted importance (eq. 7).

        Critical experts are requested in tier 0, the others in tier `low`, or not at all if it is
        SKIP. passing: bool [n_expert], experts to stream. No more experts are read than there are
        slots. Resident experts are requested too, so that no read evicts them.
        """
        resident, low = view.resident_array[layer], self.low
        order, n_high, n_used = predicted
        parts = [(0, 0, n_high)] if low == SKIP else [(0, 0, n_high), (low, n_high, n_used)]
        for (tier, begin, end), most in zip(parts, self.room[layer], strict=False):
            experts = order[begin:end]
            absent = resident[experts] > tier
            for expert in experts[~absent | (absent.cumsum() <= most)].tolist():
                out.prefetch(layer, expert, tier, passing=int(passing[expert]))
