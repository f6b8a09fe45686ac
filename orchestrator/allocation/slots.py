"""A model as slots see it, and how a budget is divided into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

# The place of a precision among all of a file, best first. A tier without further words is one of
# those in use, counted from the best of them: what policies decide, and what the store holds.
FileTier = NewType("FileTier", int)

Transition = tuple[int, int, int]  # layer, expert, tier to bring it to


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as policies see it, reduced to the tiers in use, whose names are tiers.

    slots[layer][tier] maps a matrix kind to its slot size in bytes. bits: that a weight takes in
    each tier, empty where that is not known. shares_slots: a slot may hold any tier that it is
    large enough for, as in host memory. host_slots: beside a device, slots in the host's memory.
    """

    n_expert: int
    n_expert_used: int
    tiers: tuple[str, ...]
    slots: tuple[tuple[dict[int, int], ...], ...]
    bits: tuple[float, ...] = ()
    shares_slots: bool = True
    host_slots: tuple[tuple[dict[int, int], ...], ...] = ()

    @property
    def n_layers(self) -> int:
        return len(self.slots)

    def expert_slot_bytes(self, layer: int, tier: int) -> int:
        """Slot bytes of one whole expert: all of its matrices."""
        return sum(self.slots[layer][tier].values())

    def all_slot_bytes(self, tier: int = 0) -> int:
        """Slot bytes of every expert in one tier."""
        return self.n_expert * sum(self.expert_slot_bytes(il, tier) for il in range(self.n_layers))


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for every policy. skip: the tier of no bytes is in use, below the others.
    renormalize: the weights of a token's other experts make up for the skipped ones. exact: what
    is decided does not depend on what is in memory."""

    skip: bool = False
    renormalize: bool = False
    exact: bool = False


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """Slots of one size that evict each other in least-recently-used order. n_passing: how many of
    them passing requests may take from the others. on_host: the host's threads compute them."""

    slot_bytes: int
    n_slots: int
    n_passing: int = 1
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Slot groups, and which one holds each (layer, kind, tier). total_bytes leaves host_bytes out,
    those of slots in the host's memory behind a device."""

    groups: tuple[SlotGroup, ...]
    group_of: dict[tuple[int, int, int], int]

    @property
    def total_bytes(self) -> int:
        return sum(each.slot_bytes * each.n_slots for each in self.groups if not each.on_host)

    @property
    def host_bytes(self) -> int:
        return sum(each.slot_bytes * each.n_slots for each in self.groups if each.on_host)


@dataclass(frozen=True, slots=True)
class Share:
    """One claim on a budget: at least `floor` units, at most `full`, in proportion to weight."""

    unit_bytes: int
    floor: int
    full: int
    weight: float


def divide(shares: Sequence[Share], budget_bytes: int) -> list[int]:
    """Units for each share: clamp(s * weight, floor, full) with the largest s whose sum fits
    the budget; what rounding left over goes, unit by unit, to the share that is furthest
    below its proportion. The floors, where the budget is too small for them."""
    if sum(share.unit_bytes * share.floor for share in shares) > budget_bytes:
        return [share.floor for share in shares]

    def counts(scale: float) -> list[int]:
        return [max(share.floor, min(share.full, int(scale * share.weight))) for share in shares]

    def cost(units: Sequence[int]) -> int:
        return sum(share.unit_bytes * n for share, n in zip(shares, units, strict=True))

    positive = [share for share in shares if share.weight > 0]
    low, high = 0.0, max((share.full / share.weight for share in positive), default=0.0) + 1.0
    if cost(counts(high)) <= budget_bytes:
        return counts(high)
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(counts(middle)) <= budget_bytes else (low, middle)
    units, waiting = counts(low), [i for i, share in enumerate(shares) if share.weight > 0]
    rest = budget_bytes - cost(units)
    while waiting := [
        i for i in waiting if units[i] < shares[i].full and shares[i].unit_bytes <= rest
    ]:
        neediest = min(waiting, key=lambda i: (units[i] + 1) / shares[i].weight)
        units[neediest] += 1
        rest -= shares[neediest].unit_bytes
    return units
