"""DynaExq: every expert is resident in exactly one of two tiers, and hot experts are high."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from gguf_tools.units import format_size
from orchestrator.allocation.pools import (
    Places,
    Pool,
    TierPools,
    Tracker,
    pools_by_size,
    slot_plan,
    slot_sizes,
)
from orchestrator.allocation.settings import Shared
from orchestrator.allocation.slots import (
    FileTier,
    ModelShape,
    Rules,
    Share,
    SlotPlan,
    Transition,
    divide,
)
from orchestrator.events import ABSENT, DecisionBuffer, RouteEvent, StepReport, StoreView
from orchestrator.policy.base import (
    EVERY_STEP,
    About,
    History,
    Placement,
    PolicyRequirements,
    Precisions,
    TierOffer,
)
from orchestrator.policy.learning import MAX_QUEUE, Intervals, Learning, wants_to_learn
from orchestrator.settings import inherit, setting

HIGH, LOW = 0, 1
# Marks an expert that is moving to another tier.
MOVING = 254


@dataclass(slots=True)
class Swap:
    """An exchange of two experts of a layer between two tiers (precisions).

    First, the expert `down` moves from the high tier to the low tier. Then the expert `up` moves to
    the high tier.

    - down: None if the high tier has a free slot, so that only `up` moves.
    - promoting: whether the move of `up` has begun.
    """

    layer: int
    up: int
    down: int | None
    promoting: bool = False

    @property
    def moving(self) -> int:
        """The expert that changes its tier (precision) now, in this exchange of two experts.

        First, the expert `down` moves from the high tier to the low tier. Then the expert `up`
        moves to the high tier. If `down` is None, only `up` moves.
        """
        return self.up if self.promoting or self.down is None else self.down


# If not all low copies fit: the share of the budget, after one token's low copies, for high copies.
CACHED_HIGH = 0.5


def resident_pools(shape: ModelShape, capacity: Sequence[int]) -> TierPools:
    """Return slots that hold every expert of a model, in the high tier or in the low tier.

    The high tier is the better of two precisions. In each layer, capacity[layer] experts are in the
    high tier, and the others are in the low tier.

    The low tier also has a few spare slots, so that two experts can exchange their tiers. One
    expert first moves down into a spare slot. The other expert then moves up into the high slot
    that is now free.
    """
    n_low = [shape.n_expert - n_high for n_high in capacity]
    high, low = Places((HIGH,), capacity, reserve=False), Places((LOW,), n_low, most_moves=4)
    return TierPools(shape, [high, low])


def fewest_high(shape: ModelShape, most: int = 1) -> list[int]:
    """Return the minimum number of experts in the high tier (the better precision), for each layer.

    Layers with about equal expert sizes share a pool of memory, and each pool holds at least one
    high expert. So the minimum is 1 for the first of each pool's `layers`, and 0 for the others.

    most: the maximum number of high experts per layer. The user can set it to 0, and the result is
    then 0 for all layers. Larger values do not change the result.
    """
    first = {pool.layers[0] for pool in pools_by_size(shape, HIGH)}
    return [min(most, int(layer in first)) for layer in range(shape.n_layers)]


def resident_plan(
    shape: ModelShape, budget_bytes: int, most_high: int | None
) -> tuple[TierPools, list[int]] | None:
    """Divide a memory budget into slots that hold all experts, each in one of two precisions.

    Return (slots, n_high). n_high[layer] is the number of experts of a layer in the high tier, the
    better precision. The other experts of the layer are in the low tier. All layers have about the
    same number of high experts: as many as the budget allows, but at most most_high.

    Return None if the budget is too small even with the fewest high experts (see `fewest_high`).
    """
    full = shape.n_expert if most_high is None else min(shape.n_expert, most_high)
    least, sizes = fewest_high(shape, full), slot_sizes(shape)
    spare = budget_bytes - resident_pools(shape, least).plan().total_bytes
    if spare < 0:
        return None
    gains = np.maximum(1, sizes[:, HIGH] - sizes[:, LOW]).tolist()
    shares = [Share(gain, n, full, 1.0) for gain, n in zip(gains, least, strict=True)]
    capacity = divide(shares, spare + sum(share.unit_bytes * share.floor for share in shares))
    return resident_pools(shape, capacity), capacity


def _shortlist(swaps: Sequence[Swap], low_pool_of: np.ndarray) -> list[Swap]:
    """Return the exchanges to keep in the queue: for each pool of low slots, the first MAX_QUEUE.

    An exchange swaps the tiers of two experts of a layer. It waits for a spare slot in the layer's
    pool of low slots. The limit per pool prevents a slow pool from filling the queue. low_pool_of:
    the pool of low slots that each layer uses.
    """
    listed = Counter[int]()
    kept = []
    for swap in swaps:
        pool = int(low_pool_of[swap.layer])
        listed[pool] += 1
        if listed[pool] <= MAX_QUEUE:
            kept.append(swap)
    return kept


def cache_plan(
    shape: ModelShape, budget_bytes: int, most_high: int | None
) -> tuple[SlotPlan, int, list[int]]:
    """Plan a cache for a memory budget that is too small for all experts.

    The cache holds experts in a high tier (the better precision) and a low tier. Return (slots,
    n_high, n_low).

    - slots: a SlotPlan, the sizes and numbers of the memory slots.
    - n_high: the maximum number of high experts in a layer, the same for all layers.
    - n_low: the maximum number of low experts in each layer.

    First, the low experts of one token (n_expert_used per layer) are subtracted from the budget.
    High experts get at most half of the remaining memory. Low experts get the rest.

    most_high: the maximum of n_high; None for no maximum.
    """
    layers = range(shape.n_layers)
    low_bytes = [shape.expert_slot_bytes(layer, LOW) for layer in layers]
    spare = budget_bytes - shape.n_expert_used * sum(low_bytes)
    high_bytes = sum(shape.expert_slot_bytes(layer, HIGH) for layer in layers)
    n_high = max(0, int(CACHED_HIGH * spare) // high_bytes)
    n_high = min(n_high, shape.n_expert if most_high is None else most_high)
    if n_high:
        high = [Pool((layer,), shape.slots[layer][HIGH], n_high) for layer in layers]
    else:
        # The store requires at least one slot of each size.
        high = [Pool(pool.layers, pool.sizes, 1) for pool in pools_by_size(shape, HIGH)]
    rest = shape.n_expert - n_high
    shares = [Share(each, 1, max(1, rest), 1.0) for each in low_bytes]
    fixed = [Share(pool.unit_bytes, pool.n_slots, pool.n_slots, 0.0) for pool in high]
    counts = divide([*shares, *fixed], budget_bytes)[: shape.n_layers]
    low = [Pool((layer,), shape.slots[layer][LOW], n_slots) for layer, n_slots in enumerate(counts)]
    pools = [(pool, (HIGH,), False) for pool in high] + [(pool, (LOW,), False) for pool in low]
    return slot_plan(pools), n_high, counts


def as_range(counts: np.ndarray) -> str:
    """Return the minimum and the maximum of the counts as text, such as "3" or "3 to 5"."""
    fewest, most = int(counts.min()), int(counts.max())
    return str(fewest) if fewest == most else f"{fewest} to {most}"


@dataclass(frozen=True)
class DynaExqSettings(Intervals):
    """Settings of the policy `dynaexq`, which keeps the most used experts in a higher precision."""

    rank_slack: int = setting(
        0,
        "Makes changes of precision rarer: with N experts per layer in the high precision, an "
        "expert keeps it while its usage rank is at most N plus this number.",
        within=(0, 65535),
    )
    hot_experts: int | None = inherit(Shared, "hot_experts")


class _TwoTiers(Precisions):
    def high(self, offer: TierOffer) -> FileTier:
        """Return the high tier: the better of the two precisions (tiers) that the policy uses.

        The low tier is the next tier in the file's list of tiers, such as q8_0, q6_k, q4_k.

        - If the user named the low tier: return the next better tier, for example q6_k for q4_k.
        - If the user named none: return the best tier with which all experts fit in the memory
          budget, or else the second-lowest tier.
        - If the file has only one tier: return this tier.

        offer: the file's tiers, the budget, and the low tier that the user named.
        """
        if len(offer.tiers) < 2:
            return offer.tiers[0]
        if offer.low is not None:
            return offer.tiers[max(0, offer.low - 1)]
        pairs = list(pairwise(offer.tiers))
        return next((high for high, low in pairs if _fit(offer, high, low)), pairs[-1][0])

    def low(self, offer: TierOffer, high: FileTier) -> FileTier | None:
        """Return the low tier that the user named.

        If the user named none, return the best tier below `high` in which all experts fit in
        memory. If they fit in no tier, return the lowest tier. The result is None if no tier is
        below `high`.
        """
        below = offer.tiers[high + 1 :]
        if offer.low is not None or not below:
            return offer.low
        return next((low for low in below if _fit(offer, high, low)), below[-1])


def _fit(offer: TierOffer, high: FileTier, low: FileTier) -> bool:
    """Return whether all experts fit in the budget, if as few as possible are in the high tier.

    The other experts are in the tier `low`. `fewest_high` returns the minimum of high experts.
    """
    return resident_plan(offer.shape(high, low), offer.budget_bytes, None) is not None


def hottest_first(scores: np.ndarray) -> np.ndarray:
    """Return the experts of each layer by falling score, [n_layers, n_expert]; ties by index."""
    return np.argsort(-scores, axis=1, kind="stable")


@dataclass(frozen=True, kw_only=True)
class DynaExqPlacement(Placement):
    """The memory slots for experts under the policy `dynaexq`. A slot holds one expert.

    Each expert in memory has one of two precisions (tiers): high, the better one, or low. If all
    experts fit in memory, each has a slot. Otherwise, the slots are a cache.

    - capacity: the number of high experts in each layer, also with a cache, int [n_layers].
    - cached: the number of low experts in each layer of a cache, int [n_layers]. Without it, 0.
    - pools: the slots, grouped by size. None with a cache.
    - hotness: the fraction of tokens that used each expert in earlier runs, or None if unknown.
    """

    pools: TierPools | None
    capacity: np.ndarray
    cached: np.ndarray
    hotness: np.ndarray | None

    @property
    def caching(self) -> bool:
        return self.pools is None

    def fractions(self, uses: np.ndarray) -> np.ndarray:
        """Return the fraction of each expert's uses that requests each tier (precision).

        In this policy, all uses of an expert request the same tier. So the fractions are (1, 0) for
        an expert in the high tier, and (0, 1) for an expert in the low tier. The most used experts
        of each layer are in the high tier: capacity[layer] of them. The result is float64
        [n_layers, n_expert, 2].

        uses: how often tokens use each expert, [n_layers, n_expert].
        """
        rank = np.argsort(hottest_first(uses), axis=1, kind="stable")
        hot = rank < self.capacity[:, None]
        return np.stack([hot, ~hot], axis=2).astype(np.float64)

    def first(self, hotness: np.ndarray | None = None) -> Sequence[Transition]:
        """Return the experts to load before the first token, each as (layer, expert, tier).

        In each layer, the most used experts are loaded in the high tier, the better precision, and
        the others in the low tier. If the memory cannot hold all experts of a layer, the least used
        ones are not loaded. If the usage is unknown, experts are taken by index.

        hotness: the fraction of tokens that use each expert, [n_layers, n_expert]. None stands for
        the usage in earlier runs.
        """
        known = self.hotness if hotness is None else hotness
        if known is None:
            known = np.zeros((self.shape.n_layers, self.shape.n_expert))
        order = hottest_first(known)
        wanted: list[Transition] = []
        for layer, n in enumerate(self.capacity.tolist()):
            end = n + int(self.cached[layer]) if self.caching else self.shape.n_expert
            wanted += [(layer, expert, HIGH) for expert in order[layer, :n].tolist()]
            wanted += [(layer, expert, LOW) for expert in order[layer, n:end].tolist()]
        return wanted

    @property
    def text(self) -> str:
        high, low = self.shape.tiers[:2]
        n = self.shape.n_expert
        n_high, n_low = as_range(self.capacity), as_range(self.cached)
        if not self.caching:
            return f"dynaexq {high}/{low}, {n_high} of {n} experts per layer in {high}"
        least = resident_pools(self.shape, fewest_high(self.shape)).plan().total_bytes
        tiers, cached = low, f"{n_low} of {n} experts per layer in {low}"
        if self.capacity.any():
            tiers = f"{high}/{low}"
            cached = f"{n_high} of {n} experts per layer in {high} and {cached}"
        return (
            f"dynaexq {tiers}, a cache for {cached} (the memory budget is too small for all "
            f"experts: with {low} as low precision, they need at least {format_size(least)})"
        )


class DynaExq(Learning):
    """Keeps the most used experts of each layer in tier 0 (high), and the others in tier 1 (low).

    Tier 0 is the better of two precisions, and holds as many experts as the memory budget allows.

    After each interval of steps, low experts that are now among the most used experts of their
    layer replace high experts that no longer are. The settings rank_slack and hysteresis prevent
    needless exchanges.

    All experts stay in memory. Only if the budget is too small for that, the least recently used
    experts are evicted, and tokens wait for missing experts.
    """

    about = About(
        name="dynaexq",
        summary=(
            "Keeps every expert in memory, in one of two precisions. In each layer, the most used "
            "experts get the high precision, as many as fit the budget. Precisions change in the "
            "background, and no token waits."
        ),
        Settings=DynaExqSettings,
        reason="keeps as many experts in the high precision as fit in memory",
        precisions=_TwoTiers(least=2, most=2, keeps="two precisions"),
        wants=PolicyRequirements(EVERY_STEP, default_tier=LOW, all_resident=True),
    )
    settings: DynaExqSettings
    placement: DynaExqPlacement

    @classmethod
    def place(
        cls,
        shape: ModelShape,
        settings: Any,
        rules: Rules,
        budget_bytes: int,
        history: History,
    ) -> DynaExqPlacement:
        """Divide a memory budget into slots for every expert, in the low tier or in the high tier.

        Each layer has about the same number of high experts, as many as fit. If the budget does not
        hold every expert in the low tier, return slots for a part of the experts.
        """
        resident = resident_plan(shape, budget_bytes, settings.hot_experts)
        if resident is not None:
            pools, n_high = resident
            slots, capacity, cached = pools.plan(), np.array(n_high), np.zeros(shape.n_layers, int)
        else:
            pools = None
            slots, every, n_low = cache_plan(shape, budget_bytes, settings.hot_experts)
            capacity, cached = np.full(shape.n_layers, every), np.array(n_low)
        # The store needs no decisions if every expert is resident, or if there are only low copies.
        asked = resident is None and capacity.any()
        wants = replace(
            wants_to_learn(cls.about.wants, settings),
            asked_in=EVERY_STEP if asked else (),
            all_resident=resident is not None,
        )
        return DynaExqPlacement(
            *(cls, shape, settings, rules, slots, wants),
            pools=pools,
            capacity=capacity,
            cached=cached,
            hotness=history.hotness(),
        )

    def _set_up(self) -> None:
        super()._set_up()
        self._pools, self.capacity = self.placement.pools, self.placement.capacity
        self.caching, self.cached = self.placement.caching, self.placement.cached
        # The hot set while caching: the most used experts, loaded in the high tier on demand.
        self._hot: np.ndarray = np.zeros((self.shape.n_layers, self.shape.n_expert), bool)
        self._queue: list[Swap] = []
        self._active: list[Swap] = []
        self._done = {"promotions": 0, "demotions": 0, "given_up": 0}

    def warm(
        self, resident: np.ndarray | None = None, target: np.ndarray | None = None
    ) -> Sequence[Transition]:
        order = hottest_first(self._scores)
        for layer, n in enumerate(self.capacity.tolist()):
            self._hot[layer, order[layer, :n]] = True
        return self.placement.first(self._scores)

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        """Request the most used experts (the hot set) in the high tier and others in the low tier.

        The runtime calls this method only if not every expert is resident.
        """
        out.tier_array[:] = np.where(self._hot[event.layer], HIGH, LOW)

    def on_step(self, report: StepReport) -> Sequence[Transition]:
        """Count the expert use of a finished step, and return the experts to move to another tier.

        Each move is (layer, expert, new tier). A tier is a precision. The result has only the moves
        for which a slot is free now.
        """
        moves = self._learn(report)
        self._choose_reports()
        return moves

    def _learn(self, report: StepReport) -> Sequence[Transition]:
        if report.counts is None or report.resident is None or report.target is None:
            self._count(report)
            return ()
        present, moving = report.resident != ABSENT, report.resident != report.target
        if self._count(report):
            self._update(present & (report.target == HIGH))
        moves: Sequence[Transition] = ()
        if (self._queue or self._active) and self._pools is not None:
            tracker = self._pools.track(report.resident, report.target)
            moves = self._advance(np.where(present & moving, MOVING, report.resident), tracker)
        self._at_rest = not (self.caching or self._queue or self._active or moving.any())
        return moves

    def _update(self, hot: np.ndarray) -> None:
        """At the end of an interval, choose the exchanges between the high and the low tier.

        hot: the experts that are in the high tier or on the way to it, bool [n_layers, n_expert].
        """
        if self.caching:
            for swap in self._swaps(self._hot, np.zeros_like(self._hot)):
                self._hot[swap.layer, swap.up] = True
                if swap.down is not None:
                    self._hot[swap.layer, swap.down] = False
            return
        busy = np.zeros_like(hot)
        for swap in self._active:
            hot[swap.layer, swap.up] = busy[swap.layer, swap.up] = True
            if swap.down is not None:
                hot[swap.layer, swap.down] = False
                busy[swap.layer, swap.down] = True
        self._queue = self._swaps(hot, busy)

    def _swaps(self, hot: np.ndarray, busy: np.ndarray) -> list[Swap]:
        """Return the exchanges that the current scores imply.

        Exchanges that only fill a free high slot come first. The others follow by falling gain in
        score.

        - hot: the experts that will be in the high tier after all current exchanges, bool
          [n_layers, n_expert].
        - busy: the experts that are moving, which may not be exchanged.
        """
        scores, n = self._scores, self.capacity[:, None]
        settings = self.settings
        unit = np.maximum(scores.mean(axis=1, keepdims=True), np.finfo(float).tiny)
        order = np.argsort(-scores, axis=1, kind="stable")
        rank = np.empty_like(order)
        np.put_along_axis(rank, order, np.arange(order.shape[1])[None, :], axis=1)

        rising = np.where(hot | busy | (rank >= n), -np.inf, scores)
        falling = np.where(~hot | busy | (rank < n + settings.rank_slack), np.inf, scores)
        up = np.argsort(-rising, axis=1, kind="stable")
        down = np.argsort(falling, axis=1, kind="stable")
        free = self.capacity - hot.sum(axis=1)
        swaps = []
        for layer in np.flatnonzero(free > 0).tolist():
            places = up[layer, : free[layer]].tolist()
            swaps += [Swap(layer, expert, None) for expert in places if rising[layer, expert] > 0]
            up[layer] = np.roll(up[layer], -int(free[layer]))
        best = np.take_along_axis(rising, up, axis=1)
        worst = np.take_along_axis(falling, down, axis=1)
        possible = np.isfinite(best) & np.isfinite(worst)
        gain = np.where(possible, best, 0.0) - np.where(possible, worst, 0.0)
        gain /= unit
        layers, places = np.nonzero(possible & (gain > settings.hysteresis))
        largest = np.argsort(-gain[layers, places], kind="stable")
        for layer, place in zip(layers[largest].tolist(), places[largest].tolist(), strict=True):
            swaps.append(Swap(layer, int(up[layer, place]), int(down[layer, place])))
        return swaps if self._pools is None else _shortlist(swaps, self._pools.pool_of[:, LOW])

    def _advance(self, tiers: np.ndarray, tracker: Tracker) -> list[Transition]:
        """Return the transitions that continue running exchanges and start new ones.

        Running exchanges come first, because their moves to the low tier freed high slots. A new
        exchange starts only if its pool has a free slot. Otherwise it stays in the queue, and the
        next exchanges are tried.

        tiers: the tier of each expert, or MOVING, [n_layers, n_expert]. tracker: the free slots.
        """
        moves: list[Transition] = []
        self._active = [swap for swap in self._active if self._go_on(swap, tiers, tracker, moves)]
        waiting: list[Swap] = []
        for at, swap in enumerate(self._queue):
            if tracker.full:
                waiting += self._queue[at:]
                break
            layer, down = swap.layer, swap.down
            if tiers[layer, swap.up] != LOW or (down is not None and tiers[layer, down] != HIGH):
                continue
            if not tracker.try_reserve(layer, HIGH if down is None else LOW):
                waiting.append(swap)
                continue
            moves.append((layer, swap.up, HIGH) if down is None else (layer, down, LOW))
            swap.promoting = down is None
            self._active.append(swap)
        self._queue = waiting
        return moves

    def _go_on(
        self,
        swap: Swap,
        tiers: np.ndarray,
        tracker: Tracker,
        moves: list[Transition],
    ) -> bool:
        """Continue an exchange of two experts. Appends its next transition to `moves`.

        The transition is appended only if a slot is free. Returns False when the exchange has
        ended. It also ends if the store could not move the expert.

        - tiers: the tier of each expert, or MOVING.
        - tracker: the free slots.
        """
        tier = tiers[swap.layer, swap.moving]
        if tier == MOVING:
            return True
        if swap.promoting:
            self._done["promotions" if tier == HIGH else "given_up"] += 1
            return False
        if tier != LOW:
            self._done["given_up"] += 1
            return False
        if tracker.try_reserve(swap.layer, HIGH):
            self._done["demotions"] += 1
            moves.append((swap.layer, swap.up, HIGH))
            swap.promoting = True
        return True

    def report(self) -> Mapping[str, Any]:
        """Return figures about the policy's work since the runtime started.

        An exchange moves one expert of a layer to the low tier (demotion). Then another expert
        takes its place in the high tier (promotion). Promotions into free slots need no demotion.

        - high_per_layer: the minimum and maximum number of experts per layer in the high tier.
        - updates: the number of intervals after which the usage was updated.
        - promotions, demotions: how many of these moves were made.
        - given_up: how many exchanges failed.
        - waiting: how many exchanges have not finished.
        """
        high = [int(self.capacity.min()), int(self.capacity.max())]
        waiting = len(self._queue) + len(self._active)
        return {
            "high_per_layer": high,
            "updates": self.updates,
            **self._done,
            "waiting": waiting,
        }
