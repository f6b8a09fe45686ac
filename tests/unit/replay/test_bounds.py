"""Belady's optimum equals the best of all caches on small traces, and is a bound for every
policy."""

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import decode, over, random_trace

from gguf_tools.file.layout import DOWN
from orchestrator.events import Phase
from orchestrator.lab.replay.figures import belady, fewest_misses
from orchestrator.lab.replay.simulate import Compute, Transport, simulate
from orchestrator.plan.footprint import model_shape
from orchestrator.policy.base import place
from orchestrator.policy.lru import LRU

EXPERT = 16384  # slot bytes of one expert with all kinds
SLOW = Transport(10**9, 20, 2)
COMPUTE = Compute(50.0, 50.0)


def optimum(trace, n_experts):
    """Belady's result with slots for n_experts, shared by all layers."""
    shape = model_shape(trace, (0,))
    return belady(trace, shape, place(LRU, shape, budget_bytes=n_experts * EXPERT).slots, 0)


def best_of_all(events, capacity):
    """The most hits of any cache: after each event, every subset of the known experts is tried."""
    states: dict[frozenset[tuple[int, int]], int] = {frozenset(): 0}
    for layer, ids in events:
        asked = {(layer, expert) for expert in ids}
        following: dict[frozenset[tuple[int, int]], int] = {}
        for kept, hits in states.items():
            gained = hits + len(kept & asked)
            everything = sorted(kept | asked)
            for n in range(min(capacity, len(everything)) + 1):
                for subset in combinations(everything, n):
                    state = frozenset(subset)
                    following[state] = max(following.get(state, 0), gained)
        states = following
    return max(states.values())


def test_belady_by_hand():
    """For experts 0 1 2 0 1 2 with two slots, one of the last three must miss. The optimum evicts
    the expert whose next use is last."""
    trace = decode(*[[[e]] for e in (0, 1, 2, 0, 1, 2)])
    found = optimum(trace, 2)
    assert found["requests"] == [0, 18]
    assert found["hits"] == [0, 3 * 2]
    assert found["miss_bytes"] == [0, 4 * EXPERT]
    assert optimum(trace, 3)["hits"] == [0, 3 * 3]
    assert optimum(trace, 1)["hits"] == [
        0,
        3 * 1,
    ]  # it keeps 0 and streams the others


def test_belady_counts_phases_separately():
    trace = random_trace(np.random.default_rng(0))
    found = optimum(trace, 24)
    distinct = sum(len(np.unique(event.ids)) for event in next(trace.steps()).events)
    assert found["requests"][Phase.PREFILL] == 3 * distinct
    assert found["hits"][Phase.PREFILL] == 0
    assert found["miss_bytes"][Phase.PREFILL] == distinct * EXPERT


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.sets(st.integers(0, 3), min_size=1, max_size=2)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 3),
)
def test_no_cache_does_better(events, capacity):
    arranged = [(layer, sorted(ids)) for layer, ids in events]
    found = fewest_misses([(Phase.DECODE, layer, ids) for layer, ids in arranged], capacity)
    assert sum(hits for *_, hits in found) == best_of_all(arranged, capacity)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 24), st.sampled_from(["lru", "dymoe"]))
def test_no_policy_does_better(library, seed, n_experts, policy):
    """With one precision, on demand and with the policy's own slots, no policy has more hits than
    Belady's optimum."""
    trace = random_trace(np.random.default_rng(seed))
    budget = max(n_experts, 6) * EXPERT
    made = over(trace, policy, budget, threads=2, retention=1.0, n_ahead=0)
    stats = simulate(library, trace, made, SLOW, COMPUTE).stats
    best = belady(trace, made.shape, made.slots, made.tiers[0])
    for phase in Phase:
        assert stats.requests[phase] == best["requests"][phase]
    assert sum(stats.hits) <= sum(best["hits"])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(6, 24))
def test_a_prefetching_policy_reads_no_less(library, seed, n_experts):
    """A policy with prefetch reads at least the optimum's bytes, and takes at least the time of the
    bound."""
    trace = random_trace(np.random.default_rng(seed))
    made = over(trace, "dymoe", n_experts * EXPERT, threads=2, retention=1.0, n_ahead=1)
    outcome = simulate(library, trace, made, SLOW, COMPUTE)
    best = belady(trace, made.shape, made.slots, made.tiers[0])
    stats = outcome.stats
    read = sum(stats.demand_bytes) + sum(stats.prefetch_bytes)
    assert read >= sum(best["miss_bytes"])
    tokens = int(trace.arrays["step_tokens"].sum())
    least = max(50.0 * tokens, sum(best["miss_bytes"]) * 1e6 / SLOW.bytes_per_s)
    assert outcome.step_us.sum() >= least * 0.999  # whole nanoseconds per part


def test_slot_sizes_are_pools_of_their_own():
    trace = decode([[0], [0]], [[0], [0]])
    slices = trace.arrays["slices"]
    slices[1, DOWN, 0, 2] *= 2
    shape = model_shape(trace, (0,))
    slots = place(LRU, shape, budget_bytes=2 * EXPERT).slots
    assert len(slots.groups) == 4
    found = belady(trace, shape, slots, 0)
    ups = sum(g.n_slots for g in slots.groups if g.slot_bytes == 4096)
    assert ups in (2, 4)
    assert found["hits"] == [0, ups + 2]
