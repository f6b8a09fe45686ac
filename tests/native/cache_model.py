"""What the expert cache must do, in plain Python: a second, short implementation of the rules.

Rules (DyMoE 4.4.2): a cell, one (layer, kind, expert), holds one tier. A request for a better
tier than it holds is a miss, loads that tier and then drops the old copy. A request for the
same or a worse tier is a hit. Beside them: slots of a pool go to whoever asked first, then to
the copy asked for longest ago that the running step does not need.

The disk runs beside the requests, so one history of requests has several legal outcomes. A
`Cache` is one of them; `Caches` (cache_states) is the set of all that agree with what was seen, and
empty as soon as the real store does what no legal outcome does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
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
    n_slots: tuple[int, ...]  # [tier] of each pool
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

    def pool(self, cell: Cell, tier: int) -> Pool:
        return (-1 if self.shared else cell[0], cell[1], tier)

    def offset(self, cell: Cell, tier: int) -> int:
        return self.offsets[cell[0], cell[1], tier] + cell[2] * self.expert_bytes[tier]


class Copy(NamedTuple):
    """A complete tier in a slot."""

    tier: int
    stamp: int  # when it was last asked for
    unused: bool  # read ahead, and not asked for yet
    passing: bool  # read for passing requests alone: goes before all others


class Read(NamedTuple):
    """A tier on its way from disk; its slot is taken."""

    tier: int
    stamp: int
    ahead: bool  # a prefetch
    turn: int  # among prefetches
    stage: int  # QUEUED, RUNNING or ARRIVED
    passing: bool


QUEUED, RUNNING, ARRIVED = range(3)


@dataclass
class Cache:
    """One state of the cache. Methods change it; the caller copies first."""

    layout: Layout
    held: dict[Cell, Copy] = field(default_factory=dict)
    reads: dict[Cell, Read] = field(default_factory=dict)
    want: dict[Cell, int] = field(default_factory=dict)  # what the running step needs, or SKIP
    passing: set[Cell] = field(default_factory=set)  # those of them that only pass through
    waiting: dict[Pool, tuple[Cell, ...]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    phase: int = 0
    clock: int = 0
    turn: int = 0

    def copy(self) -> Cache:
        return Cache(
            self.layout,
            dict(self.held),
            dict(self.reads),
            dict(self.want),
            set(self.passing),
            dict(self.waiting),
            dict(self.counts),
            self.phase,
            self.clock,
            self.turn,
        )

    def key(self) -> tuple[object, ...]:
        """Equal for states that cannot be told apart later: only the order of stamps counts."""
        order = sorted([(c[1], cell) for cell, c in self.held.items()])
        order += sorted([(r[1], cell) for cell, r in self.reads.items()])
        stamps = [stamp for stamp, _ in order]
        stamps.sort()
        return (
            tuple([(cell, stamps.index(stamp)) for stamp, cell in order]),
            frozenset([(cell, c[0], *c[2:]) for cell, c in self.held.items()]),
            frozenset([(cell, r[0], *r[2:]) for cell, r in self.reads.items()]),
            frozenset(self.want.items()),
            frozenset(self.passing),
            frozenset([each for each in self.waiting.items() if each[1]]),
            frozenset(self.counts.items()),
            self.turn,
        )

    def count(self, name: str, n: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + n

    def count_phase(self, name: str, n: int = 1) -> None:
        self.count(f"{name}[{self.phase}]", n)

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    # ---- what a cell is worth now

    def pinned(self, cell: Cell) -> bool:
        return self.want.get(cell, SKIP) != SKIP

    def good_enough(self, cell: Cell) -> bool:
        """Conservative reuse: the wanted tier or any better one will do."""
        return cell in self.held and self.held[cell].tier <= self.want[cell]

    def unmet(self, cell: Cell) -> bool:
        return self.pinned(cell) and not self.good_enough(cell)

    def resident(self) -> list[list[int]]:
        """[layer][expert]: the worst tier over its kinds, ABSENT if one is missing."""
        table = []
        for layer, kinds in enumerate(self.layout.kinds):
            row = []
            for expert in range(self.layout.n_expert):
                cells = [(layer, kind, expert) for kind in kinds]
                whole = all(cell in self.held for cell in cells)
                row.append(max(self.held[cell].tier for cell in cells) if whole else ABSENT)
            table.append(row)
        return table

    # ---- slots

    def slot_bytes_in_use(self) -> int:
        tiers = [copy.tier for copy in self.held.values()]
        tiers += [read.tier for read in self.reads.values()]
        return sum(self.layout.slot_bytes[tier] for tier in tiers)

    def load(
        self,
        cell: Cell,
        tier: int,
        ahead: bool = False,
        passing: bool = False,
        kept: Collection[Cell] = (),
    ) -> bool:
        """Starts to load where a slot is free or can be made free; copies of `kept` cells do not
        make room."""
        pool = self.layout.pool(cell, tier)
        copies = [c for c, copy in self.held.items() if self.layout.pool(c, copy.tier) == pool]
        loads = [c for c, read in self.reads.items() if self.layout.pool(c, read.tier) == pool]
        assert len(copies) + len(loads) <= self.layout.n_slots[tier]
        if len(copies) + len(loads) == self.layout.n_slots[tier]:
            n_passing = sum(self.held[c].passing for c in copies)
            n_passing += sum(self.reads[c].passing for c in loads)
            may_push = not passing or n_passing < max(1, self.layout.n_passing)
            idle = [
                (not self.held[c].passing, self.held[c].stamp, c)
                for c in copies
                if not self.pinned(c) and (self.held[c].passing or may_push)
                if c not in kept
            ]
            if not idle:
                return False
            self.evict(min(idle)[2])
        turn = self.turn if ahead else 0
        self.reads[cell] = Read(tier, self.tick(), ahead, turn, QUEUED, passing)
        self.turn += ahead
        peak = max(self.counts.get("slot_bytes_peak", 0), self.slot_bytes_in_use())
        self.counts["slot_bytes_peak"] = peak
        return True

    def evict(self, cell: Cell) -> None:
        self.drop(cell)
        self.count("evictions")

    def drop(self, cell: Cell) -> None:
        self.count("prefetch_wasted", self.held[cell].unused)
        del self.held[cell]

    def load_wanted(self, cell: Cell) -> bool:
        return self.load(cell, self.want[cell], passing=cell in self.passing)

    def load_or_wait(self, cell: Cell) -> None:
        pool = self.layout.pool(cell, self.want[cell])
        queue = self.waiting.get(pool, ())
        if cell not in queue and (queue or not self.load_wanted(cell)):
            self.waiting[pool] = (*queue, cell)

    def serve(self, pool: Pool) -> None:
        """First come, first served."""
        while self.waiting.get(pool):
            cell = self.waiting[pool][0]
            idle = self.unmet(cell) and cell not in self.reads
            if idle and not self.load_wanted(cell):
                return
            self.waiting[pool] = self.waiting[pool][1:]

    # ---- the disk

    def turn_of(self, cell: Cell) -> tuple[int, int, int, Cell]:
        """Demand first, by kind and along the file; then prefetches as they were listed."""
        read = self.reads[cell]
        if read.ahead:
            return (1, read.turn, 0, cell)
        rank = {GATE: 0, GATE_UP: 0, UP: 1, DOWN: 2}[cell[1]]
        return (0, rank, self.layout.offset(cell, read.tier), cell)

    def disk_steps(self) -> list[Callable[[Cache], None]]:
        """What the disk may do next: end a running read, or begin the most urgent one."""
        running = [c for c, read in self.reads.items() if read.stage == RUNNING]
        queued = [c for c, read in self.reads.items() if read.stage == QUEUED]
        steps: list[Callable[[Cache], None]] = [
            partial(Cache.arrive, cell=cell) for cell in running
        ]
        if self.layout.device is not None:
            steps += [partial(Cache.begin_read, cell=cell) for cell in queued]
        elif queued and len(running) < self.layout.io_threads:
            first = min(queued, key=self.turn_of)
            steps.append(partial(Cache.begin_read, cell=first))
        return steps

    def begin_read(self, cell: Cell) -> None:
        read = self.reads[cell]
        self.reads[cell] = read._replace(stage=RUNNING)
        if self.layout.device is not None:
            return
        bytes_read = self.layout.expert_bytes[read.tier]
        self.count_phase("prefetch_bytes" if read.ahead else "demand_bytes", bytes_read)

    def arrive(self, cell: Cell) -> None:
        self.reads[cell] = self.reads[cell]._replace(stage=ARRIVED)
        if not self.pinned(cell) or not self.good_enough(cell):
            self.publish(cell)  # else an op may be reading the copy that it would replace

    def publish(self, cell: Cell) -> None:
        """No duplication: the new copy takes the place of the old one."""
        read, old = self.reads.pop(cell), self.held.get(cell)
        if old is not None:
            self.count("promotions", read.tier < old.tier)
            self.drop(cell)
        unused = read.ahead and not self.pinned(cell)
        self.held[cell] = Copy(read.tier, read.stamp, unused, read.passing)
        if self.unmet(cell):
            self.load_or_wait(cell)  # a worse tier was on its way when this one was asked for
        if old is not None:
            self.serve(self.layout.pool(cell, old.tier))
        if not self.pinned(cell):
            self.serve(self.layout.pool(cell, read.tier))

    def cancel(self, cell: Cell) -> None:
        read = self.reads.pop(cell)
        self.count("prefetch_cancelled", read.ahead)
        self.serve(self.layout.pool(cell, read.tier))

    # ---- requests

    def begin_step(self, phase: int) -> None:
        self.phase = phase
        if all(read.stage != QUEUED for read in self.reads.values()):
            self.turn = 0
        if not self.want:
            return
        self.want.clear()
        self.passing.clear()
        self.waiting.clear()
        for cell, read in sorted(self.reads.items()):
            if read.stage == ARRIVED:
                self.publish(cell)
            elif read.stage == QUEUED:
                self.cancel(cell)

    def apply(
        self, layer: int, tiers: dict[int, int], passing: frozenset[int] = frozenset()
    ) -> None:
        """tiers: what each routed expert shall have, in the order of the routing."""
        cells = [(layer, kind, expert) for kind in self.layout.kinds[layer] for expert in tiers]
        for tier in tiers.values():
            self.count_phase("routed skip" if tier == SKIP else f"routed {tier}")
        for cell in cells:
            self.want[cell] = tiers[cell[2]]
            (self.passing.add if cell[2] in passing else self.passing.discard)(cell)
            better = self.pinned(cell) and cell in self.held and self.good_enough(cell)
            if self.layout.exact_tiers and better and self.held[cell].tier != self.want[cell]:
                self.evict(cell)
            if self.pinned(cell) and cell not in self.passing:
                self.touch(cell)
        stale = [
            c for c, r in self.reads.items() if c[0] == layer and r.ahead and r.stage == QUEUED
        ]
        for cell in sorted(stale, key=self.turn_of):
            if not self.pinned(cell):
                self.cancel(cell)
        for cell in cells:
            if self.pinned(cell):
                self.ask(cell)

    def touch(self, cell: Cell) -> None:
        if cell in self.reads:
            self.reads[cell] = self.reads[cell]._replace(stamp=self.tick(), passing=False)
        if cell in self.held:
            self.held[cell] = self.held[cell]._replace(stamp=self.tick(), passing=False)

    def ask(self, cell: Cell) -> None:
        self.count_phase("requests")
        if self.good_enough(cell):
            self.count_phase("hits")
            self.count("prefetch_used", self.held[cell].unused)
            self.held[cell] = self.held[cell]._replace(unused=False)
            return
        read = self.reads.get(cell)
        if read is not None:
            good = read.tier <= self.want[cell]
            self.count("prefetch_used", good and read.ahead)
            if good or read.stage != QUEUED:
                self.reads[cell] = read._replace(ahead=False, turn=0)
                return
            self.cancel(cell)
        self.load_or_wait(cell)

    def prefetch(self, items: list[Item]) -> None:
        """Most urgent first. What is listed and resident does not make room for what is not."""
        kinds = self.layout.kinds
        listed = [
            ([(layer, k, expert) for k in kinds[layer] if mask >> k & 1], tier, passing)
            for layer, expert, tier, mask, passing in items
        ]
        kept = {cell for cells, _, _ in listed for cell in cells}
        for cells, _, passing in reversed(listed):
            for cell in cells:
                if not passing:
                    self.touch(cell)
        for cells, tier, passing in listed:
            for cell in cells:
                worse = cell not in self.held or self.held[cell].tier > tier
                if cell not in self.want and cell not in self.reads and worse:
                    self.load(cell, tier, True, passing, kept)

    def ready(self, layer: int, kind: int, experts: Iterable[int]) -> list[Visit]:
        """Which of these may be computed now, and in which tier."""
        out = []
        for expert in experts:
            cell = (layer, kind, expert)
            if not self.pinned(cell):
                out.append((expert, SKIP))
            elif self.good_enough(cell):
                out.append((expert, self.held[cell].tier))
        return out

    def release(self, layer: int, kind: int, experts: list[int]) -> None:
        for expert in experts:
            cell = (layer, kind, expert)
            del self.want[cell]
            self.passing.discard(cell)
            if cell in self.reads and self.reads[cell].stage == ARRIVED:
                self.publish(cell)
        self.serve_kind(layer, kind)

    def serve_kind(self, layer: int, kind: int) -> None:
        for tier in range(self.layout.n_tiers):
            self.serve(self.layout.pool((layer, kind, 0), tier))
