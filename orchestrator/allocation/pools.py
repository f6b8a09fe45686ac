"""Slot pools for plans in which every expert is resident in one of several tiers (DynaExq 3.3).

Also the reservation of slots, and defaults for unknown losses and usage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.allocation.slots import ModelShape, SlotGroup, SlotPlan, Transition

# Slots of one pool have one size. Layers whose sizes differ by less than this ratio share a pool.
_SAME_SIZE = 1.02


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory for a number of experts of some layers, divided into slots.

    An expert takes one slot for each of its matrices, such as up and down. All slots for the same
    kind of matrix have the same size.

    - layers: the layers whose experts can use the slots.
    - sizes: maps each kind of matrix to the slot size in bytes.
    - n_slots: the number of experts that the pool can hold.
    """

    layers: tuple[int, ...]
    sizes: dict[int, int]
    n_slots: int = 0

    @property
    def unit_bytes(self) -> int:
        """The bytes that one expert takes in this memory pool: the slots of all its matrices."""
        return sum(self.sizes.values())


def pools_by_size(shape: ModelShape, *tiers: int) -> list[Pool]:
    """Group a model's layers by the size of their experts, and return a memory pool for each group.

    A pool is memory for experts of some layers. Each place in it is large enough for an expert in
    any of the given tiers (precisions). The caller must set how many experts a pool can hold
    (n_slots), which is 0 in the result.
    """
    # Layers share pools, because each pool has reserve slots: fewer pools need fewer of them.
    pools: list[Pool] = []
    largest = [
        {kind: max(of_layer[tier][kind] for tier in tiers) for kind in of_layer[tiers[0]]}
        for of_layer in shape.slots
    ]
    for layer in sorted(range(shape.n_layers), key=lambda each: sum(largest[each].values())):
        sizes = largest[layer]
        last = pools[-1] if pools else None
        if last is not None and _similar_sizes(last.sizes, sizes):
            most = {kind: max(size, last.sizes[kind]) for kind, size in sizes.items()}
            pools[-1] = Pool((*last.layers, layer), most)
        else:
            pools.append(Pool((layer,), sizes))
    return pools


def _similar_sizes(ours: dict[int, int], theirs: dict[int, int]) -> bool:
    return ours.keys() == theirs.keys() and all(
        max(size, theirs[kind]) <= _SAME_SIZE * min(size, theirs[kind])
        for kind, size in ours.items()
    )


def slot_sizes(shape: ModelShape) -> np.ndarray:
    """Return the memory that an expert takes in each layer and tier, int64 [n_layers, n_tiers].

    The values are in bytes. A tier is a precision. Layers with about equal expert sizes share
    memory slots, so they all have the value of the largest of them.
    """
    sizes = np.zeros((shape.n_layers, len(shape.tiers)), np.int64)
    for tier in range(len(shape.tiers)):
        for pool in pools_by_size(shape, tier):
            sizes[list(pool.layers), tier] = pool.unit_bytes
    return sizes


def slot_plan(pools: Iterable[tuple[Pool, Sequence[int], bool]]) -> SlotPlan:
    """Divide memory pools into slots for single matrices, and return the resulting plan.

    A pool is memory for some experts. It becomes one group of slots for each kind of matrix. For
    example, a pool for 10 experts with up and down matrices becomes a group of 10 slots for up
    matrices, and a group of 10 slots for down matrices.

    pools: tuples (pool, tiers, on_host), one for each pool:

    - pool: the number of experts, their layers, and the slot size for each kind of matrix.
    - tiers: the precisions in which these experts can be.
    - on_host: whether a model on a GPU has this pool in host memory, where the CPU computes
      experts.
    """
    groups: list[SlotGroup] = []
    group_of: dict[tuple[int, int, int], int] = {}
    for pool, tiers, on_host in pools:
        for kind, size in pool.sizes.items():
            held = ((layer, kind, tier) for layer in pool.layers for tier in tiers)
            group_of.update(dict.fromkeys(held, len(groups)))
            groups.append(SlotGroup(size, pool.n_slots, on_host=on_host))
    return SlotPlan(tuple(groups), group_of)


