"""DyMoE: critical experts high, the others low or skipped."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from orchestrator.errors import PolicyError
from orchestrator.events import SKIP, DecisionBuffer, Phase, RouteEvent, StepReport, StoreView
from orchestrator.policy import prefetch
from orchestrator.policy.base import (
    ModelShape,
    PolicySettings,
    Share,
    SlotGroup,
    SlotPlan,
    divide,
)
from orchestrator.policy.importance import (
    gate_critical,
    gate_order,
    heavy_hitters,
    token_order,
)
from orchestrator.policy.monitor import Monitor, Prediction
from orchestrator.policy.retention import realised, solve

_DECODE = int(Phase.DECODE)

# Of a layer's high slots: those that a prompt may fill with what it uses most, and those that
# the rest of its experts pass through (EXPERIMENTS.md, "Long prompts").
_STAYS_SHARE = 0.75
_PASSING_SHARE = 0.5


class DyMoE:
    """Per layer and step, the t_l most important experts in tier 0, the others in tier 1 or
    skipped; slot quotas per layer; the next layer's experts prefetched.

    Importance is the gate score of a decode step's token (eq. 3), and the load of heavy-hitter
    tokens in prefill (eq. 2). The experts that a prompt uses most may fill three quarters of a
    layer's high slots; the others pass through half of them at most.
    """

    name = "dymoe"
    needs_callback = True

    def __init__(self, shape: ModelShape, settings: PolicySettings) -> None:
        """Raises PolicyError as set_retention does."""
        self._shape = shape
        self._settings = settings
        self._one_precision = len(shape.tiers) < 2 and not settings.skip_low
        self._low = SKIP if settings.skip_low or len(shape.tiers) < 2 else 1
        self._monitor = Monitor()
        self._prediction = Prediction(shape.n_layers)
        self._high_slots = [0] * shape.n_layers
        self._low_slots = [0] * shape.n_layers
        self.set_retention(settings.retention)

    @property
    def needs_importance(self) -> bool:
        """Whether prefill decides by the attention that tokens receive."""
        return not self._one_precision

    def set_retention(self, retention: float) -> bool:
        """Solves the depth schedule for a new share; the slot quotas stay as planned.

        Raises PolicyError where experts would need a second tier and there is none."""
        shape, schedule = self._shape, self._settings.schedule
        if self._one_precision and retention < 1.0:
            raise PolicyError(
                "the policy dymoe needs a second precision: give --low FILE, a file packed with "
                "several tiers, or --low-tier skip"
            )
        k = shape.n_expert_used
        self.lam, self.critical = solve(retention, shape.n_layers, k, schedule)
        self._prefill_counts: dict[int, list[int]] = {}
        self.retention: float | None = retention
        self.realised = realised(self.critical, k)
        return True

    def prefill_critical(self, layer: int, n_used: int) -> int:
        """t_l = ceil(r(l) * M) of a prompt's step, M being the experts that any of its tokens
        uses in the layer: a short prompt uses few of them, and r is a share of those. lambda is
        solved for each M, so that the mean is r in spite of the ceiling."""
        counts = self._prefill_counts.get(n_used)
        if counts is None:
            shape, schedule = self._shape, self._settings.schedule
            _, counts = solve(self.retention or 0.0, shape.n_layers, n_used, schedule)
            self._prefill_counts[n_used] = counts
        return counts[layer]

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
                passing = max(1, int(units * _PASSING_SHARE)) if tier == 0 else units
                for kind, size in shape.slots[layer][tier].items():
                    group_of[layer, kind, tier] = len(groups)
                    groups.append(SlotGroup(size, units, passing))
        self._high_slots = counts[::per_layer]
        self._low_slots = counts[1::2] if two else self._low_slots
        return SlotPlan(tuple(groups), group_of)

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        if event.phase == _DECODE or event.n_tokens == 1:
            self._decide_decode(event, out)
        else:
            self._decide_prefill(event, view, out)

    def _decide_decode(self, event: RouteEvent, out: DecisionBuffer) -> None:
        k, t, low = event.k, self.critical[event.layer], self._low
        used = event.ids.tolist()
        if t < k:
            out.renormalize = self._settings.renormalize
            if event.n_tokens == 1:
                tier = out.tier
                order = gate_order(event.weights.tolist())
                for place in order[t:]:
                    tier[used[place]] = low
                if low == SKIP:
                    used = [used[place] for place in order[:t]]
            else:
                critical = gate_critical(event.ids_array, event.weights_array, t, len(out.tier))
                out.tier_array[:] = np.where(critical, 0, low)
        if event.n_tokens == 1:
            self._prediction.observe(event.layer, used)
        if event.n_ahead and self._prefetches():
            asked = prefetch.direct(event, out, self.critical, low if low != SKIP else None)
            self._prediction.expect(event.layer + 1, asked)

    def _decide_prefill(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        layer, low, n_expert = event.layer, self._low, len(out.tier)
        scores = event.importance_array
        heavy = None
        if scores is not None:
            heavy = heavy_hitters(scores, self._settings.heavy_hitters)
        # equals in importance: what is in memory costs nothing
        here = None if self._settings.exact else view.resident_array[layer] == 0
        order, n_used = token_order(event.ids_array, heavy, n_expert, here)
        t = self.prefill_critical(layer, n_used)
        if t < n_used:
            out.renormalize = self._settings.renormalize
            out.tier_array[order[t:]] = low
        out.passing_array[order[self._stays(layer) :]] = 1
        if event.n_ahead and self._settings.prefetch != "off":
            ids = event.ahead_ids_array[0]
            if layer + 2 == self._shape.n_layers:  # the last one computes the last token alone
                ids, heavy = ids[-1:], None
            prefetch.by_frequency(
                layer + 1,
                ids,
                view,
                out,
                heavy=heavy,
                critical=partial(self.prefill_critical, layer + 1),
                low=low if low != SKIP else None,
                room=(self._high_slots[layer + 1], self._low_slots[layer + 1]),
                stays=self._stays(layer + 1),
            )

    def _stays(self, layer: int) -> int:
        """How many of a prompt's experts stay in memory."""
        if not self._settings.prompts_pass:
            return self._shape.n_expert
        return int(self._high_slots[layer] * _STAYS_SHARE)

    def _prefetches(self) -> bool:
        how = self._settings.prefetch
        return how == "on" or (how == "auto" and self._monitor.on)

    def step_done(self, report: StepReport) -> None:
        """The monitor learns from decode steps of one token."""
        if report.phase == _DECODE and report.n_tokens == 1 and self._settings.prefetch == "auto":
            self._monitor.step(report.us)

    def report(self) -> dict[str, Any]:
        """prefetch: "off", "on" or "paused", while it does not pay; recall and precision of
        the decode look-ahead per layer, since the engine started."""
        how = self._settings.prefetch
        if how == "auto":
            how = "on" if self._monitor.pays else "paused"
        recall, precision = self._prediction.recall(), self._prediction.precision()
        return {"prefetch": how, "recall": recall, "precision": precision}

    def describe(self) -> str:
        high = self._shape.tiers[0]
        if self._one_precision:
            text = f"dymoe {high}, one precision"
        else:
            low = "skip" if self._low == SKIP else self._shape.tiers[1]
            text = f"dymoe {high}/{low} r={self.retention:g} (realised {self.realised:.3f})"
        return text if self._monitor.pays else text + ", prefetch paused"
