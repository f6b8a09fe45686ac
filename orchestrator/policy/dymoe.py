"""DyMoE (papers/dymoe.txt), decode form: critical experts high, the others low or skipped.

Prefill asks for every expert in the high tier; token-guided importance (eq. 1-2) is not
part of this policy yet.
"""

from __future__ import annotations

import numpy as np

from orchestrator.errors import PolicyError
from orchestrator.events import SKIP, DecisionBuffer, Phase, RouteEvent, StoreView
from orchestrator.policy import prefetch
from orchestrator.policy.base import (
    ModelShape,
    PolicySettings,
    Share,
    SlotGroup,
    SlotPlan,
    divide,
)
from orchestrator.policy.importance import gate_critical, gate_order
from orchestrator.policy.retention import realised, solve

_DECODE = int(Phase.DECODE)


class DyMoE:
    """Per layer and step: the t_l experts with the highest gate scores in tier 0, the others
    in tier 1 or skipped; slot quotas per layer; the next layer's experts prefetched."""

    name = "dymoe"
    needs_callback = True

    def __init__(self, shape: ModelShape, settings: PolicySettings) -> None:
        """Raises PolicyError as set_retention does."""
        self._shape = shape
        self._settings = settings
        self._low = SKIP if settings.skip_low or len(shape.tiers) < 2 else 1
        self.set_retention(settings.retention)
        self._prefill_most = [0] * shape.n_layers

    def set_retention(self, retention: float) -> bool:
        """Solves the depth schedule for a new share; the slot quotas stay as planned.

        Raises PolicyError where experts would need a second tier and there is none."""
        shape = self._shape
        if len(shape.tiers) < 2 and not self._settings.skip_low and retention < 1.0:
            raise PolicyError(
                "the policy dymoe needs a second precision: give --low FILE, a file packed with "
                "several tiers, or --low-tier skip"
            )
        self.retention = retention
        self.lam, self.critical = solve(retention, shape.n_layers, shape.n_expert_used)
        self.realised = realised(self.critical, shape.n_expert_used)
        return True

    def plan(self, budget_bytes: int) -> SlotPlan:
        """One group per (layer, kind, tier). First the working set of one token in every
        layer, t_l high and k - t_l low experts, so that decoding needs no second pass; then
        the rest by expected use per byte. Raises BudgetError.

        A high slot answers high and low requests, (t + (k-t) * low/high bytes) / k of a
        layer's demand per byte; a low slot only the low ones, (k-t) / k. The high ones win
        unless a layer is almost wholly sub-critical.
        """
        shape, k = self._shape, self._shape.n_expert_used
        two = len(shape.tiers) > 1
        first: list[Share] = []
        for layer, t in enumerate(self.critical):
            first.append(Share(shape.expert_slot_bytes(layer, 0), 1, t, t))
            if two:
                low_units = max(1, k - t)
                first.append(Share(shape.expert_slot_bytes(layer, 1), 1, low_units, low_units))
        counts = divide(first, budget_bytes)
        per_layer = 2 if two else 1
        second: list[Share] = []
        for layer, t in enumerate(self.critical):
            high = first[layer * per_layer]
            ratio = shape.expert_slot_bytes(layer, 1) / high.unit_bytes if two else 0.0
            high_value, low_value = (t + (k - t) * ratio) / k, (k - t) / k
            if not two or high_value >= low_value:
                low_value = 0.0
            values = (high_value, low_value) if two else (high_value,)
            for tier, value in enumerate(values):
                index = layer * per_layer + tier
                floor = counts[index]
                full = shape.n_expert if value > 0 else floor
                second.append(Share(first[index].unit_bytes, floor, full, value))
        counts = divide(second, budget_bytes)

        groups: list[SlotGroup] = []
        group_of: dict[tuple[int, int, int], int] = {}
        for layer in range(shape.n_layers):
            for tier in range(per_layer):
                units = counts[layer * per_layer + tier]
                for kind, size in shape.slots[layer][tier].items():
                    group_of[layer, kind, tier] = len(groups)
                    groups.append(SlotGroup(size, units))
        self._prefill_most = counts[::per_layer]
        return SlotPlan(tuple(groups), group_of)

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        if event.phase == _DECODE:
            k, t = event.k, self.critical[event.layer]
            if t < k:
                self._demote(event, t, out)
            if event.n_ahead and self._settings.prefetch:
                low = self._low if self._low != SKIP else None
                prefetch.direct(event, view, out, self.critical, low)
        elif event.n_ahead and self._settings.prefetch:
            prefetch.by_frequency(event, view, out, self._prefill_most)

    def _demote(self, event: RouteEvent, t: int, out: DecisionBuffer) -> None:
        low, tier = self._low, out.tier
        out.renormalize = self._settings.renormalize
        if event.n_tokens == 1:
            ids = event.ids.tolist()
            for place in gate_order(event.weights.tolist())[t:]:
                tier[ids[place]] = low
        else:
            critical = gate_critical(event.ids_array, event.weights_array, t, len(tier))
            out.tier_array[:] = np.where(critical, 0, low)

    def describe(self) -> str:
        if len(self._shape.tiers) < 2 and not self._settings.skip_low:
            return f"dymoe {self._shape.tiers[0]}, one precision"
        low = "skip" if self._low == SKIP else self._shape.tiers[1]
        return (
            f"dymoe {self._shape.tiers[0]}/{low} r={self.retention:g} "
            f"(realised {self.realised:.3f})"
        )
