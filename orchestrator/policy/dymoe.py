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
    """Return the number of critical experts t_l of each MoE layer l (eq. 5 of the DyMoE paper).

    Critical experts are computed in the better of two precisions. Their number is

        t_l = max(1, ceil(r(l) * m)), with r(l) = (1 - lam) * c(l) + lam

    - m: the number of experts from which the critical ones are chosen.
    - lam: the smallest fraction of critical experts in a layer, 0 to 1.
    - schedule: defines c(l) (see `falling`). With "cosine", c(l) falls from 1 in the first layer to
      0 in the last.

    For example, with m = 8, lam = 0.5 and "cosine", the first layer has 8 critical experts, and the
    last layer has 4.
    """
    # The paper has no minimum of 1. Without it, lam = 0 would give the last layer no critical
    # expert. If the other experts are skipped, the layer would then compute no expert at all.
    shares = [(1 - lam) * c + lam for c in falling(schedule, n_layers)]
    return [min(m, max(1, math.ceil(share * m - _NOISE))) for share in shares]


def realised(counts: list[int], m: int) -> float:
    """Return the fraction of used experts that are critical, as a mean over all layers.

    Critical experts are computed in the better of two precisions. The setting `retention` is the
    wanted value of this fraction. The realised value can differ, because the counts are integers.

    - counts: the number of critical experts of each layer.
    - m: the number of experts that each layer uses, critical or not.
    """
    return sum(counts) / (m * len(counts))


