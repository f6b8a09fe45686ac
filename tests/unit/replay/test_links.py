"""Reads of a simulated store in time order: slots of prefetches, whole experts, a rigid link.

By hand: gate and up of an expert take 1 us, down 2 us, with one thread and no latency.
"""

from dataclasses import replace

import numpy as np
import pytest
from traces import decode, over

from gguf_tools.file.layout import DOWN, GATE, UP
from orchestrator.errors import NativeError
from orchestrator.events import ABSENT, Phase
from orchestrator.lab.replay.simulate import Simulation
from orchestrator.native import Store
from orchestrator.native.abi import CPrefetch

EXPERT = 16384  # bytes
US = 1000


class Link:
    """A store with one layer of eight experts, and its simulated clock."""

    def __init__(self, library, slots, **flags):
        spec = over(decode([[0]]), "lru", slots * EXPERT).spec
        spec = replace(spec, n_io_threads=1, n_expert_used=2, max_tokens=2, **flags)
        self.store = Store.create(library, spec)
        self.clock = Simulation(self.store)
        self.clock.set_speed(4096 * 10**6, 0)
        self.library = library
        self.chosen = np.zeros(0, np.int32)

    def prefetch(self, *experts):
        items = (CPrefetch * len(experts))(*[(0, expert, 0, 0, 0) for expert in experts])
        self.library.prefetch(self.store.handle, items, len(experts))

    def route(self, *experts):
        """Begin a step of one token that chooses two experts, or one of them twice."""
        self.store.begin_step(Phase.DECODE)
        ids = np.array([(experts * 2)[:2]], np.int32)
        none = np.zeros((0, 1, 2))
        self.clock.route(0, ids, np.full((1, 2), 0.5), np.zeros(1), none, none)
        self.chosen = np.unique(ids).astype(np.int32)

    def use(self, kind, expert_us=0):
        """Compute a kind. Returns the time after it, in microseconds."""
        self.clock.use(0, kind, self.chosen, expert_us * US)
        self.store.check()
        return self.clock.now_ns / US

    def compute(self):
        for kind in (GATE, UP, DOWN):
            self.use(kind)

    def resident(self):
        return np.flatnonzero(self.store.resident()[0] != ABSENT).tolist()


@pytest.fixture
def link(library):
    made: list[Link] = []

    def make(slots=8, **flags):
        made.append(Link(library, slots, **flags))
        return made[-1]

    yield make
    for each in made:
        each.store.close()


def test_a_prefetch_evicts_when_its_read_starts(link):
    """Prefetches evict only when their read starts. One of nine matrices is being read when the
    layer needs the resident expert instead."""
    one = link(slots=2)
    one.route(0, 1)
    one.compute()
    one.prefetch(2, 3, 4)
    assert one.store.stats().evictions == 1
    one.route(1)
    one.compute()
    stats = one.store.stats()
    assert (stats.evictions, stats.prefetch_cancelled, stats.hits[Phase.DECODE]) == (1, 8, 3)


def test_a_requested_prefetch_takes_a_slot(link):
    one = link(slots=2)
    one.route(0, 1)
    one.compute()
    one.prefetch(2, 3)
    one.route(3)
    assert one.store.stats().prefetch_used == 3
    assert one.use(GATE) == 8 + 2  # the gate of 2 was already being read
    one.use(UP)
    one.use(DOWN)
    assert 3 in one.resident()


def test_a_prefetch_evicts_no_expert_of_its_own_list(link):
    """A prefetch does not evict a resident expert of the same request, even if its read starts long
    after it."""
    one = link(slots=2)
    one.route(0, 1)
    one.compute()
    one.prefetch(2, 0, 3)
    one.clock.advance(100 * US)
    assert one.resident() == [0, 2]


@pytest.mark.parametrize(("whole", "gate_us"), [(False, 21), (True, 26)])
def test_whole_experts_are_waited_for(whole, gate_us, link):
    """With whole_experts, an expert is computed only after its last matrix. Gates arrive at 1 and 2
    us, ups at 3 and 4, downs at 6 and 8."""
    one = link(whole_experts=whole)
    one.route(0, 1)
    assert one.use(GATE, 10) == gate_us
    one.use(UP)
    one.use(DOWN)


def test_a_rigid_link_reads_in_order_and_takes_nothing_back(link):
    for rigid, gate_us in ((False, 2), (True, 5)):
        one = link(rigid=rigid)
        one.prefetch(2)
        one.route(3)
        assert one.use(GATE) == gate_us
        one.use(UP)
        one.use(DOWN)
        assert one.store.stats().prefetch_cancelled == (0 if rigid else 2)
        assert one.resident() == ([2, 3] if rigid else [3])


def test_only_a_simulated_link_is_rigid(library):
    spec = replace(over(decode([[0]]), "lru", EXPERT).spec, simulated=False, rigid=True)
    with pytest.raises(NativeError, match="only a simulated link is rigid"):
        Store.create(library, spec)
