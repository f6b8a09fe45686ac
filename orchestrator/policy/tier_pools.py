"""Slots for every expert of a model in one of several tiers; tiers may share slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.policy.base import ModelShape, SlotPlan
from orchestrator.policy.versions import Pool, Pools, Tracker, pools_by_size, slot_plan

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