class Tracker:
    """Counts free memory slots while a policy chooses experts to load in another precision (tier).

    A pool is a set of slots for the experts of some layers. An expert that changes its tier needs a
    free slot in a pool of the new tier. The object counts the slots that were free when it was
    created. Slots that become free later are not added. DynaExq calls this object BudgetTracker.
    """

    def __init__(self, free: list[list[int]], pool_of: list[np.ndarray]) -> None:
        """Start with free[tier][pool] free slots in each pool.

        pool_of[tier][layer] is the index of the pool that holds the layer's experts. Tiers that
        share pools share a list in `free`.
        """
        self._free, self._pool_of = free, pool_of

    @property
    def full(self) -> bool:
        """Whether no memory slot for an expert is free, in any layer and any tier (precision)."""
        return all(n < 1 for pools in self._free for n in pools)

    def try_reserve(self, layer: int, tier: int) -> bool:
        """Reserve a slot for one expert of a layer in a tier, and return True if one is free."""
        pool = self._pool_of[tier][layer]
        if self._free[tier][pool] < 1:
            return False
        self._free[tier][pool] -= 1
        return True

    def admitted(self, wanting: Iterable[Transition]) -> list[Transition]:
        """Reserve slots for transitions in the given order, and return those that got a slot.

        A transition (layer, expert, new tier) is an expert's change to another precision.
        Transitions without a free slot are left out of the result.
        """
        found: list[Transition] = []
        for move in wanting:
            if self.full:
                break
            if self.try_reserve(move[0], move[2]):
                found.append(move)
        return found


