"""Pools of slots that experts share in each tier (DynaExq 3.3), and who may have one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.allocation.slots import ModelShape, SlotGroup, SlotPlan, Transition

# Swaps of one pool that wait for a slot between two updates; each update makes the list anew.
MAX_QUEUE = 64
# Slots of one pool have one size. Layers whose sizes differ by less share one, with the largest.
_SAME_SIZE = 1.02


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


# One slot beyond what is needed for each so many experts of a pool: as many may be under way.
_EXPERTS_PER_MOVE = 64
_MOST_MOVES = 16


@dataclass(frozen=True, slots=True)
class Places:
    """Slots for n_experts of each layer, or so many of each, in any of these tiers, each as large
    as the largest of them. reserve: a few more, for experts that are under way, one for each so
    many. on_host: in the host's memory behind a device."""

    tiers: tuple[int, ...]
    n_experts: int | Sequence[int]
    reserve: bool = True
    experts_per_move: int = _EXPERTS_PER_MOVE
    on_host: bool = False

    def of(self, layers: Sequence[int]) -> int:
        """Experts of these layers together."""
        each = self.n_experts
        return each * len(layers) if isinstance(each, int) else sum(each[at] for at in layers)


class TierPools(Pools):
    """The pools of a plan of several places, each tier in one of them; the first has no slots in
    reserve.

    With them every assignment of as many experts as the places have is reached from every other
    one, and each expert moves once. A move inside of a place takes a slot in reserve and gives one
    back. Where all moves to a later place find its pool full, that pool holds an expert that wants
    elsewhere, and some pool of a later place has fewer than its share; where none is full, the only
    moves left over are to the first place, and one of its own experts has to leave it.
    """

    def __init__(self, shape: ModelShape, places: Sequence[Places]) -> None:
        self._pools = [
            [_sized(pool, place, shape.n_expert) for pool in pools_by_size(shape, *place.tiers)]
            for place in places
        ]
        self._on_host = [place.on_host for place in places]
        super().__init__(self._pools, shape.n_layers, [place.tiers for place in places])
        # bool [n_places, 256]: whether a tier is of a place.
        self._is_in = np.zeros((len(places), 256), bool)
        for at, place in enumerate(places):
            self._is_in[at, list(place.tiers)] = True

    @property
    def n_tiers(self) -> int:
        return sum(map(len, self._tiers))

    @property
    def pool_of(self) -> np.ndarray:
        """The pool that holds a layer's experts in each tier, int64 [n_layers, n_tiers]: equal
        numbers of a tier are one pool."""
        by_tier = {
            tier: of_place
            for tiers, of_place in zip(self._tiers, self._pool_of, strict=True)
            for tier in tiers
        }
        return np.stack([by_tier[tier] for tier in sorted(by_tier)], axis=1)

    @property
    def total_bytes(self) -> int:
        """Of slots in the memory that the budget is of."""
        return self.plan().total_bytes

    def plan(self) -> SlotPlan:
        return slot_plan(self._pools, self._tiers, self._on_host)

    def track(self, resident: np.ndarray, target: np.ndarray) -> Tracker:
        """Free slots now. resident, target uint8 [n_layers, n_expert] as of StepReport: an expert
        between two tiers holds a slot of both, also where these are of one pool."""
        moving = target != resident
        return self.free(
            is_in[resident].sum(axis=1) + (is_in[target] & moving).sum(axis=1)
            for is_in in self._is_in
        )


def _sized(pool: Pool, place: Places, n_expert: int) -> Pool:
    """With its slots; the store wants one of every tier."""
    spare = min(_MOST_MOVES, max(1, len(pool.layers) * n_expert // place.experts_per_move))
    n_experts = place.of(pool.layers)
    return replace(pool, n_slots=max(1, n_experts + (spare if place.reserve and n_experts else 0)))
