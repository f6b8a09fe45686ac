"""What the model of the expert cache is about: cells, copies in slots, reads on their way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

SKIP = 255
ABSENT = 254
UP, GATE, GATE_UP, DOWN = range(4)
GRAPH_ORDER = (GATE, GATE_UP, UP, DOWN)  # in which a layer computes its kinds

Cell = tuple[int, int, int]  # layer, kind, expert
Pool = tuple[int, int, int]  # layer (-1: all layers share it), kind, tier
Visit = tuple[int, int]  # expert, tier it came in (SKIP: none)
Item = tuple[int, int, int, int, bool]  # prefetch: layer, expert, tier, mask of kinds, passing


@dataclass(frozen=True)
class Layout:
    """What does not change while a store lives; bytes and counts as the store is given them."""

    kinds: tuple[tuple[int, ...], ...]  # of each layer, ascending
    n_expert: int
    n_tiers: int
    shared: bool  # layers share slots
    n_slots: tuple[int, ...]  # [tier] of each pool; where it is mixed, the first one
    slot_bytes: tuple[int, ...]  # [tier]
    expert_bytes: tuple[int, ...]  # [tier]
    offsets: dict[tuple[int, int, int], int]  # (layer, kind, tier) of expert 0 in the file
    io_threads: int
    n_passing: int = 1  # slots of a pool that passing reads may take from the others
    exact_tiers: bool = False  # a request drops a better copy: no reuse, to measure quality
    # Slots are on a device, with a cache of slices in host memory behind it: what that has does
    # not queue for the disk, so that any load may be the next one, and none need read bytes.
    device: str | None = None
    host_bytes: int = 0
    mixed: bool = False  # tiers share slots

    def computed(self, layer: int) -> tuple[int, ...]:
        """The kinds of a layer, in the order in which it computes them."""
        return tuple(kind for kind in GRAPH_ORDER if kind in self.kinds[layer])

    def pool(self, cell: Cell, tier: int) -> Pool:
        return (-1 if self.shared else cell[0], cell[1], 0 if self.mixed else tier)

    def offset(self, cell: Cell, tier: int) -> int:
        return self.offsets[cell[0], cell[1], tier] + cell[2] * self.expert_bytes[tier]


class Copy(NamedTuple):
    """A complete tier in a slot."""

    tier: int
    stamp: int  # when it was last asked for
    unused: bool  # read ahead, and not asked for yet
    passing: bool  # read for passing requests alone: goes before all others


class Read(NamedTuple):
    """A tier on its way from disk. placed: its slot is taken. kept: what a prefetch does not evict,
    which is what stands in its list or in a later one."""

    tier: int
    stamp: int
    ahead: bool  # a prefetch
    turn: int  # among prefetches
    stage: int  # of those below; a doomed one runs, and comes to nothing
    passing: bool
    placed: bool = True
    kept: frozenset[Cell] = frozenset()


QUEUED, RUNNING, DOOMED, ARRIVED = range(4)