@dataclass(frozen=True, slots=True)
class Places:
    """The number of memory slots that are planned for experts in one or several tiers (precisions).

    A slot is memory for one expert in any of these tiers. This object stands for all slots of the
    tiers. They are divided into pools, each for some of the layers. A pool has a slot for each
    expert of its layers that is in these tiers, and can have reserve slots. An expert that changes
    its tier briefly needs a second slot, which is a reserve slot.

    - tiers: the tiers.
    - n_experts: the number of experts of each layer in these tiers.
    - reserve: whether pools have reserve slots.
    - experts_per_move: a pool has one reserve slot for this many experts in its layers, counting
      all tiers. With 64, a pool for 2 layers of 128 experts has 4.
    - most_moves: the maximum number of reserve slots in a pool. The minimum is 1.
    - on_host: whether a model on a GPU has these slots in host memory.
    """

    tiers: tuple[int, ...]
    n_experts: Sequence[int]
    reserve: bool = True
    experts_per_move: int = 64
    most_moves: int = 16
    on_host: bool = False

    def slots(self, pool: Pool, n_expert: int) -> int:
        """Return the number of slots that a memory pool needs for the experts of its layers.

        A slot is memory for one expert. The result is the sum of `n_experts`, a field of this
        object, over the layers of the pool, plus reserve slots if the field `reserve` is True.
        Reserve slots are for experts that change their precision, because such an expert briefly
        needs two slots. The result is at least 1, even if no expert is planned.

        pool: the pool. Only its field `layers` is used.
        n_expert: the number of experts in each layer of the model. It determines the number of
            reserve slots.
        """
        n = sum(self.n_experts[layer] for layer in pool.layers)
        moves = max(1, len(pool.layers) * n_expert // self.experts_per_move)
        return max(1, n + min(self.most_moves, moves) * (self.reserve and n > 0))


class TierPools:
    """The memory slots of all experts of a model, as separate pools for each tier (precision).

    A slot is memory for one expert. A pool is a set of slots for the experts of some layers. The
    constructor makes pools for each `Places` object that it gets. Such an object tells how many
    experts of each layer are in one tier, or in several tiers that share pools. Experts can
    exchange their tiers, but these numbers stay the same.

    In an exchange, the expert that leaves the better tier moves first. It needs a free slot in the
    lower tier, called a reserve slot. Its old slot is then free for the other expert. So the
    `Places` object for the best tier, which is the first, needs no reserve slots.
    """

    # Proof that experts can always move, each of them only once: a move within a place takes a
    # reserve slot and returns one. Suppose that some experts still have to move.
    # - If the wanted pools are full, each of them holds an expert that must leave. Another pool of
    #   these places then holds fewer experts than it should.
    # - If no wanted pool is full, only moves to the first place are left. One of the experts in the
    #   first place must leave then, and finds a slot.

    def __init__(self, shape: ModelShape, places: Sequence[Places]) -> None:
        n = shape.n_expert
        self._places = places
        self._pools = [
            [
                replace(pool, n_slots=place.slots(pool, n))
                for pool in pools_by_size(shape, *place.tiers)
            ]
            for place in places
        ]
        # The place of each tier, and the pool of each layer in each place.
        at_place = {tier: at for at, place in enumerate(places) for tier in place.tiers}
        self._place_of = [at_place[tier] for tier in sorted(at_place)]
        self._pool_in = [np.zeros(shape.n_layers, np.int64) for _ in places]
        # bool [n_places, 256]: whether a tier belongs to a place.
        self._is_in = np.zeros((len(places), 256), bool)
        for at, place in enumerate(places):
            self._is_in[at, list(place.tiers)] = True
            for index, pool in enumerate(self._pools[at]):
                self._pool_in[at][list(pool.layers)] = index

    @property
    def pool_of(self) -> np.ndarray:
        """The index of each layer's slot pool in each tier (precision), int64 [n_layers, n_tiers].

        A slot pool is a set of memory slots for experts. Layers with the same index in a tier share
        a pool.
        """
        return np.stack([self._pool_in[at] for at in self._place_of], axis=1)

    def plan(self) -> SlotPlan:
        places = zip(self._places, self._pools, strict=True)
        return slot_plan((pool, at.tiers, at.on_host) for at, pools in places for pool in pools)

    def track(self, resident: np.ndarray, target: np.ndarray) -> Tracker:
        """Return a Tracker, in which the caller reserves a slot for each transition it chooses.

        A transition is an expert's change to another tier (precision). Until it ends, the expert
        has a slot in both tiers, even if the tiers share a pool. The Tracker begins with the slots
        that are free now in each pool (set of memory slots for experts).

        resident: the tier of each expert now, uint8 [n_layers, n_expert].
        target: the tier of each expert after the running transitions, uint8 [n_layers, n_expert].
        """
        moving = target != resident
        free = []
        for pools, pool_in, is_in in zip(self._pools, self._pool_in, self._is_in, strict=True):
            held = is_in[resident].sum(axis=1) + (is_in[target] & moving).sum(axis=1)
            taken = np.bincount(pool_in, held, len(pools)).astype(int).tolist()
            free.append([pool.n_slots - n for pool, n in zip(pools, taken, strict=True)])
        places = self._place_of
        return Tracker([free[at] for at in places], [self._pool_in[at] for at in places])

    def moves_to(
        self, wanted: np.ndarray, resident: np.ndarray, target: np.ndarray, gains: np.ndarray
    ) -> list[Transition]:
        """Return the transitions of experts to wanted tiers for which slots are free now.

        A transition (layer, expert, new tier) is an expert's change to another tier (precision).
        Transitions to lower tiers come first, then transitions to better tiers, each sorted by
        falling gain. If slots are scarce, the first transitions get them.

        All arguments are [n_layers, n_expert]:

        - wanted: the tier that each expert should have, uint8.
        - resident: the tier in which each expert is in memory now, uint8.
        - target: the tier to which each expert is changing at the moment, otherwise its resident
          tier, uint8. Experts that are changing get no new transition.
        - gains: the benefit of each expert's change, in any unit, float64.
        """
        layers, experts = np.nonzero((resident == target) & (resident != wanted))
        tiers = wanted[layers, experts]
        rises = tiers < resident[layers, experts]
        order = np.lexsort((-gains[layers, experts], rises))
        wanting = zip(*(each[order].tolist() for each in (layers, experts, tiers)), strict=True)
        return self.track(resident, target).admitted(wanting)


def every_expert_to(wanted: np.ndarray) -> list[Transition]:
    """Return a transition (layer, expert, new tier) for every expert of a model.

    wanted: the index of the new tier (precision) of each expert, [n_layers, n_expert].
    """
    return [(layer, expert, int(tier)) for (layer, expert), tier in np.ndenumerate(wanted)]


_DIGITS = re.compile(r"\d+")


def nominal_bits(tier: str) -> int:
    """Return the bits per weight in the name of a tier: 4 for q4_k, 16 for bf16."""
    found = _DIGITS.search(tier)
    return int(found.group()) if found else 1


def nominal_losses(bits: Sequence[float], n_layers: int, n_expert: int) -> np.ndarray:
    """Return quality losses to use if none were measured, float64 [n_layers, n_expert, len(bits)].

    bits: the bits per weight of each tier (precision). All experts have the same losses. One more
    bit per weight divides the loss by four.
    """
    return np.tile(0.25 ** np.array(bits, np.float64), (n_layers, n_expert, 1))


def shares(sums: np.ndarray, otherwise: np.ndarray | None = None) -> np.ndarray:
    """Return an array with each row divided by its sum, float64 [n_layers, n_expert].

    A row with sum 0 is replaced by the same row of `otherwise`. If `otherwise` is None, the row
    gets equal values instead.
    """
    total = sums.sum(axis=1, keepdims=True, dtype=np.float64)
    fallback = np.full(sums.shape, 1 / sums.shape[1]) if otherwise is None else otherwise
    found: np.ndarray = np.where(total > 0, sums / np.where(total > 0, total, 1), fallback)
    return found
