"""DynaExq: every expert resident in exactly one version, hot ones high."""

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
    Precisions,
    TierOffer,
    Wants,
)
from orchestrator.policy.learning import MAX_QUEUE, Intervals, Learning, wants_to_learn
from orchestrator.settings import again, setting

HIGH, LOW = 0, 1
# In the place of a tier: the expert is on its way to another one.
MOVING = 254


@dataclass(slots=True)
class Swap:
    """One change of a layer's hot set: `down` is demoted, its high slot goes to `up`. down None:
    a high slot is free already. promoting: the second half has been asked for."""

    layer: int
    up: int
    down: int | None
    promoting: bool = False

    @property
    def moving(self) -> int:
        """The expert that its present half moves."""
        return self.up if self.promoting or self.down is None else self.down


# Where not all low copies fit: the share of the slots beyond one token's experts for high copies.
CACHED_HIGH = 0.5


def resident_pools(shape: ModelShape, capacity: Sequence[int]) -> TierPools:
    """Slots for every expert in one of two versions, capacity[layer] of them high.

    A swap demotes first, into a low slot in reserve, and promotes into the high slot that this
    frees; so low pools have a few slots more than experts, as many as swaps may be under way at
    once, and high pools none.
    """
    n_low = [shape.n_expert - n_high for n_high in capacity]
    high, low = Places((HIGH,), capacity, reserve=False), Places((LOW,), n_low, most_moves=4)
    return TierPools(shape, [high, low])


def fewest_high(shape: ModelShape, most: int = 1) -> list[int]:
    """The capacity of the smallest budget: one high expert of each slot size, or most of them."""
    first = {pool.layers[0] for pool in pools_by_size(shape, HIGH)}
    return [min(most, int(layer in first)) for layer in range(shape.n_layers)]


