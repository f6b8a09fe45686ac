"""The null baseline: one precision, loading on demand, one global least-recently-used order."""

from __future__ import annotations

from typing import Any

from orchestrator.allocation.slots import ModelShape, Rules, Share, SlotGroup, SlotPlan, divide
from orchestrator.policy.base import (
    About,
    History,
    Placement,
    Policy,
    PolicyRequirements,
    Precisions,
)


class LRU(Policy):
    """A policy that requests every routed expert in the best tier, with LRU eviction.

    For each slot size, all layers share one group of slots. The native store keeps the LRU order of
    a group, so it does not call Python during a step.
    """

    about = About(
        name="lru",
        summary=(
            "The null baseline: one precision, loading on demand, least-recently-used eviction."
        ),
        reason="runs one precision",
        precisions=Precisions(most=1, lossless={}),
        # Idle reads prepare for the next prompt, which needs nearly all experts. If they loaded
        # single experts of every layer, the prompt's first layers would evict what later layers
        # need.
        wants=PolicyRequirements(whole_layers=True),
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
        """Divide a memory budget into groups of slots, one for each matrix kind and slot size.

        A slot holds one matrix of an expert. Its kind is `up`, `gate`, `gate_up` or `down`. Each
        group holds about the same fraction of the model's matrices of its kind and size.
        """
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
