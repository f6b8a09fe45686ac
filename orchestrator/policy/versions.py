"""Pools of expert versions (DynaExq 3.3): how a budget becomes slots, and who may have one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np

from gguf_tools.units import format_size
from orchestrator.policy.base import (
    ModelShape,
    Share,
    SlotGroup,
    SlotPlan,
    Transition,
    divide,
)
from orchestrator.settings import RATE, Settings, setting

HIGH, LOW = 0, 1

USUAL_RATE = 128 << 20


# Swaps of one pool that wait for a slot between two updates; each update makes the list anew.
MAX_QUEUE = 64


class ExpertState(IntEnum):
    """What memory holds of an expert, and what is under way (DynaExq 3.2)."""

    ABSENT = 0
    HI = 1
    LO = 2
    PROMOTING = 3
    DEMOTING = 4


# [resident, target], either of them tier 0, tier 1, or absent.
_STATES = np.zeros((3, 3), np.uint8)
_STATES[0] = ExpertState.HI, ExpertState.DEMOTING, ExpertState.DEMOTING
_STATES[1] = ExpertState.PROMOTING, ExpertState.LO, ExpertState.DEMOTING


def expert_states(resident: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The ExpertState of each expert, uint8 [n_layers, n_expert], from StepReport.resident and
    target; one that is complete and not published yet counts as under way."""
    found: np.ndarray = _STATES[np.minimum(resident, 2), np.minimum(target, 2)]
    return found


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


@dataclass(frozen=True)
class Background(Settings):
    """Settings of policies that exchange versions beside decoding, by what was used so far."""

    profile: Path | None = setting(
        None,
        "Where it is kept which experts were used; without it, a chat uses the user cache.",
        recorded=False,
    )
    transition_rate: int | None = setting(
        None,
        "What exchanges of versions may read in a second beside decoding, as 64MiB; 0: no limit.",
        within=(0, 2**48),
        unit=RATE,
        shown=f"{format_size(USUAL_RATE)}, with context no limit",
        timing=True,
    )


def rate_of(asked: int | None) -> int:
    """Bytes a second that transitions may read, 0 for no limit: the usual cap, unless asked."""
    return USUAL_RATE if asked is None else asked


# Slots of one pool have one size. Layers whose sizes differ by less share one, with the largest.
_SAME_SIZE = 1.02
# One low slot beyond what is needed for each so many experts: as many swaps may be under way.
_EXPERTS_PER_SWAP = 64
_MAX_SWAPS = 4

# Of the slots beside one token's experts: those for high copies where not all low ones fit.
CACHED_HIGH = 0.5


@dataclass(frozen=True, slots=True)
class Pool:
    """Slots for whole experts of some layers in one tier. sizes: kind to slot bytes."""

    layers: tuple[int, ...]
    sizes: dict[int, int]
    n_slots: int = 0

    @property
    def unit_bytes(self) -> int:
        """One expert: a slot for each of its matrices."""
        return sum(self.sizes.values())


class Tracker:
    """Free slots of each pool at one moment (DynaExq's BudgetTracker). What is given back shows in
    the states that the next one is made from."""

    def __init__(self, free: list[list[int]], pool_of: list[np.ndarray]) -> None:
        """free[tier][pool], and pool_of[tier][layer]. Tiers that share their pools share a list."""
        self._free, self._pool_of = free, pool_of

    @property
    def full(self) -> bool:
        """Whether no pool has a slot."""
        return all(n < 1 for pools in self._free for n in pools)

    def try_reserve(self, layer: int, tier: int) -> bool:
        """A slot for one expert; False, and nothing changes, where there is none."""
        pool = self._pool_of[tier][layer]
        if self._free[tier][pool] < 1:
            return False
        self._free[tier][pool] -= 1
        return True

    def admitted(self, wanting: Iterable[Transition]) -> list[Transition]:
        """Those of some moves that get a slot, the first ones first."""
        found: list[Transition] = []
        for move in wanting:
            if self.full:
                break
            if self.try_reserve(move[0], move[2]):
                found.append(move)
        return found


