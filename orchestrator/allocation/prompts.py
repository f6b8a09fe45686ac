"""A prompt in slots per layer: which of its experts matter most (DyMoE, section 4.2), which stay in
memory and which pass through, and what is loaded ahead (section 4.4.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from orchestrator.allocation.slots import ModelShape, Rules, Share, SlotGroup, SlotPlan, divide
from orchestrator.events import SKIP, DecisionBuffer, RouteEvent, StoreView, distinct

# Of a layer's high slots: those that a prompt may fill with what it uses most, and those that
# the rest of its experts pass through (docs/experiments/prompts.md).
_STAYS_SHARE = 0.75
_PASSING_SHARE = 0.5


def layer_groups(shape: ModelShape, counts: Sequence[Sequence[int]]) -> SlotPlan:
    """One group per (layer, kind, tier) with counts[layer][tier] slots. Half of those of tier 0
    are for what passes."""
    groups: list[SlotGroup] = []
    group_of: dict[tuple[int, int, int], int] = {}
    for layer, of_tiers in enumerate(counts):
        for tier, units in enumerate(of_tiers):
            passing = max(1, int(units * _PASSING_SHARE)) if tier == 0 else units
            for kind, size in shape.slots[layer][tier].items():
                group_of[layer, kind, tier] = len(groups)
                groups.append(SlotGroup(size, units, passing))
    return SlotPlan(tuple(groups), group_of)


def even_slots(shape: ModelShape, budget_bytes: int) -> list[int]:
    """Slots for whole experts of tier 0 in each layer, as many in one as in another, and one at
    least."""
    n = shape.n_expert
    sizes = [shape.expert_slot_bytes(layer, 0) for layer in range(shape.n_layers)]
    return divide([Share(size, 1, n, n) for size in sizes], budget_bytes)


def heavy_hitters(scores: np.ndarray, share: float) -> np.ndarray:
    """Indices of the top-k tokens T_imp by the attention s_i that they receive (eq. 1),
    k = ceil(share * T), at least 1. scores float32 [T]; the order of the result is free."""
    k = max(1, math.ceil(share * len(scores)))
    if k >= len(scores):
        return np.arange(len(scores))
    return np.argpartition(-scores, k - 1)[:k]


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


# What tokens that go by their gates need in tier 0: from a layer, their experts and weights [T, k]
# and what is in memory, a mask [n_expert].
Gated = Callable[[int, np.ndarray, np.ndarray, StoreView], np.ndarray]


@dataclass
class Prompts:
    """Steps with a prompt: the experts that it uses most may fill three quarters of a layer's high
    slots; the others pass through half of them at most.

    A step may have tokens of several prompts and of answers. Each sequence is ranked by itself, as
    if it were alone; an expert gets the best tier that one of them asks for. The experts of tokens
    that go by their gates stay in memory, as in a decode step.

    critical(layer, n_used): how many of the n_used experts that a prompt uses in a layer are asked
    for in tier 0; the others are asked for in tier low. heavy_share: of a prompt's tokens, those
    whose experts come first, where their importance is known. passes: whether the others pass; else
    they may take all slots. gated: what an answer's tokens need in tier 0; None for all of it.
    room: of each layer, its slots in each tier.
    """

    rules: Rules
    critical: Callable[[int, int], int] = lambda layer, n_used: n_used
    low: int = SKIP
    heavy_share: float = 1.0
    passes: bool = True
    gated: Gated | None = None
    room: Sequence[Sequence[int]] = ()

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer, ahead: bool) -> None:
        """The tiers of one layer's experts and, if ahead, what to prefetch for the next one."""
        layer, n_expert, ids = event.layer, len(out.tier), event.ids_array
        prompts, gated = by_sequence(event)
        scores = event.importance_array
        pairs = [
            (rows, None if scores is None else heavy_hitters(scores[rows], self.heavy_share))
            for rows in prompts
        ]
        # Of experts that matter equally, those in memory come first: they cost nothing.
        here = (view.resident_array[layer] == 0) & (not self.rules.exact)
        rankings = [self._ranked(layer, ids[rows], h, here) for rows, h in pairs]
        if len(gated):
            rankings.append(self._by_gates(event, view, gated))
        order, n_high, n_used = together(rankings, n_expert)
        if n_high < n_used:
            out.renormalize = self.rules.renormalize
            out.tier_array[order[n_high:]] = self.low
        out.passing_array[self._passing(layer, order)] = 1
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
        passing[self._passing(layer, predicted.order)] = True
        passing[ids[gated]] = False
        self._load_ahead(layer, predicted, passing, view, out)

    def _ranked(
        self, layer: int, ids: np.ndarray, heavy: np.ndarray | None, first: np.ndarray
    ) -> Ranking:
        """What a prompt needs of a layer.

        The importance of an expert is the number of heavy hitters routed to it, eq. 2; among
        equals that of all tokens decides, then whether it is one of `first` (bool [n_expert], as
        what is in memory), then the index. ids int32 [T, k]; heavy: indices of the heavy hitters,
        None for no distinction between tokens.
        """
        n_expert = len(first)
        score = load = np.bincount(ids.ravel(), minlength=n_expert)
        if heavy is not None:
            score = load + np.bincount(ids[heavy].ravel(), minlength=n_expert) * (ids.size + 1)
        n_used = int(np.count_nonzero(load))
        order = np.argsort(-(2 * score + first), kind="stable")
        return Ranking(order, self.critical(layer, n_used), n_used)

    def _by_gates(self, event: RouteEvent, view: StoreView, rows: np.ndarray) -> Ranking:
        """The experts of tokens that go by their gates, those first that they need high."""
        ids, weights = event.ids_array[rows], event.weights_array[rows]
        used = distinct(ids)
        if self.gated is None:
            return Ranking(used, len(used), len(used))
        high = self.gated(event.layer, ids, weights, view)[used]
        order = np.concatenate([used[high], used[~high]])
        return Ranking(order, int(np.count_nonzero(high)), len(used))

    def _passing(self, layer: int, order: np.ndarray) -> np.ndarray:
        """The part of an order that passes through memory, unless a token needs it that goes by its
        gates."""
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
        """Eq. 7: asks for the experts of a layer that tokens are predicted to select, in their
        predicted importance, which decides the precision.

        The critical ones are asked for in tier 0, the others in tier low, or not at all where that
        is SKIP. passing, bool [n_expert]: those that pass through memory; the others stay. No more
        experts are read than there are slots. What is in memory already is listed as well, so that
        nothing is read in its place.
        """
        resident, low = view.resident_array[layer], self.low
        order, n_high, n_used = predicted
        parts = [(0, 0, n_high)] if low == SKIP else [(0, 0, n_high), (low, n_high, n_used)]
        for (tier, begin, end), most in zip(parts, self.room[layer], strict=False):
            experts = order[begin:end]
            absent = resident[experts] > tier
            for expert in experts[~absent | (absent.cumsum() <= most)].tolist():
                out.prefetch(layer, expert, tier, passing=int(passing[expert]))
