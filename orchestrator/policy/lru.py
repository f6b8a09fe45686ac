"""The null baseline: one precision, load on demand, one global least-recently-used order."""

from __future__ import annotations

from orchestrator.allocation.slots import Share, SlotGroup, SlotPlan, divide
from orchestrator.policy.base import Policy, Precisions, Wants


class LRU(Policy):
    """Every routed expert in the best tier. One slot group per matrix kind and slot size,
    shared by all layers; the store's own order does the rest, so Python is not called."""

    name = "lru"
    summary = "The null baseline: one precision, load on demand, evict what was used longest ago."
    reason = "runs one precision"
    precisions = Precisions(most=1, lossless={})
    # A prompt comes next, and needs nearly all experts: of single ones in every layer, its first
    # layers would push out what the later ones were to find.
    wants = Wants(whole_layers=True)

    def plan(self, budget_bytes: int) -> SlotPlan:
        """The same share of the experts of every group. Raises BudgetError."""
        layers_of: dict[tuple[int, int], list[int]] = {}
        for layer, tiers in enumerate(self.shape.slots):
            for kind, size in tiers[0].items():
                layers_of.setdefault((kind, size), []).append(layer)
        full = [len(layers) * self.shape.n_expert for layers in layers_of.values()]
        shares = [Share(size, 1, n, n) for (_, size), n in zip(layers_of, full, strict=True)]
        counts = divide(shares, budget_bytes)
        groups = tuple(
            SlotGroup(share.unit_bytes, n) for share, n in zip(shares, counts, strict=True)
        )
        group_of = {
            (layer, kind, 0): index
            for index, ((kind, _), layers) in enumerate(layers_of.items())
            for layer in layers
        }
        return SlotPlan(groups, group_of)
