"""Slots for a few hot experts of each layer in tier 0, and for the others in near tiers, of which a
GPU has those in its own memory or in the host's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from orchestrator.errors import PolicyError
from orchestrator.policy.base import ModelShape
from orchestrator.policy.placement import (
    IMPORTANCE,
    PlacementSettings,
    bit_budget,
    nominal_bits,
    nominal_losses,
)
from orchestrator.policy.prefix_split import prefix_split
from orchestrator.policy.tier_pools import Places, TierPools

# Experts of a layer by the near tiers that share their slots.
NearCounts = Mapping[tuple[int, ...], int]


def near_counts(tiers: Sequence[int], counts: Sequence[int], share: bool) -> NearCounts:
    """counts[i] experts of a layer in tiers[i], with slots of their own, or with shared ones."""
    if share:
        return {tuple(tiers): sum(counts)}
    return {(tier,): n for tier, n in zip(tiers, counts, strict=True)}


def like_counts(tiers: Sequence[str], n_cold: int, settings: PlacementSettings) -> tuple[int, ...]:
    """How many of n_cold experts of a layer get each near tier where all are alike. Raises
    PolicyError where the least bits are more than near_bits."""
    bits = [nominal_bits(tier) for tier in tiers]
    if settings.near_bits < bits[-1]:
        raise PolicyError(
            f"--near-bits {settings.near_bits:g} is less than {tiers[-1]} has: name a lower tier, "
            f"or ask for {bits[-1]} or more"
        )
    losses = nominal_losses(bits, 1, n_cold)[0]
    weights = 1 / np.arange(1.0, n_cold + 1) if settings.near_weights == IMPORTANCE else None
    return prefix_split(losses, bits, bit_budget(n_cold, settings), weights)


def placed_shape(shape: ModelShape, on_host: bool) -> ModelShape:
    """The shape with slots as large as they are where they are: below tier 0 on_host or not."""
    if not on_host:
        return shape
    pairs = zip(shape.slots, shape.host_slots, strict=True)
    return replace(shape, slots=tuple((there[0], *here[1:]) for there, here in pairs))


def near_pools(shape: ModelShape, n_hot: int, near: NearCounts, on_host: bool) -> TierPools:
    """Slots for n_hot experts of each layer in tier 0 and for the near ones. on_host: these are in
    the host's memory behind a GPU, with its threads computing them."""
    used = {tier for tiers in near for tier in tiers}
    unused = set(range(1, len(shape.tiers))) - used
    places = [Places((0,), n_hot, reserve=False)]
    places += [Places((tier,), 0, on_host=on_host) for tier in sorted(unused)]
    places += [Places(tiers, n, on_host=on_host) for tiers, n in near.items()]
    return TierPools(placed_shape(shape, on_host), places)
