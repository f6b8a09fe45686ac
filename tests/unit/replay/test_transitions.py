"""Transitions in simulated time: the rate by hand, and dynaexq on a trace."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import decode, make_trace, over, random_trace

from orchestrator.events import Phase
from orchestrator.lab.replay.simulate import Compute, Simulation, Transport, simulate
from orchestrator.native import Store
from orchestrator.policy.dynaexq import DynaExq

BYTES_PER_S = 4096 * 10**6  # a matrix of 4096 bytes takes 1 us
US, MS = 1_000, 1_000_000
ALL_LOW = 8 * 3 * 12288  # low slots of the invented model; all experts in high take a third more


def planned(trace, budget, **options):
    return over(trace, "dynaexq", budget, "q2_k", 2, **({"transition_rate": 0} | options))


def test_the_rate_by_hand(library):
    """At 4096 bytes per millisecond, the up matrix is read at 0, gate at 1 ms, and down with 8192
    bytes at 2 ms. The new version is used from the next step on."""
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
    assert isinstance(made.policy, DynaExq)
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
    """Learned hotness depends only on the trace. The time of promotions also depends on the
    disk."""
    trace = random_trace(np.random.default_rng(4), n_steps=300)
    found = []
    for bandwidth in (10**9, 10**9, 2 * 10**7):
        made = planned(trace, int(ALL_LOW * 1.2), update_steps=4)
        outcome = simulate(library, trace, made, Transport(bandwidth, 50, 2), Compute(100.0, 100.0))
        assert isinstance(made.policy, DynaExq)
        stats = outcome.stats
        routed = list(stats.routed[Phase.DECODE])
        found.append((made.policy.learned().hotness, stats.experts_promoted, routed[0]))
        assert stats.experts_promoted > 0
        assert stats.transitions_rejected == 0
    for hotness, _, _ in found[1:]:
        np.testing.assert_array_equal(hotness, found[0][0])
    assert found[0][1:] == found[1][1:]
    assert found[2][1] <= found[0][1]


def test_a_new_topic(library):
    """After a change to a text with other experts, the hot set follows, and the share of high
    recovers."""
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
    assert shares[0] == 1.0  # the first four experts are high from the start
    assert 0.85 < shares[1] < 1.0
