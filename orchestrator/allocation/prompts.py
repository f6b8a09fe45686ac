"""A prompt in slots per layer: which of its experts stay in memory, and which pass through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from orchestrator.allocation import prefetch
from orchestrator.allocation.importance import (
    Ranking,
    by_sequence,
    heavy_hitters,
    last_of_sequences,
    together,
    token_order,
)
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
    """The plan of one tier: slots for whole experts in each layer, as many in one as in another.
    Raises BudgetError."""
    n = shape.n_expert
    sizes = [shape.expert_slot_bytes(layer, 0) for layer in range(shape.n_layers)]
    return divide([Share(size, 1, n, n) for size in sizes], budget_bytes)


# What tokens that go by their gates need in tier 0 of a layer: of their experts and weights [T, k],
# and of what is in memory, a mask [n_expert].
Gated = Callable[[int, np.ndarray, np.ndarray, StoreView], np.ndarray]


class _Prompt(NamedTuple):
    """A prompt in a step: its rows of the event, and which of these are heavy hitters; None where
    that is not known."""

    rows: np.ndarray
    heavy: np.ndarray | None


@dataclass
class Prompts:
    """Steps with a prompt: the experts that it uses most may fill three quarters of a layer's high
    slots; the others pass through half of them at most.

    A step may have tokens of several prompts and of answers. Each sequence is ranked by itself, as
    if it were alone; an expert gets the best tier that one of them asks for. What tokens need that
    go by their gates stays in memory, as in a decode step.

    critical(layer, n_used): how many of the n_used experts that a prompt uses in a layer are asked
    for in tier 0; the others are asked for in tier low. heavy_share: of a prompt's tokens, those
    whose experts come first, where their importance is known. passes: whether anything passes.
    gated: what an answer's tokens need in tier 0; None for all of it. room: of each layer, its
    slots in tier 0 and in tier low.
    """

    rules: Rules
    critical: Callable[[int, int], int]
    room: Sequence[tuple[int, int]]
    low: int = SKIP
    heavy_share: float = 1.0
    passes: bool = True
    gated: Gated | None = None

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer, ahead: bool) -> None:
        """The tiers of one layer's experts and, if ahead, what to prefetch for the next one."""
        layer, low, n_expert = event.layer, self.low, len(out.tier)
        rows, gated = by_sequence(event)
        prompts = [_Prompt(each, self._heavy(event, each)) for each in rows]
        # equals in importance: what is in memory costs nothing
        here = None if self.rules.exact else view.resident_array[layer] == 0
        rankings = [self._ranked(layer, event.ids_array, each, here, n_expert) for each in prompts]
        if len(gated):
            rankings.append(self._by_gates(event, view, gated))
        order, n_high, n_used = together(rankings, n_expert)
        if n_high < n_used:
            out.renormalize = self.rules.renormalize
            out.tier_array[order[n_high:]] = low
        out.passing_array[self._passing(layer, order)] = 1
        out.passing_array[event.ids_array[gated]] = 0
        if event.n_ahead and ahead:
            self._ask(event, view, out, prompts, gated)

    def _ask(
        self,
        event: RouteEvent,
        view: StoreView,
        out: DecisionBuffer,
        prompts: list[_Prompt],
        gated: np.ndarray,
    ) -> None:
        """Asks for what the next layer is predicted to need, by the same rules."""
        layer, low, n_expert = event.layer + 1, self.low, len(out.tier)
        ids = event.ahead_ids_array[0]
        if layer + 1 == len(self.room):  # the last one computes each sequence's last token alone
            prompts, gated = [], last_of_sequences(event)
        here = view.resident_array[layer] == 0
        rankings = [self._ranked(layer, ids, each, here, n_expert) for each in prompts]
        t = self.critical(layer, event.k)
        rankings += [Ranking(row, t, event.k) for row in ids[gated]]
        predicted = together(rankings, n_expert)
        passing = np.zeros(n_expert, bool)
        passing[self._passing(layer, predicted.order)] = True
        passing[ids[gated]] = False
        prefetch.by_importance(
            layer,
            predicted,
            view,
            out,
            low=low if low != SKIP else None,
            room=self.room[layer],
            passing=passing,
        )

    def _heavy(self, event: RouteEvent, rows: np.ndarray) -> np.ndarray | None:
        scores = event.importance_array
        return None if scores is None else heavy_hitters(scores[rows], self.heavy_share)

    def _ranked(
        self,
        layer: int,
        ids: np.ndarray,
        prompt: _Prompt,
        here: np.ndarray | None,
        n_expert: int,
    ) -> Ranking:
        order, n_used = token_order(ids[prompt.rows], prompt.heavy, n_expert, here)
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
