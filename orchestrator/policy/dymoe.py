"""DyMoE: critical experts in the high tier, the others in the low tier or skipped."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from orchestrator.allocation.look_ahead import OFF, LookAhead, Prefetching
from orchestrator.allocation.prompts import Prompts, gate_order
from orchestrator.allocation.slots import (
    COSINE,
    FLAT,
    SCHEDULES,
    ModelShape,
    Rules,
    Share,
    divide,
    falling,
    layer_groups,
)
from orchestrator.errors import TiersError
from orchestrator.events import (
    SKIP,
    DecisionBuffer,
    Phase,
    RouteEvent,
    StepReport,
    StoreView,
    distinct,
)
from orchestrator.policy.base import (
    EVERY_STEP,
    About,
    History,
    Placement,
    Policy,
    PolicyRequirements,
    Precisions,
)
from orchestrator.settings import setting

# Tolerance of the ceiling: if r(l) * M is an integer in theory, rounding noise must not add an
# expert.
_NOISE = 1e-9


def critical_counts(lam: float, n_layers: int, m: int, schedule: str = COSINE) -> list[int]:
    """Return t_l, the number of critical experts, of every MoE layer (eq. 5).

    t_l is ceil(r(l) * M), at least 1.

    r(l) = (1 - lambda) * c(l) + lambda is the share of critical experts in layer l; `falling`
    returns c(l), and the cosine schedule is eq. 4. The minimum of 1 differs from the paper: with
    lambda = 0, the last layer of a 4/0 plan would have no expert.
    """
    shares = [(1 - lam) * c + lam for c in falling(schedule, n_layers)]
    return [min(m, max(1, math.ceil(share * m - _NOISE))) for share in shares]


def realised(counts: list[int], m: int) -> float:
    """Return the mean of t_l / M over the MoE layers."""
    return sum(counts) / (m * len(counts))


def solve(retention: float, n_layers: int, m: int, schedule: str = COSINE) -> list[int]:
    """Return t_l of every layer for the lambda whose mean share t_l / M is nearest to retention.

    M is the number of experts in the layer from which t_l are critical: those that a token selects
    in decode, those that the prompt uses in prefill. lambda is in [0, 1], so shares below about one
    half are reached only with the flat schedule: in eq. 4, the mean of r(l) is (1 + lambda) / 2.
    """
    if n_layers == 1:
        return critical_counts(retention, 1, m, schedule)
    # The counts change only just after a lambda at which some r(l) * M is an integer.
    steps = {0.0, 1.0}
    for c in falling(schedule, n_layers):
        if c < 1.0:
            for j in range(math.ceil(c * m), m + 1):
                lam = (j / m - c) / (1 - c)
                if 0.0 <= lam <= 1.0:
                    steps.add(lam)
    edges = sorted(steps)

    def mean(index: int) -> float:
        return realised(critical_counts(edges[index], n_layers, m, schedule), m)

    above = bisect_right(range(len(edges)), retention, key=mean)
    choices = [i for i in (above - 1, above) if 0 <= i < len(edges)]
    best = min(choices, key=lambda i: (abs(mean(i) - retention), -i))
    return critical_counts(edges[best], n_layers, m, schedule)


def load_ahead(
    event: RouteEvent, out: DecisionBuffer, critical: list[int], low: int | None
) -> list[int]:
    """Prefetch the experts that the next layers are predicted to select in a decode step (eq. 8).

    critical[layer] is t_l. Predicted ranks below t_l are requested in tier 0, the other ranks in
    tier `low`, or not at all if it is None. Resident experts are requested too, so that the store
    keeps them. With several tokens, the predictions of all tokens are requested, by frequency.
    Returns the experts requested for the next layer.
    """
    asked: list[int] = []
    for ahead in range(event.n_ahead):
        layer = event.layer + 1 + ahead
        t = critical[layer]
        if event.n_tokens == 1:
            experts = event.ahead_ids[ahead].tolist()
        else:
            experts, t = union(event.ahead_ids_array[ahead], t, len(out.tier))
        if low is None:
            del experts[t:]
        out.prefetch_all(layer, experts[:t], 0)
        if low is not None:
            out.prefetch_all(layer, experts[t:], low)
        if ahead == 0:
            asked = experts
    return asked


def union(ids: np.ndarray, t: int, n_expert: int) -> tuple[list[int], int]:
    """Return the experts that any token is predicted to select, critical ones first.

    Also return the number of critical ones.

    An expert is critical if it is among the first t of some token. Both parts are ordered by the
    number of tokens, then by the best rank, then by index. ids: int32 [T, k], best first.
    """
    n_tokens, k = ids.shape
    load = np.bincount(ids.ravel(), minlength=n_expert)
    best = np.full(n_expert, k)
    np.minimum.at(best, ids, np.arange(k)[None, :].repeat(n_tokens, 0))
    order = np.lexsort((best, -load, best >= t))
    order = order[load[order] > 0]
    return order.tolist(), int(np.count_nonzero(best < t))


_DECODE = int(Phase.DECODE)

_USUAL_RETENTION = 0.75

GATES, MISSING = "gates", "missing"


@dataclass(frozen=True)
class DyMoESettings(LookAhead):
    """Settings of the policy dymoe."""

    retention: float | None = setting(
        None,
        "Average share of critical experts, 0 to 1.",
        metavar="R",
        within=(0.0, 1.0),
        shown=f"1, or {_USUAL_RETENTION} with a low precision",
        live=True,
    )
    schedule: str = setting(
        COSINE,
        f"How the share of critical experts falls with depth: {', '.join(SCHEDULES)}.",
        choices=SCHEDULES,
    )
    lower_which: str = setting(
        GATES,
        "Which experts of an answer are lowered or skipped: those with the lowest gates, as in "
        "the paper (gates), or at most as many of those that are not resident (missing).",
        metavar="WHICH",
        choices=(GATES, MISSING),
    )
    heavy_hitters: float = setting(
        0.4,
        "Share of a prompt's tokens, those that receive the most attention, whose experts count "
        "as critical.",
        metavar="R",
        within=(0.0, 1.0),
    )
    prefetch_low: bool = setting(
        True,
        "Also prefetch experts of an answer that are predicted to be low; the paper (eq. 8) "
        "prefetches only critical ones.",
    )
    prompts_pass: bool = setting(
        True,
        "Stream the experts that a prompt uses less through a part of the slots, so that they do "
        "not evict all others.",
    )


def _one_precision(shape: ModelShape, rules: Rules) -> bool:
    """Whether there is no lower tier and no skipping."""
    return len(shape.tiers) < 2 and not rules.skip


class Depth(NamedTuple):
    """The number of critical experts by depth.

    retention: the requested average share. critical: t_l of each layer. realised: the average of
    t_l / k. least: the smallest average that the schedule can reach.
    """

    retention: float
    critical: list[int]
    realised: float
    least: float

    @classmethod
    def of(cls, shape: ModelShape, settings: DyMoESettings, rules: Rules) -> Depth:
        """Solve the schedule for the settings.

        Raises TiersError if retention is below 1 and there is no second tier.
        """
        one_precision = _one_precision(shape, rules)
        usual = 1.0 if one_precision else _USUAL_RETENTION
        retention = usual if settings.retention is None else settings.retention
        if one_precision and retention < 1.0:
            raise TiersError(
                "the policy dymoe needs a second precision",
                "give --low FILE, a file packed with several tiers, or --low-tier skip",
            )
        n_layers, k, schedule = shape.n_layers, shape.n_expert_used, settings.schedule
        critical = solve(retention, n_layers, k, schedule)
        least = realised(solve(0.0, n_layers, k, schedule), k)
        return cls(retention, critical, realised(critical, k), least)


@dataclass(frozen=True)
class DyMoEPlacement(Placement):
    """A placement with a schedule of critical experts.

    room: the number of slots of each layer in each tier. depth: the number of critical experts.
    """

    room: Sequence[Sequence[int]]
    depth: Depth

    def fractions(self, uses: np.ndarray) -> np.ndarray:
        """The realised share of uses is high, and the rest is low or skipped."""
        high = self.depth.realised
        mix = (high, 1.0 - high)[: len(self.shape.tiers)]
        return np.broadcast_to(mix, (*uses.shape, len(mix)))

    @property
    def text(self) -> str:
        high, depth = self.shape.tiers[0], self.depth
        if _one_precision(self.shape, self.rules):
            return f"dymoe {high}, one precision"
        skips = self.rules.skip or len(self.shape.tiers) < 2
        low, less = "skip" if skips else self.shape.tiers[1], ""
        if depth.retention < depth.least:
            schedule = self.settings.schedule
            other = "" if schedule == FLAT else f"; --schedule {FLAT} does"
            less = f": the schedule {schedule} reaches no less{other}"
        return f"dymoe {high}/{low} r={depth.retention:g} (realised {depth.realised:.3f}{less})"


class DyMoE(Policy):
    """Compute the t_l most important experts of each layer and step in tier 0.

    The others are computed in tier 1 or not at all. Each layer has its own slots, and the next
    layer's experts are prefetched.

    The importance of an expert is its gate score for a token of an answer (eq. 3), and the number
    of heavy-hitter tokens for a prompt (eq. 2). In a step of several sequences, each sequence has
    its own ranking, and an expert is high if one of them needs it high. The experts that a prompt
    uses most may fill three quarters of a layer's high slots; the others are streamed through at
    most half of them.
    """

    about = About(
        name="dymoe",
        summary=(
            "The default if not every expert fits. Critical experts are computed in the high "
            "tier, the others in the low tier or skipped. Early layers have more critical "
            "experts than late ones. Prefetches for the next layer while that is faster."
        ),
        Settings=DyMoESettings,
        reason="decides token by token",
        precisions=Precisions(most=2, lossless={"retention": 1.0}),
        wants=PolicyRequirements(EVERY_STEP, importance=True),
    )
    settings: DyMoESettings
    placement: DyMoEPlacement

    @classmethod
    def place(
        cls,
        shape: ModelShape,
        settings: Any,
        rules: Rules,
        budget_bytes: int,
        history: History,
    ) -> DyMoEPlacement:
        """Divide the budget into one slot group per (layer, kind, tier).

        First comes the working set of one token in every layer, t_l high and k - t_l low experts,
        so that one token's experts fit at once. The rest is divided by expected use per byte.

        A high slot serves high and low requests: (t + (k-t) * low/high bytes) / k of a layer's
        demand per byte. A low slot serves only low requests: (k-t) / k. High slots win unless
        nearly all experts of a layer are sub-critical.
        """
        settings = settings.with_usual()
        depth = Depth.of(shape, settings, rules)
        one_precision = _one_precision(shape, rules)
        k, n = shape.n_expert_used, min(2, len(shape.tiers))
        first = [
            Share(shape.expert_slot_bytes(layer, tier), 1, units, units)
            for layer, t in enumerate(depth.critical)
            for tier, units in enumerate((t, max(1, k - t))[:n])
        ]
        counts = divide(first, budget_bytes)
        second: list[Share] = []
        for layer, t in enumerate(depth.critical):
            pair = slice(layer * n, layer * n + n)
            high, *low = first[pair]
            ratio = low[0].unit_bytes / high.unit_bytes if low else 0.0
            high_value, low_value = (t + (k - t) * ratio) / k, (k - t) / k
            values = high_value, 0.0 if high_value >= low_value else low_value
            for each, floor, value in zip(first[pair], counts[pair], values, strict=False):
                full = shape.n_expert if value > 0 else floor
                second.append(Share(each.unit_bytes, floor, full, value))
        counts = divide(second, budget_bytes)
        room = [counts[at : at + n] for at in range(0, len(counts), n)]
        by_gates = settings.lower_which == GATES
        # With exact rules, decisions must not depend on which experts are resident.
        ahead = settings.prefetch != OFF and not (rules.exact and by_gates)
        wants = replace(
            cls.about.wants,
            n_ahead=(settings.n_ahead or 0) if ahead else 0,
            importance=not one_precision,
            by_residency=not by_gates and not one_precision,
        )
        slots = layer_groups(shape, room)
        return DyMoEPlacement(cls, shape, settings, rules, slots, wants, room, depth)

    def _set_up(self) -> None:
        self._low = SKIP if self.rules.skip or len(self.shape.tiers) < 2 else 1
        self._ahead = Prefetching(
            self.settings.prefetch if self.wants.n_ahead else OFF, self.shape.n_layers
        )
        self._prompts = Prompts(
            self.rules,
            self.prefill_critical,
            self._low,
            self.settings.heavy_hitters,
            self.settings.prompts_pass,
            self._high,
            self.placement.room,
        )
        self._prefill_counts: dict[int, list[int]] = {}
        self.critical = self.placement.depth.critical

    def update_settings(self, settings: Any) -> None:
        """Replace the settings and solve the depth schedule again."""
        depth = Depth.of(self.shape, settings, self.rules)
        super().update_settings(settings)
        self.placement = replace(self.placement, depth=depth)
        self.critical, self._prefill_counts = depth.critical, {}

    def prefill_critical(self, layer: int, n_used: int) -> int:
        """Return t_l = ceil(r(l) * M) for a prompt.

        M is n_used, the number of experts that the prompt's tokens use in the layer. lambda is
        solved for each M, so that the mean of t_l / M stays near r despite rounding.
        """
        counts = self._prefill_counts.get(n_used)
        if counts is None:
            shape, schedule = self.shape, self.settings.schedule
            counts = solve(self.placement.depth.retention, shape.n_layers, n_used, schedule)
            self._prefill_counts[n_used] = counts
        return counts[layer]

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        if event.phase == _DECODE or event.n_tokens == 1:
            self._decide_decode(event, view, out)
        else:
            self._prompts.decide(event, view, out, self._ahead.asked != OFF)

    def _decide_decode(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        k, t, low = event.k, self.critical[event.layer], self._low
        used = event.ids.tolist()
        if t < k:
            out.renormalize = self.rules.renormalize
            if event.n_tokens == 1 and not self.wants.by_residency:
                tier = out.tier
                order = gate_order(event.weights.tolist())
                for place in order[t:]:
                    tier[used[place]] = low
                if low == SKIP:
                    used = [used[place] for place in order[:t]]
            else:
                high = self._high(event.layer, event.ids_array, event.weights_array, view)
                routed = distinct(event.ids_array)
                out.tier_array[routed[~high[routed]]] = low
                used = (routed[high[routed]] if low == SKIP else routed).tolist()
        if event.n_tokens == 1:
            self._ahead.score.observe(event.layer, used)
        if event.n_ahead and self._ahead.on:
            ahead = low if low != SKIP and self.settings.prefetch_low else None
            asked = load_ahead(event, out, self.critical, ahead)
            self._ahead.score.expect(event.layer + 1, asked)

    def _high(
        self, layer: int, ids: np.ndarray, weights: np.ndarray, view: StoreView
    ) -> np.ndarray:
        """Return which experts the tokens need in the high tier, bool [n_expert].

        ids, weights: [T, k].

        By gates, these are the t_l experts with the highest gates of each token. By residency
        (lower_which "missing"), at most k - t_l experts of each token that are not resident in the
        high tier are lowered, lowest gates first. An expert among the token's first quarter (at
        least one), or one that another token needs high, is never lowered.
        """
        t, k = self.critical[layer], ids.shape[1]
        order = np.argsort(-weights, axis=1, kind="stable")
        ranked = np.take_along_axis(ids, order, axis=1)
        if not self.wants.by_residency:
            high: np.ndarray = np.zeros(self.shape.n_expert, bool)
            high[ranked[:, :t]] = True
            return high
        most, kept_high = k - t, max(1, k // 4)
        here = view.resident_array[layer] == 0
        high = here.copy()
        for row in ranked:
            missing = row[kept_high:][~here[row[kept_high:]]]
            high[row[:kept_high]] = True
            high[missing[: max(0, len(missing) - most)]] = True
        return high

    def on_step(self, report: StepReport) -> tuple[()]:
        self._ahead.step_done(report)
        return ()

    def report(self) -> Mapping[str, Any]:
        """Return the report of Prefetching."""
        return self._ahead.report()

    def describe(self) -> str:
        return self.placement.text + self._ahead.note
