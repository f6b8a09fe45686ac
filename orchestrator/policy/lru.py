"""The null baseline: one precision, load on demand, one global least-recently-used order."""

from __future__ import annotations

from typing import Any

from orchestrator.events import DecisionBuffer, RouteEvent, StepReport, StoreView
from orchestrator.policy.base import ModelShape, PolicySettings, Share, SlotGroup, SlotPlan, divide


class LRU:
    """Every routed expert in the best tier. One slot group per matrix kind and slot size,
    shared by all layers; the store's own order does the rest, so Python is not called."""

    name = "lru"
    needs_callback = False
    needs_importance = False
    retention: float | None = None

    def __init__(self, shape: ModelShape, settings: PolicySettings) -> None:
        self._shape = shape

    def plan(self, budget_bytes: int) -> SlotPlan:
        """The same share of the experts of every group. Raises BudgetError."""
        layers_of: dict[tuple[int, int], list[int]] = {}
        for layer, tiers in enumerate(self._shape.slots):
            for kind, size in tiers[0].items():
                layers_of.setdefault((kind, size), []).append(layer)
        full = [len(layers) * self._shape.n_expert for layers in layers_of.values()]
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

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        """Nothing to write: tier 0 is what the buffer holds."""

    def step_done(self, report: StepReport) -> None:
        """Nothing to learn."""

    def report(self) -> dict[str, Any]:
        return {}

    def describe(self) -> str:
        return f"lru {self._shape.tiers[0]}"

    def set_retention(self, retention: float) -> bool:
        """One precision: nothing to retain."""
        return False
