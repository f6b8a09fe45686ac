"""The null baseline: one precision, load on demand, one global least-recently-used order."""

from __future__ import annotations

from typing import Any

from orchestrator.allocation.slots import ModelShape, Rules, Share, SlotGroup, SlotPlan, divide
from orchestrator.policy.base import About, History, Placement, Policy, Precisions, Wants


class LRU(Policy):
    """Every routed expert in the best tier. One slot group per matrix kind and slot size,
    shared by all layers; the store's own order does the rest, so Python is not called."""

    about = About(
        name="lru",
        summary=(
            "The null baseline: one precision, load on demand, evict what was used longest ago."
        ),
        reason="runs one precision",
        precisions=Precisions(most=1, lossless={}),
        # A prompt comes next, and needs nearly all experts. With single experts in every layer, its
        # first layers would evict what the later ones need.
        wants=Wants(whole_layers=True),
    )

    @classmethod
    def place(
        cls,
        shape: ModelShape,
        settings: Any,
        rules: Rules,
        budget_bytes: int,
        history: History,
    ) -> Placement:
        """The same share of the experts of every group."""
        layers_of: dict[tuple[int, int], list[int]] = {}
        for layer, tiers in enumerate(shape.slots):
            for kind, size in tiers[0].items():
                layers_of.setdefault((kind, size), []).append(layer)
        full = [len(layers) * shape.n_expert for layers in layers_of.values()]
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
        slots = SlotPlan(groups, group_of)
        return Placement(cls, shape, settings, rules, slots, cls.about.wants)
