"""Reference model of the expert cache in plain Python: a second, short implementation of its rules.

Rules (DyMoE 4.4.2): a cache entry, one (layer, kind, expert), holds one tier. A request for a
better tier than it holds is a miss: it loads that tier and then drops the old copy. A request for
the same or a worse tier is a hit.

Other rules: the first request gets the next free slot of a pool. If no slot is free, the pool
evicts the least recently requested copy that the running step does not need. A prefetch takes its
slot when its read starts (on a device: when its bytes are in host memory), or as soon as its expert
is requested. If there is no slot, the prefetch is dropped. A limit keeps the first slots of each
pool and evicts the least recently requested copies. A read into a slot above the limit still
completes. Then its copy, or one that was requested earlier, is evicted.

The disk runs in parallel with the requests, so one history of requests has several legal outcomes.
A `Cache` is one of them. `Caches` is the set of all outcomes that agree with the observations. It
becomes empty as soon as the real store does something that no legal outcome allows.
"""

from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import NamedTuple

SKIP = 255
ABSENT = 254
UP, GATE, GATE_UP, DOWN = range(4)
GRAPH_ORDER = (GATE, GATE_UP, UP, DOWN)  # order in which a layer computes its kinds

Cell = tuple[int, int, int]  # layer, kind, expert
Pool = tuple[int, int, int]  # layer (-1: all layers share it), kind, tier


@dataclass(frozen=True)
class Layout:
    """The constants of a store. Bytes and counts are those given to the store."""

    kinds: tuple[tuple[int, ...], ...]  # in each layer, ascending
    n_expert: int
    n_tiers: int
    shared: bool  # layers share slots
    n_slots: tuple[int, ...]  # [tier] of each pool; in a mixed pool, the first tier
    slot_bytes: tuple[int, ...]  # [tier]
    expert_bytes: tuple[int, ...]  # [tier]
    offsets: dict[tuple[int, int, int], int]  # (layer, kind, tier) of expert 0 in the file
    io_threads: int
    n_passing: int = 1  # slots of a pool that streaming reads may take from other reads
    exact_tiers: bool = False  # to measure quality: requests drop better copies
    # Slots are on a device, with a cache of slices in host memory. Slices in that cache skip the
    # disk queue, so any queued load may be the next one, and a load may read no bytes.
    device: str | None = None
    host_bytes: int = 0
    mixed: bool = False  # tiers share slots

    def computed(self, layer):
        """Return the kinds of a layer in the order in which the layer computes them."""
        return tuple(kind for kind in GRAPH_ORDER if kind in self.kinds[layer])

    def pool(self, cell, tier):
        return (-1 if self.shared else cell[0], cell[1], 0 if self.mixed else tier)

    def offset(self, cell, tier):
        return self.offsets[cell[0], cell[1], tier] + cell[2] * self.expert_bytes[tier]

    @cached_property
    def pools(self):
        """All pools, in the order in which the store gets them."""
        tiers = range(self.n_tiers)
        cells = [(at, k, 0) for at, kinds in enumerate(self.kinds) for k in kinds]
        return tuple(dict.fromkeys(self.pool(cell, tier) for cell in cells for tier in tiers))

    def within(self, n_bytes):
        """Return the number of slots that a limit of n_bytes leaves in each pool.

        The slots of a pool are placed at even distances among those of the other pools. The limit
        cuts this sequence at one position.
        """
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
    stamp: int  # time of the last request
    unused: bool  # prefetched, and not requested yet
    passing: bool  # read only for streaming requests: evicted before all others


class Read(NamedTuple):
    """A tier that is being read from disk.

    placed: it has a slot. kept: the entries that this prefetch does not evict: those in its own
    list or in a later one.
    """

    tier: int
    stamp: int
    ahead: bool  # a prefetch
    turn: int  # among prefetches
    stage: int  # one of the stages below; the bytes of a doomed read are thrown away
    passing: bool
    placed: bool = True
    kept: frozenset[Cell] = frozenset()
    beyond: bool = False  # its slot is above the limit


