"""Simulated time compared with examples by hand, determinism, and refusals.

One layer with one expert per token: gate and up have 4096 bytes, down 8192. At 4096 bytes per
microsecond they take 1, 1 and 2 us. A token computes 12 us in a layer: 2 for each matrix, then 6
for the work between the experts and the next route event.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import EXPERT_BYTES, decode, make_trace, over, random_trace

from gguf_tools.file.layout import DOWN, GATE, UP
from orchestrator.allocation.slots import Rules
from orchestrator.errors import BudgetError, ConfigError, MoeEdgeError, TraceError
from orchestrator.events import ABSENT, Phase
from orchestrator.lab.replay import ReplayOptions, render, replay
from orchestrator.lab.replay.simulate import (
    Compute,
    Simulation,
    Transport,
    simulate,
)
from orchestrator.native import MAX_TIERS, Store

ALL = 24 * 16384
BYTES_PER_S = 4096 * 10**6


def planned(trace, policy="lru", n_ahead=0, budget=ALL):
    return over(trace, policy, budget, retention=1.0, n_ahead=n_ahead)


def played(library, trace, speed, us, **more):
    made = planned(trace, **more)
    made = replace(made, spec=replace(made.spec, n_io_threads=speed.threads))
    return simulate(library, trace, made, speed, Compute(us, us))


# (steps, (latency, threads), us per token; us of each step, us waited, hits).
BY_HAND = {
    # gate 0..11, up 11..22, down 22..34; computing ends at 13, 24, 36, then 6 more.
    "one thread": ([[[0]], [[0]]], (10, 1), 12.0, [42.0, 12.0], 11 + 9 + 10, 3),
    # gate 0..11, up waits for the channel: 0..12, down 11..23; computing ends at 13, 15, 25.
    "two threads overlap their latency": ([[[0]]], (10, 2), 12.0, [31.0], 11 + 8, 0),
    # Without latency, more threads gain nothing: 0..1, 1..2, 2..4; computing ends at 3, 5, 7.
    "bandwidth of one thread": ([[[0]]], (0, 1), 12.0, [13.0], 1, 0),
    "bandwidth is shared": ([[[0]]], (0, 3), 12.0, [13.0], 1, 0),
    # Six reads from 0 on: gates done at 1, 2, ups at 3, 4, downs at 6, 8. The second step computes
    # 24 us for two experts: the missing one arrives while the resident one is computed.
    "hits compute meanwhile": ([[[0, 1]], [[0, 2]]], (0, 1), 24.0, [25.0, 24.0], 1, 3),
}


@pytest.mark.parametrize("case", BY_HAND.values(), ids=BY_HAND)
def test_times_by_hand(library, case):
    steps, (latency_us, threads), us, step_us, waited_us, hits = case
    speed = Transport(BYTES_PER_S, latency_us, threads)
    outcome = played(library, decode(*steps), speed, us)
    assert outcome.step_us.tolist() == step_us
    stats = outcome.stats
    assert (stats.wait_us[Phase.DECODE], stats.hits[Phase.DECODE]) == (waited_us, hits)


def test_a_read_is_counted(library):
    stats = played(library, decode([[0]], [[0]]), Transport(BYTES_PER_S, 10, 1), 12.0).stats
    assert stats.read_us == 11 + 11 + 12 and stats.requests[Phase.DECODE] == 6
    assert stats.demand_bytes[Phase.DECODE] == sum(EXPERT_BYTES.values())


def test_a_policy_sees_which_matrices_are_missing(library):
    """Gates are prefetched, so the second layer sees experts with only the gate resident. An expert
    is absent exactly if one of its matrices is missing."""
    trace = random_trace(np.random.default_rng(5), n_steps=30)
    made = over(trace, "firm", ALL // 4, prefetch="on", n_ahead=1, prefetch_kinds=1, agree="rank")
    policy, seen = made.policy, set[int]()
    decide = policy.decide

    def look(event, view, out):
        decide(event, view, out)
        missing = np.array([row.tolist() for row in view.missing])
        assert ((view.resident_array == ABSENT) == (missing > 0)).all()
        seen.update(missing.ravel().tolist())

    policy.decide = look
    simulate(library, trace, made, Transport(BYTES_PER_S, 1, 1), Compute(12.0, 12.0))
    nothing, but_gate = 0, 1 << UP | 1 << DOWN
    assert {nothing, but_gate, but_gate | 1 << GATE} <= seen
    assert all(bits & ~(but_gate | 1 << GATE) == 0 for bits in seen)


def test_prefetch_uses_the_idle_disk(library):
    """A prefetch is read while the disk is idle: layer 0 at 0..4 us, and layer 1 at 4..8 us, long
    before its route event at 13 us."""
    right = [np.array([[[5]]]), np.zeros((0, 1, 1))]
    ids = [np.array([[0]]), np.array([[5]])]
    trace = make_trace([(Phase.DECODE, ids)], [right])
    speed = Transport(BYTES_PER_S, 0, 1)
    with_it = played(library, trace, speed, 24.0, policy="dymoe", n_ahead=1)
    assert with_it.step_us.tolist() == [25.0]
    assert with_it.stats.hits[Phase.DECODE] == 3
    assert with_it.stats.prefetch_used == 3
    assert with_it.stats.prefetch_bytes[Phase.DECODE] == 16384
    without = played(library, trace, speed, 24.0, policy="dymoe")
    assert without.step_us.tolist() == [26.0]
    assert without.stats.hits[Phase.DECODE] == 0


def test_a_late_prefetch_is_waited_for_and_no_hit(library):
    """At a quarter of the speed, layer 0 is read at 0..16 us and layer 1 from 16 us on, so its
    prefetch is late."""
    right = [np.array([[[5]]]), np.zeros((0, 1, 1))]
    ids = [np.array([[0]]), np.array([[5]])]
    trace = make_trace([(Phase.DECODE, ids)], [right])
    outcome = played(
        library, trace, Transport(BYTES_PER_S // 4, 0, 1), 24.0, policy="dymoe", n_ahead=1
    )
    # Layer 0 computes until 6, 10, 18, and layer 1 routes at 24. Its prefetch: gate 16..20, up
    # 20..24, down 24..32.
    assert outcome.stats.hits[Phase.DECODE] == 2
    assert outcome.step_us.tolist() == [40.0]


def test_layers_share_a_step_by_their_tokens(library):
    """The compute time of a step is divided by tokens. The last layer of a prompt gets one of three
    tokens: 36 us and 12 us, together 3 x 16."""
    ids = [np.array([[0], [1], [2]]), np.array([[5]])]
    trace = make_trace([(Phase.PREFILL, ids)])
    outcome = played(library, trace, Transport(0, 0, 1), 16.0)
    assert outcome.step_us.tolist() == [48.0]


def test_a_skipped_expert_costs_nothing(library):
    trace = decode([[0, 1]], [[0, 1]])
    made = over(trace, "dymoe", ALL, "skip", retention=0.5, n_ahead=0)
    outcome = simulate(library, trace, made, Transport(0, 0, 1), Compute(24.0, 24.0))
    assert outcome.step_us.tolist() == [18.0, 18.0]
    assert list(outcome.stats.routed[Phase.DECODE]) == [2, *(MAX_TIERS - 1) * [0], 2]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(1, 0), (2, 30), (8, 100)]),
    st.sampled_from([None, "q2_k", "skip"]),
    st.integers(6, 20),
)
def test_every_invariant_holds_at_every_event(library, seed, disk, low, n_experts):
    """The store's own check passes after each event, with prefetches, promotions, skips and
    waves."""
    trace = random_trace(np.random.default_rng(seed))
    retention = 1.0 if low is None else 0.5
    made = over(trace, "dymoe", n_experts * 16384, low, disk[0], retention=retention, prefetch="on")
    with Store.create(library, made.spec) as store:

        def route(event):
            store.check()
            made.policy.decide(event, store.view, store.decision)
            store.apply(store.decision)

        store.set_route(route)
        clock = Simulation(store)
        clock.set_speed(10**8, disk[1])
        for step in trace.steps():
            store.begin_step(step.phase)
            for e in step.events:
                seen = e.ahead_ids, e.ahead_scores, e.importance, e.sequences, e.phases
                clock.route(e.layer, e.ids, e.weights, e.tokens, *seen)
                experts = np.unique(e.ids).astype(np.int32)
                for kind in EXPERT_BYTES:
                    before = clock.now_ns
                    clock.use(e.layer, kind, experts, 1000)
                    store.check()
                    assert clock.now_ns > before
        clock.advance(10**12)
        store.check()
        stats = store.stats()
    assert stats.slot_bytes_peak <= stats.budget_bytes
    assert sum(stats.routed[Phase.DECODE]) == 11 * 3 * 2


def test_events_compute_as_long_as_they_did(library):
    """Replay uses the recorded time without waiting: events of 50 us with 20 us of waiting, 70 us
    and 900 us."""
    trace = decode([[0]], [[0]], [[0]])
    trace.arrays["event_ns"][:] = 50_000, 70_000, 900_000
    trace.arrays["event_wait_us"][:] = 20, 0, 0
    experts_only = Compute(None, None, (0.0, 0.0))
    outcome = simulate(library, trace, planned(trace), Transport(0, 10, 1), experts_only)
    # Reads of 10 us, one at a time. Only the first is late.
    np.testing.assert_allclose(outcome.step_us, [40.0, 70.0, 900.0], atol=0.01)
    for dense in (0.0, 0.7, 1.0):
        time = Compute(None, None, (0.0, dense))
        instant = simulate(library, trace, planned(trace), Transport(0, 0, 1), time)
        np.testing.assert_allclose(instant.step_us, [30.0, 70.0, 900.0], atol=0.01)


def test_skipped_experts_have_no_compute_time(library):
    """If the recorded run skipped half of its experts, the other half took the recorded time."""
    trace = decode([[0, 1]], [[0, 1]], policy="dymoe", rules=Rules(skip=True))
    trace.arrays["event_computed"][:] = 1
    made = over(trace, "dymoe", ALL, "skip", retention=0.5, n_ahead=0)
    outcome = simulate(library, trace, made, Transport(0, 0, 1), Compute(None, None))
    np.testing.assert_allclose(outcome.step_us, [100.0, 100.0], atol=0.01)
    trace.arrays["event_computed"][:] = 0  # all recorded time was outside the experts
    outcome = simulate(library, trace, made, Transport(0, 0, 1), Compute(None, None))
    assert (outcome.step_us >= 100.0).all()


def test_report(library):
    trace = random_trace(np.random.default_rng(2), n_steps=30)
    options = ReplayOptions(policy="dymoe", expert_ram=9 * 16384, latency_us=20, compute_ms=0.2)
    result = replay(library, trace, options)
    assert (result["prefill_tokens"], result["decode_tokens"]) == (3, 29)
    assert set(result["runs"]) == {"dymoe", "lru"}
    lru = result["runs"]["lru"]
    assert result["belady"]["decode"]["hits"] >= lru["decode"]["hits"] > 0
    assert result["bound"]["tpot_ms_mean"] <= lru["tpot_ms_mean"]
    assert lru["tpot_ms_p50"] <= lru["tpot_ms_p99"]
    assert lru["tpot_ms_mean"] >= 0.2 and lru["ttft_ms"] > 0
    waits = sum(lru[phase]["wait_ms"] for phase in ("prefill", "decode"))
    total = lru["ttft_ms"] + 29 * lru["tpot_ms_mean"]
    assert result["compute_ms"]["decode_token"] == pytest.approx(0.2)
    computed = 3 * result["compute_ms"]["prefill_token"] + 29 * 0.2
    assert total == pytest.approx(computed + waits, abs=0.001 * 30)
    text = render(result)
    for part in ("dymoe", "lru", "Belady", "bound", "recorded", "TPOT"):
        assert part in text
    for name in ("tpot_ms_p50", "tpot_ms_mean", "tpot_ms_p99"):
        result["runs"]["lru"][name] = 123456789.0  # as slow as a disk may be set by --bandwidth
    assert render(result).count(" 123457 s") == 3


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"policy": "plain"}, ConfigError, "--policy plain cannot be replayed"),
        ({"policy": "other"}, MoeEdgeError, "unknown policy 'other'; known: lru, dymoe"),
        (
            {"expert_ram": 4096},
            BudgetError,
            "--expert-ram 4 KiB is too small: the smallest that works",
        ),
        ({"high_tier": "q8_0"}, TraceError, "no tier q8_0: choose one of q4_k, q2_k"),
        ({"policy": "dymoe", "low_tier": "q4_k"}, TraceError, "q4_k must have fewer bits"),
        (
            {"policy": "dymoe", "settings": {"n_ahead": 2}},
            ConfigError,
            "predicts experts 1 layers ahead, not 2",
        ),
        (
            {"policy": "dymoe", "settings": {"retention": 0.5}},
            MoeEdgeError,
            "needs a second precision: add --low-tier q2_k (a lower precision of the recorded "
            "model)",
        ),
        (
            {"settings": {"n_ahead": 1}},
            ConfigError,
            "--n-ahead has no effect with --policy lru, which runs one precision",
        ),
    ],
)
def test_impossible_options_are_refused(library, options, error, said):
    trace = random_trace(np.random.default_rng(0))
    with pytest.raises(error) as caught:
        replay(library, trace, ReplayOptions(**options))
    assert said in str(caught.value)


def test_an_unknown_bandwidth_is_refused(library):
    trace = random_trace(np.random.default_rng(0))
    unknown = replace(trace, header=replace(trace.header, read_bytes_per_s=0))
    with pytest.raises(ConfigError, match="such as --bandwidth 2GB"):
        replay(library, unknown, ReplayOptions())