def resident_plan(
    shape: ModelShape, budget_bytes: int, most_high: int | None
) -> tuple[TierPools, list[int]] | None:
    """Slots for every expert in one of two versions, as many high as fit: n_l = spare bytes /
    (high - low), the same in every layer, at most most_high; None where that takes more than
    the budget even with one high expert of each slot size."""
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
    """The first MAX_QUEUE of each low pool, whose slots in reserve its swaps go through: so a pool
    that moves slowly leaves places to the others. low_pool_of: of each layer, its low pool."""
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
    """Slots for some copies of each layer: (plan, experts high in every layer, low copies of each
    layer). Where the budget is too small these are the fewest.

    Of what low copies of one token's experts leave, CACHED_HIGH is for high copies, for most_high
    experts at most. Where it is too little for one of them in every layer, there are only those
    that the store wants: one high slot of each size, that nobody asks for.
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
        high = [Pool(pool.layers, pool.sizes, 1) for pool in pools_by_size(shape, HIGH)]
    rest = shape.n_expert - n_high
    shares = [Share(each, 1, max(1, rest), 1.0) for each in low_bytes]
    fixed = [Share(pool.unit_bytes, pool.n_slots, pool.n_slots, 0.0) for pool in high]
    counts = divide([*shares, *fixed], budget_bytes)[: shape.n_layers]
    low = [Pool((layer,), shape.slots[layer][LOW], n_slots) for layer, n_slots in enumerate(counts)]
    pools = [(pool, (HIGH,), False) for pool in high] + [(pool, (LOW,), False) for pool in low]
    return slot_plan(pools), n_high, counts


def as_range(counts: np.ndarray) -> str:
    """The fewest and the most, as text."""
    fewest, most = int(counts.min()), int(counts.max())
    return str(fewest) if fewest == most else f"{fewest} to {most}"


@dataclass(frozen=True)
class DynaExqSettings(Intervals):
    """What a user can tune."""

    rank_slack: int = setting(
        0,
        "How many ranks below the hot set an expert may fall before it is replaced.",
        within=(0, 65535),
    )
    hot_experts: int | None = again(Shared, "hot_experts")


class _TwoTiers(Precisions):
    def high(self, offer: TierOffer) -> FileTier:
        """The tier above the low one that was named, else above the best one whose copies all
        fit; else above the lowest."""
        if len(offer.tiers) < 2:
            return offer.tiers[0]
        if offer.low is not None:
            return offer.tiers[max(0, offer.low - 1)]
        pairs = list(pairwise(offer.tiers))
        return next((high for high, low in pairs if _fit(offer, high, low)), pairs[-1][0])

    def low(self, offer: TierOffer, high: FileTier) -> FileTier | None:
        """The low one that was named, else the best one below the high one whose copies all fit,
        else the lowest."""
        below = offer.tiers[high + 1 :]
        if offer.low is not None or not below:
            return offer.low
        return next((low for low in below if _fit(offer, high, low)), below[-1])


def _fit(offer: TierOffer, high: FileTier, low: FileTier) -> bool:
    """Whether every expert fits in one of these two."""
    return resident_plan(offer.shape(high, low), offer.budget_bytes, None) is not None


def hottest_first(scores: np.ndarray) -> np.ndarray:
    """The experts of each layer, [n_layers, n_expert]; of equals the first one first."""
    return np.argsort(-scores, axis=1, kind="stable")


@dataclass(frozen=True, kw_only=True)
class DynaExqPlacement(Placement):
    """pools: of all experts; None where low copies of all do not fit, so that they are cached.
    capacity: n_l; cached: low slots of each layer while caching, int [n_layers] each. hotness: how
    much each expert is used, by earlier runs."""

    pools: TierPools | None
    capacity: np.ndarray
    cached: np.ndarray
    hotness: np.ndarray | None

    @property
    def caching(self) -> bool:
        return self.pools is None

    def fractions(self, uses: np.ndarray) -> np.ndarray:
        """The hot set high, the others low: a token uses the hot ones more than their number
        says."""
        rank = np.argsort(hottest_first(uses), axis=1, kind="stable")
        hot = rank < self.capacity[:, None]
        return np.stack([hot, ~hot], axis=2).astype(np.float64)

    def first(self, hotness: np.ndarray | None = None) -> Sequence[Transition]:
        """Each expert in one version, the n_l hottest high (the first ones without a hotness);
        while caching, as many low copies as fit."""
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
        of = f"of {self.shape.n_expert} experts a layer"
        if not self.caching:
            return f"dynaexq {high}/{low}, {as_range(self.capacity)} {of} high"
        least = resident_pools(self.shape, fewest_high(self.shape)).plan().total_bytes
        needed = format_size(least)
        why = f"low copies of all do not fit, they take {needed}"
        if not self.capacity.any():
            return f"dynaexq {low}, caching {as_range(self.cached)} {of}: {why}"
        n_high, n_low = as_range(self.capacity), as_range(self.cached)
        return f"dynaexq {high}/{low}, caching {n_high} high and {n_low} low {of}: {why}"


class DynaExq(Learning):
    """n_l experts of each layer in tier 0, the others in tier 1, all of them in memory.

    At each update `Hotness` has a new score S of each expert, the share of tokens that use it.

    An expert outside the hot set replaces one inside where it is among the n_l hottest, the other
    is not among the n_l + rank_slack hottest, and S differs by more than hysteresis times the
    layer's mean S: both forms of hysteresis. The slack is 0 unless asked for: it keeps an expert
    that nobody uses any more, as long as the others outside are used even less.

    Where the low copies alone do not fit, they are cached instead (`caching`): per layer, the
    least recently used goes first, and tokens wait for what is missing. A part of the slots is
    for high copies of the hot set even then, which are loaded when a token asks for them.
    """

    about = About(
        name="dynaexq",
        summary=(
            "Every expert is in memory, in one of two precisions: high the ones that are used "
            "most, as many as the budget has room for, and low the others. They are exchanged in "
            "the background, and no token waits for it."
        ),
        Settings=DynaExqSettings,
        reason="fills the budget with high copies",
        precisions=_TwoTiers(least=2, most=2, keeps="two precisions"),
        wants=Wants(EVERY_STEP, default_tier=LOW, all_resident=True),
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
        """Every expert low, and n_l = spare bytes / (high - low) of each layer high instead;
        where that does not fit, slots for some copies of each layer."""
        resident = resident_plan(shape, budget_bytes, settings.hot_experts)
        if resident is not None:
            pools, n_high = resident
            slots, capacity, cached = pools.plan(), np.array(n_high), np.zeros(shape.n_layers, int)
        else:
            pools = None
            slots, every, n_low = cache_plan(shape, budget_bytes, settings.hot_experts)
            capacity, cached = np.full(shape.n_layers, every), np.array(n_low)
        # The store needs no answer where all experts are in memory, or where only low copies are.
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
        # The hot set while caching.
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
        """While caching: the hot set high, the others low."""
        out.tier_array[:] = np.where(self._hot[event.layer], HIGH, LOW)

    def on_step(self, report: StepReport) -> Sequence[Transition]:
        """Learn from the step's counts; return the transitions to start now."""
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
        """The end of an interval: the list of swaps that the new scores ask for. hot bool [L, E]:
        high, or on the way there."""
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
        """The changes of the hot sets: into free places, then the largest gain first. hot and busy
        bool [L, E]: in the hot set when all that is under way is done; under way."""
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
        """The next half of each swap under way, then new ones as far as slots are free:
        demotions come first, since they free the high slots. A swap whose pool is full waits in
        the queue, and those behind it go on. tiers [L, E]: of each expert, or MOVING."""
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
        """False when the swap is over: done, or given up because the store could not."""
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
        """Since the engine started: updates of the hotness, experts promoted and demoted, swaps
        given up and waiting; high_per_layer is n_l, the fewest and the most."""
        high = [int(self.capacity.min()), int(self.capacity.max())]
        waiting = len(self._queue) + len(self._active)
        return {
            "high_per_layer": high,
            "updates": self.updates,
            **self._done,
            "waiting": waiting,
        }
