"""What the expert cache must do, in plain Python: a second, short implementation of the rules.

Rules (DyMoE 4.4.2): a cell, one (layer, kind, expert), holds one tier. A request for a better
tier than it holds is a miss, loads that tier and then drops the old copy. A request for the
same or a worse tier is a hit. Beside them: slots of a pool go to whoever asked first, then to
the copy asked for longest ago that the running step does not need. A prefetch takes its slot when
its read starts (on a device: when its bytes are in host memory), or as soon as it is asked for;
it is dropped where there is none. A limit leaves each pool its first slots: the copies that were
asked for longest ago go. A read into a slot that goes ends as any other, and then its copy, or
one that was asked for longer ago, goes.

The disk runs beside the requests, so one history of requests has several legal outcomes. A
`Cache` is one of them; `Caches` is the set of all that agree with what was seen, and empty as soon
as the real store does what no legal outcome does.
"""

from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import NamedTuple

SKIP = 255
ABSENT = 254
UP, GATE, GATE_UP, DOWN = range(4)
GRAPH_ORDER = (GATE, GATE_UP, UP, DOWN)  # in which a layer computes its kinds

Cell = tuple[int, int, int]  # layer, kind, expert
Pool = tuple[int, int, int]  # layer (-1: all layers share it), kind, tier


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

    def computed(self, layer):
        """The kinds of a layer, in the order in which it computes them."""
        return tuple(kind for kind in GRAPH_ORDER if kind in self.kinds[layer])

    def pool(self, cell, tier):
        return (-1 if self.shared else cell[0], cell[1], 0 if self.mixed else tier)

    def offset(self, cell, tier):
        return self.offsets[cell[0], cell[1], tier] + cell[2] * self.expert_bytes[tier]

    @cached_property
    def pools(self):
        """In the order in which the store is given them."""
        tiers = range(self.n_tiers)
        cells = [(at, k, 0) for at, kinds in enumerate(self.kinds) for k in kinds]
        return tuple(dict.fromkeys(self.pool(cell, tier) for cell in cells for tier in tiers))

    def within(self, n_bytes):
        """How many slots of each pool a limit of so many bytes leaves: slots lie in turn, at even
        distances of each pool, and the limit cuts their memory at one place."""
        left = dict.fromkeys(self.pools, 0)
        order = sorted(
            (i / self.n_slots[tier], at)
            for at, (_, _, tier) in enumerate(self.pools)
            for i in range(self.n_slots[tier])
        )
        for _, at in order:
            pool = self.pools[at]
            n_bytes -= self.slot_bytes[pool[2]]
            if n_bytes < 0:
                break
            left[pool] += 1
        return left


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
    beyond: bool = False  # its slot is one that goes


QUEUED, RUNNING, DOOMED, ARRIVED = range(4)