class Pools:
    """The pools of a plan: how many slots each has, and which one a layer uses in each tier."""

    def __init__(
        self,
        pools: Sequence[Sequence[Pool]],
        n_layers: int,
        tiers: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """pools[i], which hold experts in tiers[i]; None: in tier i."""
        self._tiers = [(i,) for i in range(len(pools))] if tiers is None else tiers
        self._slots = [np.array([pool.n_slots for pool in some]) for some in pools]
        self._pool_of = [np.zeros(n_layers, np.int64) for _ in pools]
        for some, pool_of in zip(pools, self._pool_of, strict=True):
            for index, pool in enumerate(some):
                pool_of[list(pool.layers)] = index

    def free(self, held: Iterable[np.ndarray]) -> Tracker:
        """held[i] [n_layers]: slots of pools[i] that the layer has taken."""
        by_tier: dict[int, tuple[list[int], np.ndarray]] = {}
        for tiers, slots, pool_of, taken in zip(
            self._tiers, self._slots, self._pool_of, held, strict=True
        ):
            free = (slots - np.bincount(pool_of, taken, len(slots)).astype(np.int64)).tolist()
            by_tier.update(dict.fromkeys(tiers, (free, pool_of)))
        ordered = [by_tier[tier] for tier in sorted(by_tier)]
        return Tracker([free for free, _ in ordered], [pool_of for _, pool_of in ordered])


class VersionPools(Pools):
    """The pools of two versions. capacity[layer] is n_l, experts that may be high at once."""

    def __init__(self, pools: Sequence[Sequence[Pool]], capacity: Sequence[int]) -> None:
        """pools[tier]"""
        super().__init__(pools, len(capacity))
        self.capacity = tuple(capacity)

    def shortlist(self, swaps: Sequence[Swap]) -> list[Swap]:
        """The first MAX_QUEUE of each low pool, whose slots in reserve its swaps go through: so a
        pool that moves slowly leaves places to the others."""
        listed = Counter[int]()
        kept = []
        for swap in swaps:
            pool = int(self._pool_of[LOW][swap.layer])
            listed[pool] += 1
            if listed[pool] <= MAX_QUEUE:
                kept.append(swap)
        return kept

    def track(self, states: np.ndarray) -> Tracker:
        """states uint8 [n_layers, n_expert]: an expert between two versions holds both."""
        present = states != ExpertState.ABSENT
        without = ExpertState.LO, ExpertState.HI
        return self.free((present & (states != other)).sum(axis=1) for other in without)


def pools_by_size(shape: ModelShape, *tiers: int) -> list[Pool]:
    """Layers by the size of slots that hold any of the tiers, so that as few pools as possible need
    slots in reserve."""
    pools: list[Pool] = []
    largest = [
        {kind: max(of_layer[tier][kind] for tier in tiers) for kind in of_layer[tiers[0]]}
        for of_layer in shape.slots
    ]
    for layer in sorted(range(shape.n_layers), key=lambda each: sum(largest[each].values())):
        sizes = largest[layer]
        last = pools[-1] if pools else None
        if last is not None and _alike(last.sizes, sizes):
            most = {kind: max(size, last.sizes[kind]) for kind, size in sizes.items()}
            pools[-1] = Pool((*last.layers, layer), most)
        else:
            pools.append(Pool((layer,), sizes))
    return pools


def _alike(ours: dict[int, int], theirs: dict[int, int]) -> bool:
    return ours.keys() == theirs.keys() and all(
        max(size, theirs[kind]) <= _SAME_SIZE * min(size, theirs[kind])
        for kind, size in ours.items()
    )


def slot_plan(
    pools: Sequence[Sequence[Pool]],
    tiers: Sequence[Sequence[int]] | None = None,
    on_host: Sequence[bool] = (),
) -> SlotPlan:
    """The plan of pools[i], which hold experts in tiers[i]; None: in tier i. on_host[i]: their
    slots are in the host's memory behind a device; none where it is empty."""
    groups: list[SlotGroup] = []
    group_of: dict[tuple[int, int, int], int] = {}
    for place, of_place in enumerate(pools):
        held = (place,) if tiers is None else tiers[place]
        for pool in of_place:
            for kind, size in pool.sizes.items():
                each = ((layer, kind, tier) for layer in pool.layers for tier in held)
                group_of.update(dict.fromkeys(each, len(groups)))
                groups.append(
                    SlotGroup(size, pool.n_slots, on_host=bool(on_host) and on_host[place])
                )
    return SlotPlan(tuple(groups), group_of)


def resident_plan(
    shape: ModelShape, budget_bytes: int, most_high: int | None
) -> tuple[SlotPlan, VersionPools] | None:
    """Slots for every expert in one of two versions, as many high as fit: n_l = spare bytes /
    (high - low), the same in every layer, at most most_high; None where that takes more than
    the budget even with one high expert of each slot size.

    A swap demotes first, into a low slot in reserve, and promotes into the high slot that this
    frees; so low pools have a few slots more than experts, and high pools none.
    """
    high, low = pools_by_size(shape, HIGH), pools_by_size(shape, LOW)
    n = shape.n_expert
    spare = budget_bytes - _low_bytes(low, n)
    full = n if most_high is None else min(n, most_high)
    if full == 0:
        spare -= sum(pool.unit_bytes for pool in high)  # the store wants a slot in every tier
    first = {pool.layers[0] for pool in high}
    shares = [
        Share(_gain(high, low, layer), min(full, int(layer in first)), full, 1.0)
        for layer in range(shape.n_layers)
    ]
    if spare < sum(share.unit_bytes * share.floor for share in shares):
        return None
    capacity = divide(shares, spare)
    tiers = (
        tuple(
            Pool(pool.layers, pool.sizes, max(1, sum(capacity[layer] for layer in pool.layers)))
            for pool in high
        ),
        tuple(
            Pool(
                pool.layers,
                pool.sizes,
                sum(n - capacity[layer] for layer in pool.layers) + _reserve(pool, n),
            )
            for pool in low
        ),
    )
    return slot_plan(tiers), VersionPools(tiers, capacity)


def least_resident_bytes(shape: ModelShape) -> int:
    """The smallest budget of resident_plan: low copies of all experts and those in reserve, of
    which one of each slot size is high instead."""
    high, low = pools_by_size(shape, HIGH), pools_by_size(shape, LOW)
    promoted = sum(_gain(high, low, pool.layers[0]) for pool in high)
    return _low_bytes(low, shape.n_expert) + promoted


def _low_bytes(low: Sequence[Pool], n_expert: int) -> int:
    """Low copies of all experts, and the slots in reserve."""
    return sum(
        pool.unit_bytes * (n_expert * len(pool.layers) + _reserve(pool, n_expert)) for pool in low
    )


def _gain(high: Sequence[Pool], low: Sequence[Pool], layer: int) -> int:
    """What one expert takes more when it is high."""
    return max(1, _unit(high, layer) - _unit(low, layer))


def _reserve(pool: Pool, n_expert: int) -> int:
    return min(_MAX_SWAPS, max(1, len(pool.layers) * n_expert // _EXPERTS_PER_SWAP))


def _unit(pools: Sequence[Pool], layer: int) -> int:
    return next(pool.unit_bytes for pool in pools if layer in pool.layers)


def cache_plan(
    shape: ModelShape, budget_bytes: int, most_high: int | None
) -> tuple[SlotPlan, int, list[int]]:
    """Slots for some copies of each layer: (plan, experts high in every layer, low copies of each
    layer). Raises BudgetError.

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
    return slot_plan((high, low)), n_high, counts


def as_range(counts: np.ndarray) -> str:
    """The fewest and the most, as text."""
    fewest, most = int(counts.min()), int(counts.max())
    return str(fewest) if fewest == most else f"{fewest} to {most}"