QUEUED, RUNNING, DOOMED, ARRIVED = range(4)


@dataclass
class Cache:
    """One state of the cache. Methods change it; the caller copies first."""

    layout: Layout
    held: dict[Cell, Copy] = field(default_factory=dict)
    reads: dict[Cell, Read] = field(default_factory=dict)
    want: dict[Cell, int] = field(default_factory=dict)  # tier that the step needs, or SKIP
    waiting: dict[Pool, tuple[Cell, ...]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    passing: set[Cell] = field(default_factory=set)  # entries with only streaming requests
    limits: dict[Pool, int] = field(default_factory=dict)  # current number of slots of each pool
    phase: int = 0
    clock: int = 0
    turn: int = 0

    def copy(self):
        dicts = map(dict, (self.held, self.reads, self.want, self.waiting, self.counts))
        copied = Cache(self.layout, *dicts, set(self.passing), self.limits)
        copied.phase, copied.clock, copied.turn = self.phase, self.clock, self.turn
        return copied

    def key(self):
        """Equal for states that behave the same from now on. Only the order of stamps counts."""
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

    def pinned(self, cell):
        return self.want.get(cell, SKIP) != SKIP

    def good_enough(self, cell):
        """Conservative reuse: the requested tier or any better one satisfies the request."""
        return cell in self.held and self.held[cell].tier <= self.want[cell]

    def unmet(self, cell):
        return self.pinned(cell) and not self.good_enough(cell)

    def resident(self):
        """[layer][expert]: the worst tier of its kinds, or ABSENT if a kind is missing."""
        table = []
        for layer, kinds in enumerate(self.layout.kinds):
            row = []
            for expert in range(self.layout.n_expert):
                cells = [(layer, kind, expert) for kind in kinds]
                whole = all(cell in self.held for cell in cells)
                row.append(max(self.held[cell].tier for cell in cells) if whole else ABSENT)
            table.append(row)
        return table

    def slot_bytes_in_use(self):
        tiers = [copy.tier for copy in self.held.values()]
        tiers += [read.tier for read in self.reads.values() if read.placed]
        return sum(self.layout.slot_bytes[tier] for tier in tiers)

    def make_room(self, cell, tier, passing, kept=(), ahead=False):
        """Return whether the pool has a free slot, after an eviction if necessary.

        Copies of `kept` entries are not evicted. ahead: the slot is for a prefetch.
        """
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
                # copies that the step needs in a better tier, and therefore reads again anyway
                idle = [(True, self.held[c].stamp, c) for c in copies if self.unmet(c)]
            if not idle:
                return False
            self.evict(min(idle)[2])
        return True

    def of_pool(self, pool):
        """Return the contents of a pool.

        These are its copies, the reads into kept slots, the reads into slots above the limit, and
        the number of kept slots.
        """
        of, n_slots = self.layout.pool, self.limits.get(pool, self.layout.n_slots[pool[2]])
        copies = [c for c, copy in self.held.items() if of(c, copy.tier) == pool]
        reads = [(c, r) for c, r in self.reads.items() if r.placed and of(c, r.tier) == pool]
        loads, going = ([c for c, r in reads if r.beyond == goes] for goes in (False, True))
        return copies, loads, going, n_slots

    def fit(self, pool):
        """Evict the copies that exceed a pool's limit."""
        copies, loads, _, n_slots = self.of_pool(pool)
        order = sorted(copies, key=lambda c: (not self.held[c].passing, self.held[c].stamp))
        for cell in order[: max(0, len(copies) + len(loads) - n_slots)]:
            self.evict(cell)

    def limit(self, n_bytes):
        """Set a limit between two steps, when no entry is needed.

        Return one state for each possible case.

        The test cannot observe which of the running reads have a slot above the limit.
        """
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
        """Return whether a pool has enough slots for its reads on both sides of the limit."""
        _, loads, going, n_slots = self.of_pool(pool)
        return len(loads) <= n_slots and len(going) <= self.layout.n_slots[pool[2]] - n_slots

    def settled(self):
        """Return whether no slot above the limit is in use."""
        return not any(read.beyond for read in self.reads.values())

    def count_peak(self):
        peak = max(self.counts.get("slot_bytes_peak", 0), self.slot_bytes_in_use())
        self.counts["slot_bytes_peak"] = peak

    def load(self, cell, tier, passing=False):
        """Start to load an entry for a request. Return whether there was a slot."""
        if not self.make_room(cell, tier, passing):
            return False
        self.reads[cell] = Read(tier, self.tick(), False, 0, QUEUED, passing)
        self.count_peak()
        return True

    def place(self, cell):
        """Find a slot for a read without one.

        A request waits until earlier waiting requests have a slot.
        """
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
        """Give free slots to the waiting requests, in the order of the requests."""
        while self.waiting.get(pool):
            cell = self.waiting[pool][0]
            idle = self.unmet(cell) and cell not in self.reads
            if idle and not self.load_wanted(cell):
                return
            self.waiting[pool] = self.waiting[pool][1:]

    def turn_of(self, cell):
        """Return the sort key of a read.

        Requests come first, by kind and file offset, then prefetches in the order of their list.
        """
        read = self.reads[cell]
        if read.ahead:
            return (1, read.turn, 0, cell)
        rank = {GATE: 0, GATE_UP: 0, UP: 1, DOWN: 2}[cell[1]]
        return (0, rank, self.layout.offset(cell, read.tier), cell)

    def disk_steps(self):
        """Return the possible next steps of the disk.

        A running read ends, or the most urgent read begins.
        """
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
            self.discard(cell)
            return
        self.reads[cell] = self.reads[cell]._replace(stage=ARRIVED)
        if not self.pinned(cell) or not self.good_enough(cell):
            self.publish(cell)  # otherwise an op may be reading the copy that would be replaced

    def publish(self, cell):
        """Replace the old copy by the new one: an entry never has two copies."""
        read, old = self.reads.pop(cell), self.held.get(cell)
        if old is not None:
            self.count("promotions", read.tier < old.tier)
            self.drop(cell)
        unused = read.ahead and not self.pinned(cell)
        self.held[cell] = Copy(read.tier, read.stamp, unused, read.passing)
        if self.unmet(cell):
            self.load_or_wait(cell)  # a better tier was requested during this read
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

    def discard(self, cell):
        """Discard a read. If the step needs the entry, load it again."""
        self.cancel(cell)
        if self.unmet(cell):
            self.load_or_wait(cell)

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
        """Request experts. tiers: the tier for each routed expert, in the order of the routing."""
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
        """Queue prefetches, the most urgent one first.

        Resident entries in the list are not evicted for the others.
        """
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
        """Return the experts that can be computed now, as (expert, tier) pairs."""
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
    """All states that agree with the observations.

    Above max_states the set gives up and is `lost`: the possible states then depend on too many
    unobserved events.
    """

    def __init__(self, layout, max_states):
        self.states = [Cache(layout)]
        self.max_states = max_states
        self.lost = False

    def _advance_disk(self):
        """Add all states that the disk can have reached since the last observation."""
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
        """Apply one request, at an unknown moment of the disk's work.

        change: returns the states that can follow, or None if it changed the given state in place.
        """
        if not self.lost:
            self._advance_disk()
            self.states = [each for state in self.states for each in change(state) or [state]]

    def keep(self, agrees):
        """Keep the states that agree with an observation. Return False if there is none."""
        if not self.lost:
            self._advance_disk()
        found = [state for state in self.states if agrees(state)]
        if found and not self.lost:
            self.states = found
            self._give_up(len(found))
        return bool(found) or self.lost

    def use(self, layer, kind, experts, visits):
        """Replay an op that computed these experts.

        visits: (expert, tier or SKIP) in the order of the op. The op takes the experts that are
        ready, computes and releases them, and waits for more. Return False if no legal outcome
        allows these visits.
        """
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
            if not ready:  # the op looks for slots once more, and waits
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
