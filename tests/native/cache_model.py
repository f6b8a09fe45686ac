"""What the expert cache must do, in plain Python: a second, short implementation of the rules.

Rules (DyMoE 4.4.2): a cell, one (layer, kind, expert), holds one tier. A request for a better
tier than it holds is a miss, loads that tier and then drops the old copy. A request for the
same or a worse tier is a hit. Beside them: slots of a pool go to whoever asked first, then to
the copy asked for longest ago that the running step does not need. A prefetch takes its slot when
its read starts (on a device: when its bytes are in host memory), or as soon as it is asked for;
it is dropped where there is none.

The disk runs beside the requests, so one history of requests has several legal outcomes. A
`Cache` is one of them; `Caches` (cache_states) is the set of all that agree with what was seen, and
empty as soon as the real store does what no legal outcome does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

from .cache_parts import (
    ABSENT,
    ARRIVED,
    DOOMED,
    DOWN,
    GATE,
    GATE_UP,
    QUEUED,
    RUNNING,
    SKIP,
    UP,
    Cell,
    Copy,
    Item,
    Layout,
    Pool,
    Read,
    Visit,
)


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
        tiers += [read.tier for read in self.reads.values() if read.placed]
        return sum(self.layout.slot_bytes[tier] for tier in tiers)

    def make_room(
        self,
        cell: Cell,
        tier: int,
        passing: bool,
        kept: Collection[Cell] = (),
        ahead: bool = False,
    ) -> bool:
        """Whether there is a slot, free or made free; copies of `kept` cells do not make room.
        ahead: for a prefetch."""
        pool = self.layout.pool(cell, tier)
        copies = [c for c, copy in self.held.items() if self.layout.pool(c, copy.tier) == pool]
        loads = [c for c, read in self.reads.items() if self.layout.pool(c, read.tier) == pool]
        loads = [c for c in loads if self.reads[c].placed]
        n_slots = self.layout.n_slots[pool[2]]
        assert len(copies) + len(loads) <= n_slots
        if len(copies) + len(loads) == n_slots:
            n_passing = sum(self.held[c].passing for c in copies)
            n_passing += sum(self.reads[c].passing for c in loads)
            may_push = not passing or n_passing < max(1, self.layout.n_passing)
            idle = [
                (not self.held[c].passing, self.held[c].stamp, c)
                for c in copies
                if not self.pinned(c) and (self.held[c].passing or may_push)
                if c not in kept
            ]
            if not idle and self.layout.mixed and not ahead:
                # what the step needs in a better tier, and so reads anew in any case
                idle = [(True, self.held[c].stamp, c) for c in copies if self.unmet(c)]
            if not idle:
                return False
            self.evict(min(idle)[2])
        return True

    def count_peak(self) -> None:
        peak = max(self.counts.get("slot_bytes_peak", 0), self.slot_bytes_in_use())
        self.counts["slot_bytes_peak"] = peak

    def load(self, cell: Cell, tier: int, passing: bool = False) -> bool:
        """Starts to load for a request where there is a slot."""
        if not self.make_room(cell, tier, passing):
            return False
        self.reads[cell] = Read(tier, self.tick(), False, 0, QUEUED, passing)
        self.count_peak()
        return True

    def place(self, cell: Cell) -> bool:
        """A slot for a read that has none; a request lets those go first that wait already."""
        read = self.reads[cell]
        if read.placed:
            return True
        if not read.ahead and self.waiting.get(self.layout.pool(cell, read.tier)):
            return False
        kept = read.kept if read.ahead else ()
        if not self.make_room(cell, read.tier, read.passing, kept, read.ahead):
            return False
        self.reads[cell] = read._replace(placed=True, kept=frozenset())
        self.count_peak()
        return True

    def evict(self, cell: Cell) -> None:
        self.drop(cell)
        self.count("evictions")

    def drop(self, cell: Cell) -> None:
        self.count("prefetch_wasted", self.held[cell].unused)
        del self.held[cell]

    def load_wanted(self, cell: Cell) -> bool:
        return self.load(cell, self.want[cell], cell in self.passing)

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
        running = [c for c, read in self.reads.items() if read.stage in (RUNNING, DOOMED)]
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
        if self.layout.device is None and not self.place(cell):
            self.cancel(cell)
            return
        read = self.reads[cell]
        self.reads[cell] = read._replace(stage=RUNNING)
        if self.layout.device is not None:
            return
        bytes_read = self.layout.expert_bytes[read.tier]
        self.count_phase("prefetch_bytes" if read.ahead else "demand_bytes", bytes_read)

    def arrive(self, cell: Cell) -> None:
        if self.reads[cell].stage == DOOMED or not self.place(cell):
            self.throw_away(cell)
            return
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

    def throw_away(self, cell: Cell) -> None:
        """A read that comes to nothing; who needs the cell begins again."""
        self.cancel(cell)
        if self.unmet(cell):
            self.load_or_wait(cell)

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
        cells = [(layer, kind, expert) for kind in self.layout.computed(layer) for expert in tiers]
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
            good = read.tier <= self.want[cell] and read.stage != DOOMED
            if not good and not read.placed and read.stage != QUEUED:
                self.count("prefetch_cancelled", read.ahead)
                self.reads[cell] = read._replace(stage=DOOMED, ahead=False, turn=0)
                return
            if good or read.stage != QUEUED:
                self.reads[cell] = read._replace(ahead=False, turn=0)
                if self.place(cell) or read.stage != QUEUED:
                    self.count("prefetch_used", good and read.ahead)
                    return
                self.reads[cell] = read
            self.cancel(cell)
        self.load_or_wait(cell)

    def prefetch(self, items: list[Item]) -> None:
        """Most urgent first. What is listed and resident does not make room for what is not."""
        kinds = self.layout.computed
        listed = [
            ([(layer, k, expert) for k in kinds(layer) if mask >> k & 1], tier, passing)
            for layer, expert, tier, mask, passing in items
        ]
        kept = frozenset(cell for cells, _, _ in listed for cell in cells)
        for cell, read in self.reads.items():
            if not read.placed:
                self.reads[cell] = read._replace(kept=read.kept | kept)
        for cells, _, passing in reversed(listed):
            for cell in cells:
                if not passing:
                    self.touch(cell)
        for cells, tier, passing in listed:
            for cell in cells:
                worse = cell not in self.held or self.held[cell].tier > tier
                if cell not in self.want and cell not in self.reads and worse:
                    self.reads[cell] = Read(
                        tier, self.tick(), True, self.turn, QUEUED, passing, False, kept
                    )
                    self.turn += 1

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
        for cell in [(layer, kind, expert) for expert in experts]:
            del self.want[cell]
            self.passing.discard(cell)
            if cell in self.reads and self.reads[cell].stage == ARRIVED:
                self.publish(cell)
        self.serve_kind(layer, kind)

    def serve_kind(self, layer: int, kind: int) -> None:
        for tier in range(self.layout.n_tiers):
            self.serve(self.layout.pool((layer, kind, 0), tier))
