"""Slots for every expert of a model in one of several tiers, so many of each tier in each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from orchestrator.policy.base import ModelShape, SlotPlan
from orchestrator.policy.versions import Pool, Pools, Tracker, pools_by_size, slot_plan

# One slot beyond what is needed for each so many experts of a pool: as many may be under way.
_EXPERTS_PER_MOVE = 64
_MOST_MOVES = 16


class TierPools(Pools):
    """The pools of a plan in which each layer has counts[tier] experts of each tier, with slots in
    reserve in all tiers but the first.

    With them every assignment of these counts is reached from every other one, and each expert
    moves once: where all moves to a lower tier find its pool full, that pool holds an expert that
    wants elsewhere, and some pool of a lower tier has fewer than its share; where none is full, the
    only moves left over are to the first tier, and one of its own experts has to leave it.
    """

    def __init__(self, shape: ModelShape, counts: Sequence[int]) -> None:
        self._pools = [
            [self._sized(pool, tier, n, shape.n_expert) for pool in pools_by_size(shape, tier)]
            for tier, n in enumerate(counts)
        ]
        super().__init__(self._pools, shape.n_layers)

    @staticmethod
    def _sized(pool: Pool, tier: int, n: int, n_expert: int) -> Pool:
        """With its slots; the store wants one of every tier."""
        spare = min(_MOST_MOVES, max(1, len(pool.layers) * n_expert // _EXPERTS_PER_MOVE))
        reserve = spare if tier and n else 0
        return replace(pool, n_slots=max(1, n * len(pool.layers) + reserve))

    @property
    def total_bytes(self) -> int:
        return sum(pool.unit_bytes * pool.n_slots for of_tier in self._pools for pool in of_tier)

    def plan(self) -> SlotPlan:
        return slot_plan(self._pools)

    def track(self, resident: np.ndarray, target: np.ndarray) -> Tracker:
        """Free slots now. resident, target uint8 [n_layers, n_expert] as of StepReport: an expert
        between two tiers holds a slot of both."""
        return self.free((resident == tier) | (target == tier) for tier in range(len(self._pools)))