def counts_for_retention(
    retention: float, n_layers: int, m: int, schedule: str = COSINE
) -> list[int]:
    """Return how many experts of each layer are critical, for a wanted mean fraction `retention`.

    Each layer uses m experts. The critical ones are computed in the better of two precisions.

    - retention: the wanted fraction, 0 to 1, as a mean over all layers. The result has the nearest
      mean that is possible.
    - schedule: how the fraction changes from the first layer to the last. With "flat", it is the
      same in all layers. With "cosine" and "linear", it falls from 1. Means below about one half
      are then impossible.
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
    """Prefetch the experts that the next layers are predicted to select (eq. 8 of the DyMoE paper).

    - event: the current layer in a decode step, with each token's predicted experts for the next
      layers, best first.
    - out: receives the prefetch requests.
    - critical: a number t for each layer. The first t predicted experts of each token are requested
      in tier 0, the best precision.
    - low: the tier in which the other predicted experts are requested. If it is None, they are not
      requested.

    Return all experts that were requested for the layer directly after the current one.
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
    """Return the experts that any token is predicted to select in a layer, critical experts first.

    - ids: the predicted experts of each token, best first, int32 [number of tokens, k].
    - t: an expert is critical if it is among the first t experts of at least one token.
    - n_expert: the number of experts in the layer.

    The result is (experts, n_critical). The first n_critical experts are critical. In both parts of
    the list, experts that more tokens are predicted to select come first.

    For example, ids = [[3, 1], [2, 3]] and t = 1 give ([3, 2, 1], 2).
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
    """Settings of the policy `dymoe`, which computes important experts in a higher precision."""

    retention: float | None = setting(
        None,
        "Mean share of a token's experts that are critical, 0 to 1. Critical experts are computed "
        "in the high precision.",
        metavar="R",
        within=(0.0, 1.0),
        shown=f"{_USUAL_RETENTION}, or 1.0 if all experts have the same precision",
        live=True,
    )
    schedule: str = setting(
        COSINE,
        f"How the share of experts in the high precision (--retention) falls from the first to "
        f"the last layer: {', '.join(SCHEDULES)} (flat: equal shares).",
        choices=SCHEDULES,
    )
    lower_which: str = setting(
        GATES,
        "Which experts of an answer get the low precision or are skipped. gates (DyMoE paper): "
        "those with the lowest routing weights. missing: at most as many as with gates, and only "
        "experts that are not in memory in the high precision.",
        metavar="WHICH",
        choices=(GATES, MISSING),
    )
    heavy_hitters: float = setting(
        0.4,
        "Share of a prompt's tokens that decide which experts get the high precision: the tokens "
        "that receive the most attention.",
        metavar="R",
        within=(0.0, 1.0),
    )
    prefetch_low: bool = setting(
        True,
        "Prefetch predicted experts in the low precision, too. The DyMoE paper (eq. 8) prefetches "
        "only in the high precision.",
    )
    prompts_pass: bool = setting(
        True,
        "Limit the expert slots for the less important experts of a prompt, so that they do not "
        "evict all other experts.",
    )


def _one_precision(shape: ModelShape, rules: Rules) -> bool:
    """Return whether experts have only one tier: no lower tier is in use and none is skipped."""
    return len(shape.tiers) < 2 and not rules.skip


class Depth(NamedTuple):
    """How many experts of each layer are critical: computed in the better of two precisions.

    A token uses k experts in each layer, and some are critical. A fraction is the number of a
    token's critical experts divided by k, as a mean over all layers.

    - retention: the wanted fraction, 0 to 1.
    - critical: the number of a token's critical experts in each layer, 1 to k.
    - realised: the fraction that results from `critical`. It can differ from `retention`, because
      the numbers are integers.
    - least: the smallest fraction that the setting `schedule` allows. If `retention` is smaller,
      `realised` is equal to `least`.
    """

    retention: float
    critical: list[int]
    realised: float
    least: float

    @classmethod
    def of(cls, shape: ModelShape, settings: DyMoESettings, rules: Rules) -> Depth:
        """Return how many experts of each layer are critical, for settings of the policy `dymoe`.

        Critical experts are computed in the better of two precisions (tiers). The others are
        computed in the lower tier, or skipped. The setting retention is the mean fraction of
        critical experts.

        Raises TiersError if retention is below 1, but there is no lower tier and `rules` forbid
        skipping.
        """
        one_precision = _one_precision(shape, rules)
        usual = 1.0 if one_precision else _USUAL_RETENTION
        retention = usual if settings.retention is None else settings.retention
        if one_precision and retention < 1.0:
            raise TiersError(
                "the policy dymoe needs a second precision",
                "give --low FILE or a file packed with several precisions, or skip experts with "
                "--low-tier skip",
            )
        n_layers, k, schedule = shape.n_layers, shape.n_expert_used, settings.schedule
        critical = counts_for_retention(retention, n_layers, k, schedule)
        least = realised(counts_for_retention(0.0, n_layers, k, schedule), k)
        return cls(retention, critical, realised(critical, k), least)


@dataclass(frozen=True)
class DyMoEPlacement(Placement):
    """The expert slots of the policy `dymoe`, and the number of critical experts per layer.

    - room: the number of slots of each layer in each tier, indexed [layer][tier].
    - depth: how many experts of each layer are critical, that is, computed in the high tier.
    """

    room: Sequence[Sequence[int]]
    depth: Depth

    def fractions(self, uses: np.ndarray) -> np.ndarray:
        """Return how often the policy requests each tier (precision) of each expert.

        The result is float64 [n_layers, n_expert, n_tiers]: fractions of the expert's uses by
        tokens. They are the same for every expert:

        - tier 0, the better precision: the mean fraction of a token's experts that are critical.
        - tier 1: all other uses, for example 0.25 if the value of tier 0 is 0.75.

        n_tiers is the number of tiers in use, 1 or 2. If it is 1, the result has only the values of
        tier 0, and all other uses skip the expert.

        uses: an array [n_layers, n_expert], of which only the shape is used.
        """
        high = self.depth.realised
        mix = (high, 1.0 - high)[: len(self.shape.tiers)]
        return np.broadcast_to(mix, (*uses.shape, len(mix)))

    @property
    def text(self) -> str:
        high, depth = self.shape.tiers[0], self.depth
        if _one_precision(self.shape, self.rules):
            return f"dymoe {high}, one precision"
        skips = self.rules.skip or len(self.shape.tiers) < 2
        low = "skip" if skips else self.shape.tiers[1]
        achieved = f"realised {depth.realised:.3f}"
        if depth.retention < depth.least:
            schedule = self.settings.schedule
            achieved = (
                f"realised {depth.realised:.3f}: the smallest retention that --schedule "
                f"{schedule} allows"
            )
            if schedule != FLAT:
                achieved = f"{achieved}; --schedule {FLAT} allows a smaller one"
        return f"dymoe {high}/{low} retention={depth.retention:g} ({achieved})"


class DyMoE(Policy):
    """Computes the most important experts of each layer in tier 0, the better of two precisions.

    These experts are called critical, and the setting `retention` is their mean fraction. The
    others are computed in tier 1 or skipped.

    - For a token of an answer, the experts with the highest gate scores are critical (eq. 3 of the
      DyMoE paper).
    - For a prompt, the experts that the most heavy hitters (important tokens) use are critical
      (eq. 2).

    In a step of several sequences, an expert is critical if it is critical for one of them.
    """

    about = About(
        name="dymoe",
        summary=(
            "The default if not every expert fits in memory. The most important experts of a token "
            "(critical experts) are computed in the high precision, the others in the low "
            "precision or not at all. Experts of the next layer are prefetched while that is "
            "faster."
        ),
        Settings=DyMoESettings,
        reason="chooses the precisions of experts token by token",
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
        """Divide a memory budget into expert slots, and return the placement with these slots.

        A slot is memory for one expert, in one tier (precision). Each layer first gets slots for
        the experts of one token: in tier 0 for the critical (most important) experts, and in tier 1
        for the others. The rest of the budget adds slots.

        The setting retention is the fraction of critical experts. Raises TiersError if it is below
        1, but the other experts can neither be computed in tier 1 (because only tier 0 is in use)
        nor be skipped (because `rules` forbid it).
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
            # A high slot serves requests for both tiers. A low request counts less there, because
            # it saves fewer bytes. If a high slot is at least as useful as a low slot, the layer
            # gets no further low slots.
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
        """Replace the settings, and compute again how many experts of each layer are critical.

        Critical experts are computed in the better of two precisions. The setting `retention` is
        the fraction of experts that are critical. If it is below 1, the other experts must be
        computed in the lower precision or skipped. If neither is possible, this method raises
        TiersError and keeps the old settings.
        """
        depth = Depth.of(self.shape, settings, self.rules)
        super().update_settings(settings)
        self.placement = replace(self.placement, depth=depth)
        self.critical, self._prefill_counts = depth.critical, {}

    def prefill_critical(self, layer: int, n_used: int) -> int:
        """Return how many experts of a layer are critical for a prompt that uses n_used of them.

        Critical experts are computed in the better of two precisions. Their mean fraction over all
        layers is about the value of the setting `retention`. By default, early layers have a larger
        fraction than late layers.
        """
        counts = self._prefill_counts.get(n_used)
        if counts is None:
            shape, schedule = self.shape, self.settings.schedule
            counts = counts_for_retention(
                self.placement.depth.retention, shape.n_layers, n_used, schedule
            )
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
        """Return a mask of the experts that the tokens need in the high tier, bool [n_expert].

        ids, weights: the chosen experts of each token and their routing weights, [T, k].

        With the setting lower_which "gates", each token needs its t experts with the highest
        weights. t is the number of critical experts of the layer.

        With "missing", each token may lower k - t experts that are not in memory in the high tier.
        These are the missing experts with the lowest weights. The first quarter of the token's
        experts by weight, at least one, is never lowered. The mask has all experts that some token
        does not lower, and all experts in memory in the high tier.
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
        """Return whether prefetching is on, and its recall and precision for each layer."""
        return self._ahead.report()

    def describe(self) -> str:
        return self.placement.text + self._ahead.note