@dataclass
class Cache:
    """One state of the cache. Methods change it; the caller copies first."""

    layout: Layout
    held: dict[Cell, Copy] = field(default_factory=dict)
    reads: dict[Cell, Read] = field(default_factory=dict)
    want: dict[Cell, int] = field(default_factory=dict)  # what the running step needs, or SKIP
    waiting: dict[Pool, tuple[Cell, ...]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    passing: set[Cell] = field(default_factory=set)  # what is wanted, and only passes through
    limits: dict[Pool, int] = field(default_factory=dict)  # slots that pools have now
    phase: int = 0
    clock: int = 0
    turn: int = 0

    def copy(self):
        dicts = map(dict, (self.held, self.reads, self.want, self.waiting, self.counts))
        copied = Cache(self.layout, *dicts, set(self.passing), self.limits)
        copied.phase, copied.clock, copied.turn = self.phase, self.clock, self.turn
        return copied

    def key(self):
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
            frozenset(self.limits.items()),
            self.turn,
        )

    def count(self, name, n=1):
        self.counts[name] = self.counts.get(name, 0) + n

    def count_phase(self, name, n=1):
        self.count(f"{name}[{self.phase}]", n)

    def tick(self):
        self.clock += 1
        return self.clock

    # ---- what a cell is worth now

    def pinned(self, cell):
        return self.want.get(cell, SKIP) != SKIP

    def good_enough(self, cell):
        """Conservative reuse: the wanted tier or any better one will do."""
        return cell in self.held and self.held[cell].tier <= self.want[cell]

    def unmet(self, cell):
        return self.pinned(cell) and not self.good_enough(cell)

    def resident(self):
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

    def slot_bytes_in_use(self):
        tiers = [copy.tier for copy in self.held.values()]
        tiers += [read.tier for read in self.reads.values() if read.placed]
        return sum(self.layout.slot_bytes[tier] for tier in tiers)

    def make_room(self, cell, tier, passing, kept=(), ahead=False):
        """Whether there is a slot, free or made free; copies of `kept` cells do not make room.
        ahead: for a prefetch."""
        pool = self.layout.pool(cell, tier)
        copies, loads, going, n_slots = self.of_pool(pool)
        assert len(copies) + len(loads) <= n_slots
        if len(copies) + len(loads) == n_slots:
            n_passing = sum(self.held[c].passing for c in copies)
            n_passing += sum(self.reads[c].passing for c in (*loads, *going))
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

    def of_pool(self, pool):
        """What is complete in a pool, what is read into it, what is read into slots of it that go,
        and how many slots the first two may have."""
        of, n_slots = self.layout.pool, self.limits.get(pool, self.layout.n_slots[pool[2]])
        copies = [c for c, copy in self.held.items() if of(c, copy.tier) == pool]
        reads = [(c, r) for c, r in self.reads.items() if r.placed and of(c, r.tier) == pool]
        loads, going = ([c for c, r in reads if r.beyond == goes] for goes in (False, True))
        return copies, loads, going, n_slots

    def fit(self, pool):
        """What a limit leaves no slot for goes."""
        copies, loads, _, n_slots = self.of_pool(pool)
        order = sorted(copies, key=lambda c: (not self.held[c].passing, self.held[c].stamp))
        for cell in order[: max(0, len(copies) + len(loads) - n_slots)]:
            self.evict(cell)

    def limit(self, n_bytes):
        """Between two steps, when nothing is needed. Which of the reads under way have a slot that
        goes, nobody can see: a state for each case."""
        assert not self.want
        self.limits = self.layout.within(n_bytes)
        placed = [cell for cell, read in self.reads.items() if read.placed]
        cases = []
        for beyond in product((False, True), repeat=len(placed)):
            case = self.copy()
            for cell, goes in zip(placed, beyond, strict=True):
                case.reads[cell] = case.reads[cell]._replace(beyond=goes)
            if all(case.may_be(pool) for pool in self.layout.pools):
                cases.append(case)
                for pool in self.layout.pools:
                    case.fit(pool)
        return cases

    def may_be(self, pool):
        """Whether a pool has slots enough of both sides of the limit for what is read into it."""
        _, loads, going, n_slots = self.of_pool(pool)
        return len(loads) <= n_slots and len(going) <= self.layout.n_slots[pool[2]] - n_slots

    def settled(self):
        """Whether no slot is in use that is to go."""
        return not any(read.beyond for read in self.reads.values())

    def count_peak(self):
        peak = max(self.counts.get("slot_bytes_peak", 0), self.slot_bytes_in_use())
        self.counts["slot_bytes_peak"] = peak

    def load(self, cell, tier, passing=False):
        """Starts to load for a request where there is a slot."""
        if not self.make_room(cell, tier, passing):
            return False
        self.reads[cell] = Read(tier, self.tick(), False, 0, QUEUED, passing)
        self.count_peak()
        return True

    def place(self, cell):
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

    def evict(self, cell):
        self.drop(cell)
        self.count("evictions")

    def drop(self, cell):
        self.count("prefetch_wasted", self.held[cell].unused)
        del self.held[cell]

    def load_wanted(self, cell):
        return self.load(cell, self.want[cell], cell in self.passing)

    def load_or_wait(self, cell):
        pool = self.layout.pool(cell, self.want[cell])
        queue = self.waiting.get(pool, ())
        if cell not in queue and (queue or not self.load_wanted(cell)):
            self.waiting[pool] = (*queue, cell)

    def serve(self, pool):
        """First come, first served."""
        while self.waiting.get(pool):
            cell = self.waiting[pool][0]
            idle = self.unmet(cell) and cell not in self.reads
            if idle and not self.load_wanted(cell):
                return
            self.waiting[pool] = self.waiting[pool][1:]

    # ---- the disk

    def turn_of(self, cell):
        """Demand first, by kind and along the file; then prefetches as they were listed."""
        read = self.reads[cell]
        if read.ahead:
            return (1, read.turn, 0, cell)
        rank = {GATE: 0, GATE_UP: 0, UP: 1, DOWN: 2}[cell[1]]
        return (0, rank, self.layout.offset(cell, read.tier), cell)

    def disk_steps(self):
        """What the disk may do next: end a running read, or begin the most urgent one."""
        running = [c for c, read in self.reads.items() if read.stage in (RUNNING, DOOMED)]
        queued = [c for c, read in self.reads.items() if read.stage == QUEUED]
        steps = [partial(Cache.arrive, cell=cell) for cell in running]
        if self.layout.device is not None:
            steps += [partial(Cache.begin_read, cell=cell) for cell in queued]
        elif queued and len(running) < self.layout.io_threads:
            first = min(queued, key=self.turn_of)
            steps.append(partial(Cache.begin_read, cell=first))
        return steps

    def begin_read(self, cell):
        if self.layout.device is None and not self.place(cell):
            self.cancel(cell)
            return
        read = self.reads[cell]
        self.reads[cell] = read._replace(stage=RUNNING)
        if self.layout.device is not None:
            return
        bytes_read = self.layout.expert_bytes[read.tier]
        self.count_phase("prefetch_bytes" if read.ahead else "demand_bytes", bytes_read)

    def arrive(self, cell):
        if self.reads[cell].stage == DOOMED or not self.place(cell):
            self.throw_away(cell)
            return
        self.reads[cell] = self.reads[cell]._replace(stage=ARRIVED)
        if not self.pinned(cell) or not self.good_enough(cell):
            self.publish(cell)  # else an op may be reading the copy that it would replace

    def publish(self, cell):
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
        if read.beyond:
            self.fit(self.layout.pool(cell, read.tier))

    def cancel(self, cell):
        read = self.reads.pop(cell)
        self.count("prefetch_cancelled", read.ahead)
        self.serve(self.layout.pool(cell, read.tier))

    def throw_away(self, cell):
        """A read that comes to nothing; who needs the cell begins again."""
        self.cancel(cell)
        if self.unmet(cell):
            self.load_or_wait(cell)

    # ---- requests

    def begin_step(self, phase):
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

    def apply(self, layer, tiers, passing=frozenset()):
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

    def touch(self, cell):
        if cell in self.reads:
            self.reads[cell] = self.reads[cell]._replace(stamp=self.tick(), passing=False)
        if cell in self.held:
            self.held[cell] = self.held[cell]._replace(stamp=self.tick(), passing=False)

    def ask(self, cell):
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

    def prefetch(self, items):
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

    def ready(self, layer, kind, experts):
        """Which of these may be computed now, and in which tier."""
        out = []
        for expert in experts:
            cell = (layer, kind, expert)
            if not self.pinned(cell):
                out.append((expert, SKIP))
            elif self.good_enough(cell):
                out.append((expert, self.held[cell].tier))
        return out

    def release(self, layer, kind, experts):
        for cell in [(layer, kind, expert) for expert in experts]:
            del self.want[cell]
            self.passing.discard(cell)
            if cell in self.reads and self.reads[cell].stage == ARRIVED:
                self.publish(cell)
        self.serve_kind(layer, kind)

    def serve_kind(self, layer, kind):
        for tier in range(self.layout.n_tiers):
            self.serve(self.layout.pool((layer, kind, 0), tier))


