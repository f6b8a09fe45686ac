"""A prompt in slots per layer: which of its experts stay in memory, and which pass through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from orchestrator.events import SKIP, DecisionBuffer, RouteEvent, StoreView
from orchestrator.policy import prefetch
from orchestrator.policy.base import ModelShape, Rules, Share, SlotGroup, SlotPlan, divide
from orchestrator.policy.importance import heavy_hitters, token_order

# Of a layer's high slots: those that a prompt may fill with what it uses most, and those that
# the rest of its experts pass through (EXPERIMENTS.md, "Long prompts").
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


@dataclass
class Prompts:
    """Prefill: the experts that a prompt uses most may fill three quarters of a layer's high
    slots; the others pass through half of them at most.

    critical(layer, n_used): how many of the n_used experts that a step uses in a layer are asked
    for in tier 0; the others are asked for in tier low. heavy_share: of the tokens, those whose
    experts come first, where their importance is known. passes: whether anything passes. room: of
    each layer, its slots in tier 0 and in tier low.
    """

    rules: Rules
    critical: Callable[[int, int], int]
    room: Sequence[tuple[int, int]]
    low: int = SKIP
    heavy_share: float = 1.0
    passes: bool = True

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer, ahead: bool) -> None:
        """The tiers of one layer's experts and, if ahead, what to prefetch for the next one."""
        layer, low, n_expert = event.layer, self.low, len(out.tier)
        scores = event.importance_array
        heavy = None if scores is None else heavy_hitters(scores, self.heavy_share)
        # equals in importance: what is in memory costs nothing
        here = None if self.rules.exact else view.resident_array[layer] == 0
        order, n_used = token_order(event.ids_array, heavy, n_expert, here)
        t = self.critical(layer, n_used)
        if t < n_used:
            out.renormalize = self.rules.renormalize
            out.tier_array[order[t:]] = low
        out.passing_array[order[self._stays(layer, n_expert) :]] = 1
        if event.n_ahead and ahead:
            ids = event.ahead_ids_array[0]
            if layer + 2 == len(self.room):  # the last one computes the last token alone
                ids, heavy = ids[-1:], None
            prefetch.by_frequency(
                layer + 1,
                ids,
                view,
                out,
                heavy=heavy,
                critical=partial(self.critical, layer + 1),
                low=low if low != SKIP else None,
                room=self.room[layer + 1],
                stays=self._stays(layer + 1, n_expert),
            )

    def _stays(self, layer: int, n_expert: int) -> int:
        """How many of a prompt's experts stay in memory."""
        return int(self.room[layer][0] * _STAYS_SHARE) if self.passes else n_expert
