"""The slot sizes of a model, and functions that divide a memory budget into slots.

A budget can be divided in proportion to weights, evenly over layers, or by depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from orchestrator.errors import ConfigError

# The index of a tier among all tiers of a file, best first. A plain `int` tier is an index among
# the tiers in use, which policies choose and the store holds.
FileTier = NewType("FileTier", int)

Transition = tuple[int, int, int]  # layer, expert, new tier

# Share of a layer's high slots that streaming may use (docs/experiments/engine.md).
PASSING_SHARE = 0.5

# How a share falls with depth (DyMoE, section 4.3).
SCHEDULES = ("cosine", "linear", "flat")
COSINE, LINEAR, FLAT = SCHEDULES


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The number of layers and experts of a model, and the sizes of memory slots for its experts.

    A slot is memory for one matrix of an expert. Only the tiers (precisions) in use are included.

    - n_expert, n_expert_used: the experts per layer, and the experts that a token uses in each
      layer.
    - tiers: the names of the tiers, best first.
    - slots: slots[layer][tier] maps each matrix kind to its slot size in bytes.
    - bits: the bits per weight of each tier; empty if unknown.
    - shares_slots: whether a slot can hold an expert in one tier now and in another tier later.
      This is possible in host memory, but not in GPU memory.
    - host_slots: like slots, but for host memory in a system with a GPU; empty without a GPU.
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
        """Return the bytes of memory that one expert of a layer takes in a tier (precision).

        These are the bytes of the memory slots for all its matrices.
        """
        return sum(self.slots[layer][tier].values())

    def all_slot_bytes(self, tier: int = 0) -> int:
        """Return the bytes of the slots that hold every expert of the model in one tier."""
        return self.n_expert * sum(self.expert_slot_bytes(il, tier) for il in range(self.n_layers))


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules that the user's settings impose on every policy.

    - skip: whether experts may be skipped.
    - renormalize: whether the weights of a token's other experts are scaled up if some are skipped.
    - exact: whether decisions must not depend on which experts are in memory.
    """

    skip: bool = False
    renormalize: bool = False
    exact: bool = False


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """Memory slots of one size for expert matrices. The least recently used slot is evicted first.

    - slot_bytes, n_slots: the size of a slot and the number of slots.
    - n_passing: the maximum number of slots for streamed experts. These are experts that only a
      long prompt needs. They are evicted before all others.
    - on_host: whether a model on a GPU has the slots in host memory. CPU threads then compute the
      experts in these slots.
    """

    slot_bytes: int
    n_slots: int
    n_passing: int = 1
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """The groups of memory slots for a model's experts, and the group that each matrix uses.

    - groups: the groups. All slots of a group have the same size.
    - group_of: maps (layer, matrix kind, tier) to the index of the group. A tier is a precision.
    - total_bytes: the bytes of the slots on the device that runs the model (CPU or GPU).
    - host_bytes: if the model runs on a GPU, the bytes of further slots in host memory; otherwise
      0.
    """

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
    """A claim on a part of a memory budget, counted in units such as slots of one size.

    The claim gets at least `floor` and at most `full` units. Between these limits, the number of
    units is in proportion to `weight`. unit_bytes: the bytes of one unit.
    """

    unit_bytes: int
    floor: int
    full: int
    weight: float


def divide(shares: Sequence[Share], budget_bytes: int) -> list[int]:
    """Divide a memory budget among claims by weight, and return the number of units for each claim.

    A unit is a piece of memory of the claim's own size, such as a slot. The numbers of units are in
    proportion to the claims' weights, and use as much of the budget as possible. A claim gets at
    least `floor` and at most `full` units, even if this is not in proportion.

    Numbers are first rounded down. The bytes that are left are then given out unit by unit, each
    time to the claim with the fewest units for its weight.

    shares: the claims. Each has a unit size in bytes, a weight, and the limits `floor` and `full`.

    If the budget is less than the sum of all floors, each claim gets its floor.
    """
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


def even_slots(shape: ModelShape, budget_bytes: int) -> list[int]:
    """Divide a memory budget into slots for experts in tier 0, about equally among the layers.

    Tier 0 is the best precision. Return the number of slots of each layer, from 1 to n_expert. If
    the budget is too small for one slot per layer, each layer still gets one slot.
    """
    n = shape.n_expert
    sizes = [shape.expert_slot_bytes(layer, 0) for layer in range(shape.n_layers)]
    return divide([Share(size, 1, n, n) for size in sizes], budget_bytes)


def layer_groups(shape: ModelShape, counts: Sequence[Sequence[int]]) -> SlotPlan:
    """Return a plan with a separate group of memory slots for each layer, matrix kind and tier.

    A slot holds one matrix of an expert. A tier is a precision, and tier 0 is the best.

    counts: counts[layer][tier] is the number of slots in each group of this layer and tier.

    A long prompt uses nearly all experts of a layer. The plan limits how many slots may hold
    experts that only this prompt needs, so that they do not evict all other experts. The limit is
    half of a group's slots in tier 0, but at least one slot. Lower tiers have no limit.
    """
    groups: list[SlotGroup] = []
    group_of: dict[tuple[int, int, int], int] = {}
    for layer, of_tiers in enumerate(counts):
        for tier, units in enumerate(of_tiers):
            passing = max(1, int(units * PASSING_SHARE)) if tier == 0 else units
            for kind, size in shape.slots[layer][tier].items():
                group_of[layer, kind, tier] = len(groups)
                groups.append(SlotGroup(size, units, passing))
    return SlotPlan(tuple(groups), group_of)


def falling(schedule: str, n_layers: int) -> list[float]:
    """Return a number c(l) from 0 to 1 for each layer l of a model, which falls by a schedule.

    Policies use it to keep more experts of early layers in the best precision. The schedule is one
    of these, with layers l = 0 to L - 1 and L = n_layers:

    - cosine: c(l) = (cos(pi * l / (L-1)) + 1) / 2 (DyMoE, eq. 4).
    - linear: c(l) = 1 - l / (L-1).
    - flat: c(l) = 0 in all layers, also in the first.

    A model with one layer has c = 0. Raises ConfigError for an unknown schedule.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"unknown schedule '{schedule}': choose one of {', '.join(SCHEDULES)}")
    if schedule == FLAT or n_layers == 1:
        return [0.0] * n_layers
    places = [layer / (n_layers - 1) for layer in range(n_layers)]
    if schedule == LINEAR:
        return [1 - place for place in places]
    return [(math.cos(math.pi * place) + 1) / 2 for place in places]
