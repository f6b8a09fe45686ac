"""What a simulated store reads, and when: slots of prefetches, their order, whole experts, a rigid
link, transitions. By hand: gate and up of an expert take 1 us, down 2; one thread, no latency."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import decode, make_trace, over, random_trace

from gguf_tools.file.layout import DOWN, GATE, UP
from orchestrator.errors import NativeError
from orchestrator.events import ABSENT, Phase
from orchestrator.lab.replay.clock import Simulation
from orchestrator.lab.replay.simulate import Compute, Transport, simulate
from orchestrator.native import Store
from orchestrator.native.abi import CPrefetch

EXPERT = 16384  # bytes
US = 1_000


class Link:
    """A store of one layer of eight experts, and its clock."""

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
        """A step of one token that chooses two experts, or one of them twice."""
        self.store.begin_step(Phase.DECODE)
        ids = np.array([(experts * 2)[:2]], np.int32)
        none = np.zeros((0, 1, 2))
        self.clock.route(0, ids, np.full((1, 2), 0.5), np.zeros(1), none, none)
        self.chosen = np.unique(ids).astype(np.int32)

    def use(self, kind, expert_us=0):
        """Computes a kind; the clock then, in microseconds."""
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
    """Of nine matrices one is being read when the layer turns out to need what is there."""
    one = link(slots=2)
    one.route(0, 1)
    one.compute()
    one.prefetch(2, 3, 4)
    assert one.store.stats().evictions == 1
    one.route(1)
    one.compute()
    stats = one.store.stats()
    assert (stats.evictions, stats.prefetch_cancelled, stats.hits[Phase.DECODE]) == (1, 8, 3)


def test_asked_for_meanwhile_it_takes_a_slot(link):
    one = link(slots=2)
    one.route(0, 1)
    one.compute()
    one.prefetch(2, 3)
    one.route(3)
    assert one.store.stats().prefetch_used == 3
    assert one.use(GATE) == 8 + 2  # the gate of 2 was on its way
    one.use(UP)
    one.use(DOWN)
    assert 3 in one.resident()


def test_it_evicts_nothing_of_its_own_list(link):
    """The read of 3 starts long after the list was made."""
    one = link(slots=2)
    one.route(0, 1)
    one.compute()
    one.prefetch(2, 0, 3)
    one.clock.advance(100 * US)
    assert one.resident() == [0, 2]


@pytest.mark.parametrize(("whole", "gate_us"), [(False, 21), (True, 26)])
def test_whole_experts_are_waited_for(whole, gate_us, link):
    """Gates come at 1 and 2, ups at 3 and 4, downs at 6 and 8."""
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


BYTES_PER_S = 4096 * 10**6  # a kind of 4096 bytes takes 1 us
MS = 1_000_000
ALL_LOW = 8 * 3 * 12288  # slots of the made-up model; all high takes a third more


def planned(trace, budget, **options):
    return over(trace, "dynaexq", budget, "q2_k", 2, **({"transition_rate": 0} | options))


def test_the_rate_by_hand(library):
    """4096 bytes a millisecond, in bursts of one part: up at 0, gate at 1 ms, down, of 8192
    bytes, at 2 ms; published at the step boundary after that."""
    made = planned(decode([[0], [0], [0]]), 2 * ALL_LOW, hot_experts=1)
    with Store.create(library, made.spec) as store:
        clock = Simulation(store)
        store.warm([(layer, expert, 1) for layer in range(3) for expert in range(8)])
        clock.set_speed(BYTES_PER_S, 0)
        store.set_transition_rate(4096 * 1000)
        store.begin_step(Phase.DECODE)
        start = clock.now_ns
        assert store.transition([(1, 4, 0)]) == 1

        def landed_at(ns):
            clock.advance(start + ns - clock.now_ns)
            store.check()
            assert [each[1, 4] for each in store.states()] == [1, 0]
            return bool(store.landed()[1, 4])

        assert not landed_at(0)
        assert store.stats().transition_bytes == 4096
        assert not landed_at(MS - 1)
        assert store.stats().transition_bytes == 4096
        assert not landed_at(MS)
        assert store.stats().transition_bytes == 8192
        assert not landed_at(2 * MS + 2 * US - 1)
        assert landed_at(2 * MS + 2 * US)
        assert store.resident()[1, 4] == 1
        store.begin_step(Phase.DECODE)
        assert [each[1, 4] for each in store.states()] == [0, 0]
        assert store.stats().transition_bytes == 16384


@pytest.mark.parametrize("share", [0.1, 0.25])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), disk=st.sampled_from([(1, 0), (2, 300)]))
def test_no_step_takes_longer_than_its_computing(library, share, seed, disk):
    trace = random_trace(np.random.default_rng(seed), n_steps=60)
    made = planned(trace, int(ALL_LOW * (1 + share)), update_steps=2)
    assert 0 < made.policy.capacity.min() < 8
    speed = Transport(10**8, disk[1], disk[0])
    outcome = simulate(library, trace, made, speed, Compute(50.0, 50.0))
    stats = outcome.stats
    assert list(stats.wait_us) == list(stats.demand_bytes) == [0, 0]
    assert list(stats.hits) == list(stats.requests)
    assert stats.slot_bytes_peak <= stats.budget_bytes
    whole = [step.n_tokens * 50 for step in trace.steps()]
    np.testing.assert_allclose(outcome.step_us, whole, atol=0.1)


def test_the_same_twice_and_never_sooner_on_a_slower_disk(library):
    """What is learned depends on the trace alone; when it is published, on the disk too."""
    trace = random_trace(np.random.default_rng(4), n_steps=300)
    found = []
    for bandwidth in (10**9, 10**9, 2 * 10**7):
        made = planned(trace, int(ALL_LOW * 1.2), update_steps=4)
        outcome = simulate(library, trace, made, Transport(bandwidth, 50, 2), Compute(100.0, 100.0))
        stats = outcome.stats
        routed = list(stats.routed[Phase.DECODE])
        found.append((made.policy.hotness, stats.experts_promoted, routed[0]))
        assert stats.experts_promoted > 0
        assert stats.transitions_rejected == 0
    for hotness, _, _ in found[1:]:
        np.testing.assert_array_equal(hotness, found[0][0])
    assert found[0][1:] == found[1][1:]
    assert found[2][1] <= found[0][1]


def test_a_new_topic(library):
    """Two texts with disjoint experts: the hot set follows, and the share of high comes back."""
    rng = np.random.default_rng(0)

    def text(first):
        return [
            (
                Phase.DECODE,
                [first + rng.choice(4, 2, replace=False).reshape(1, 2) for _ in range(3)],
            )
            for _ in range(400)
        ]

    shares = []
    for steps in (text(0), text(0) + text(4)):
        trace = make_trace(steps)
        made = planned(trace, 2 * ALL_LOW, hot_experts=4, update_steps=8)
        outcome = simulate(library, trace, made, Transport(10**9, 50, 2), Compute(100.0, 100.0))
        shares.append(outcome.stats.routed[Phase.DECODE][0] / (len(steps) * 6))
    assert shares[0] == 1.0  # the first four are high from the start
    assert 0.85 < shares[1] < 1.0