class Caches:
    """All states that agree with what was seen. Beyond max_states it gives up and is `lost`:
    what may be the case then depends on too much that nobody saw."""

    def __init__(self, layout, max_states):
        self.states = [Cache(layout)]
        self.max_states = max_states
        self.lost = False

    def _let_the_disk_run(self):
        """Any number of disk steps may have been taken since the last look."""
        found = {state.key(): state for state in self.states}
        todo = list(found.values())
        while todo and not self._give_up(len(found) // 10):
            state = todo.pop()
            for step in state.disk_steps():
                after = state.copy()
                step(after)
                if (key := after.key()) not in found:
                    found[key] = after
                    todo.append(after)
        self.states = list(found.values())

    def _give_up(self, n_states):
        self.lost = self.lost or n_states > self.max_states
        return self.lost

    def do(self, change):
        """One request, at some moment of the disk's work. change: returns the states that there may
        be then, or None for the one that it was given."""
        if not self.lost:
            self._let_the_disk_run()
            self.states = [each for state in self.states for each in change(state) or [state]]

    def keep(self, agrees):
        """Something was seen at some moment; False if no legal outcome shows it."""
        if not self.lost:
            self._let_the_disk_run()
        found = [state for state in self.states if agrees(state)]
        if found and not self.lost:
            self.states = found
            self._give_up(len(found))
        return bool(found) or self.lost

    def use(self, layer, kind, experts, visits):
        """An op computed these experts and met them in the order of visits: (expert, tier or SKIP).
        Takes what is ready, computes it, gives it back, waits for more; False if that cannot
        be."""
        done = {}
        seen = set()
        todo = [(state.copy(), 0, 0, False) for state in self.states]
        while todo and not self._give_up(len(seen) // 10):
            state, n_visited, n_taken, again = todo.pop()
            key = (state.key(), n_visited, n_taken, again)
            if key in seen:
                continue
            seen.add(key)
            for step in state.disk_steps():
                after = state.copy()
                step(after)
                todo.append((after, n_visited, n_taken, again))
            if n_taken:
                end = n_visited + n_taken
                state.release(layer, kind, [expert for expert, _ in visits[n_visited:end]])
                if end == len(visits):
                    done[state.key()] = state
                else:
                    todo.append((state, end, 0, True))
                continue
            gone = {expert for expert, _ in visits[:n_visited]}
            ready = state.ready(layer, kind, [e for e in experts if e not in gone])
            if not ready:  # it looks for slots once more, and waits
                state.serve_kind(layer, kind)
                todo.append((state, n_visited, 0, again))
            elif ready == visits[n_visited : n_visited + len(ready)]:
                after = state.copy()
                after.count("waves", again)
                for _, tier in ready:
                    if tier != SKIP:
                        after.count_phase(f"computed {tier}")
                todo.append((after, n_visited, len(ready), again))
        if done and not self.lost:
            self.states = list(done.values())
            self._give_up(len(done))
        return bool(done) or self.lost
