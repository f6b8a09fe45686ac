"""DynaExq: slots within the budget, hot sets compared with a simple implementation, transitions
that a store can execute, the moving average of hotness, and hot sets if low copies are cached."""

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from moving import MovingStore, started
from shapes import (
    assert_holds,
    least_of,
    make_decision,
    make_event,
    make_shape,
    make_view,
    policy_of,
)

from orchestrator.allocation.slots import ModelShape
from orchestrator.events import Phase, StepReport
from orchestrator.policy.base import EVERY_STEP
from orchestrator.policy.dynaexq import HIGH, LOW, DynaExq


def make(shape, budget_bytes=None, **options):
    """Returns the policy and its slots. Default budget: low slots for all experts, high slots for
    about half of them, and slots in reserve."""
    if budget_bytes is None:
        both = shape.all_slot_bytes(HIGH) + shape.all_slot_bytes(LOW)
        budget_bytes = both // 2 + 4 * shape.expert_slot_bytes(0, HIGH)
    policy = policy_of(DynaExq, shape, DynaExq.Settings(**options), budget=budget_bytes)
    return policy, policy.placement.slots


def running(policy, plan):
    return MovingStore(plan, started(policy))


def report(counts, store, phase=Phase.DECODE, n_tokens=1, us=1.0):
    tiers = store.tiers.copy(), store.target
    return StepReport(phase, n_tokens, us, counts.astype(np.uint32), *tiers)


def with_larger_last_layer(shape, odd):
    """The last layer has matrices of twice the size, as in mixed quantizations."""
    if not odd:
        return shape
    larger = tuple({kind: 2 * size for kind, size in tier.items()} for tier in shape.slots[0])
    return ModelShape(shape.n_expert, shape.n_expert_used, shape.tiers, (*shape.slots[:-1], larger))


def zipf(rng, shape, exponent=0.8):
    """Probability of each expert in each layer, [L, E], by Zipf's law with shuffled ranks."""
    share = 1.0 / np.arange(1, shape.n_expert + 1) ** exponent
    share /= share.sum()
    return np.stack([rng.permutation(share) for _ in range(shape.n_layers)])


def draw(rng, shares, k):
    """Counts of one token, [L, E]."""
    order = np.argsort(-(np.log(shares) + rng.gumbel(size=shares.shape)), axis=1)
    counts = np.zeros(shares.shape, np.uint32)
    np.put_along_axis(counts, order[:, :k], 1, axis=1)
    return counts


@given(
    layers=st.integers(1, 5),
    n_expert=st.integers(2, 70),
    share=st.floats(0, 1.3),
    most=st.none() | st.integers(0, 80),
    odd=st.booleans(),
)
def test_plans_fit_and_fill_the_budget(layers, n_expert, share, most, odd):
    shape = make_shape(n_layers=layers, n_expert=n_expert, k=1)
    shape = with_larger_last_layer(shape, odd)
    low, high = shape.all_slot_bytes(LOW), shape.all_slot_bytes(HIGH)
    budget = int(share * (high + low // 4))
    asked = DynaExq.Settings(hot_experts=most)
    policy = policy_of(DynaExq, shape, asked, budget=budget)
    plan = policy.placement.slots
    if budget < (least := least_of(DynaExq, shape, asked)):
        assert plan.total_bytes == least
        return
    assert_holds(plan, shape, (HIGH, LOW), budget)
    start = policy.warm()
    assert len(set(start)) == len(start) == len({(layer, expert) for layer, expert, _ in start})
    if policy.caching:
        assert (
            budget < low + 4 * layers * shape.expert_slot_bytes(layers - 1, LOW) + high // n_expert
        )
        n_high, n_low = policy.capacity.tolist(), policy.cached.tolist()
        for layer in range(layers):
            held = [tier for at, _, tier in start if at == layer]
            assert (held.count(HIGH), held.count(LOW)) == (n_high[layer], min(n_low[layer], 99))
            assert n_high[layer] <= (n_expert if most is None else most)
        return
    running(policy, plan)  # the constructor asserts that the start tiers fit the slots
    assert len(start) == layers * n_expert
    n = policy.capacity
    assert n.max() - n.min() <= 1 or odd
    assert n.max() <= min(n_expert, n_expert if most is None else most)
    step = min(
        shape.expert_slot_bytes(layer, HIGH) - shape.expert_slot_bytes(layer, LOW)
        for layer in range(layers)
    )
    full = n.min() == min(n_expert, n_expert if most is None else most)
    assert full or budget - plan.total_bytes < step + shape.expert_slot_bytes(layers - 1, HIGH)


def reference(scores, hot, capacity, margin, slack):
    """Set of (layer, up, down) of every swap, computed one expert at a time."""
    found: set[tuple[int, int, int | None]] = set()
    for layer, row in enumerate(scores.tolist()):
        everyone = range(len(row))
        ranked = sorted(everyone, key=lambda e: (-row[e], e))
        n = capacity[layer]
        inside = [e for e in everyone if hot[layer, e]]
        rising = [e for e in ranked[:n] if not hot[layer, e]]
        falling = sorted(
            (e for e in inside if ranked.index(e) >= n + slack), key=lambda e: (row[e], e)
        )
        places = n - len(inside)
        found |= {(layer, e, None) for e in rising[:places] if row[e] > 0}
        unit = sum(row) / len(row)
        found |= {
            (layer, up, down)
            for up, down in zip(rising[places:], falling, strict=False)
            if row[up] - row[down] > margin * unit
        }
    return found


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32), margin=st.sampled_from([0.0, 0.2, 1.0]), slack=st.integers(0, 4))
def test_swaps_equal_those_of_a_simple_implementation(seed, margin, slack):
    rng = np.random.default_rng(seed)
    shape = make_shape(n_layers=3, n_expert=12)
    policy, _ = make(shape, hysteresis=margin, rank_slack=slack)
    policy.recall(rng.integers(0, 12, (3, 12)).astype(float))  # integers, so that some are equal
    hot = np.zeros((3, 12), bool)
    for layer, n in enumerate(policy.capacity.tolist()):
        missing = int(rng.integers(0, 2))
        hot[layer, rng.permutation(12)[: n - missing]] = True
    swaps = policy._swaps(hot, np.zeros_like(hot))
    found = {(swap.layer, swap.up, swap.down) for swap in swaps}
    assert len(found) == len(swaps)
    scores = policy.learned().hotness
    assert found == reference(scores, hot, policy.capacity.tolist(), margin, slack)


def test_a_full_pool_does_not_block_other_pools():
    """Two layers with slots of different sizes. If all swaps of one pool wait for reads that never
    finish, swaps of the other pool continue."""
    shape = with_larger_last_layer(make_shape(n_layers=2, n_expert=256, k=1), odd=True)
    policy, plan = make(shape, hot_experts=100, update_steps=1, hysteresis=0.0)
    store = running(policy, plan)
    gains = np.zeros((2, 256))
    gains[0, 100:200] = 100.0  # larger gains than in the other pool
    gains[1, 100:200] = 1.0
    moved: set[tuple[int, int]] = set()
    for _ in range(40):
        store.begin_step()
        moves = policy.on_step(report(gains, store, n_tokens=100))
        store.transition([move for move in moves if move[0] == 0], steps=10_000)
        store.transition([move for move in moves if move[0] == 1])
        moved |= {(layer, expert) for layer, expert, _ in moves}
    assert len([each for each in moved if each[0] == 0]) == 4  # the number of reserve slots
    assert len([each for each in moved if each[0] == 1]) > 20


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n_layers=st.integers(1, 4),
    n_expert=st.integers(4, 40),
    share=st.floats(0.05, 1.0),
    failing=st.sampled_from([0.0, 0.3]),
)
def test_transitions_always_have_a_slot(seed, n_layers, n_expert, share, failing):
    """Every transition has a slot, for random read durations and failures.

    MovingStore asserts this in each step. When no transition is left, each layer has exactly its
    capacity of experts in the high tier, and these are nearly the hottest.
    """
    rng = np.random.default_rng(seed)
    shape = make_shape(n_layers=n_layers, n_expert=n_expert, k=2)
    low, high = shape.all_slot_bytes(LOW), shape.all_slot_bytes(HIGH)
    policy, plan = make(
        shape, int(low * 1.3 + share * (high - low)), update_steps=4, hysteresis=0.1, rank_slack=0
    )
    assume(not policy.caching)
    store = running(policy, plan)
    shares = zipf(rng, shape)
    for at in range(120):
        if at == 60:
            shares = zipf(rng, shape)
        store.begin_step()
        moves = policy.on_step(report(draw(rng, shares, 2), store))
        for move in moves:
            store.transition([move], int(rng.integers(1, 6)), rng.random() < failing)
    # With constant hotness, running transitions finish and failed ones are repeated.
    for _ in range(150):
        store.begin_step()
        store.transition(policy.on_step(report(shares * 1000, store)))
    assert not store.way
    assert policy.report()["waiting"] == 0
    np.testing.assert_array_equal((store.tiers == HIGH).sum(axis=1), policy.capacity)
    for layer, n in enumerate(policy.capacity.tolist()):
        hottest = np.sort(shares[layer])[::-1][:n].sum()
        assert (
            shares[layer][store.tiers[layer] == HIGH].sum() >= hottest - 0.1 * n / n_expert - 0.01
        )


def run_stationary(margin, slack):
    """Number of promotions, and fraction of the uses that found the expert in the high tier, over
    1,000 tokens with constant probabilities."""
    rng = np.random.default_rng(5)
    shape = make_shape(n_layers=4, n_expert=32, k=4)
    policy, plan = make(shape, hysteresis=margin, rank_slack=slack)
    store = running(policy, plan)
    shares = zipf(rng, shape)
    hits = total = 0
    for _ in range(1000):
        store.begin_step()
        counts = draw(rng, shares, 4)
        hits += int(counts[store.tiers == HIGH].sum())
        total += int(counts.sum())
        store.transition(policy.on_step(report(counts, store)))
    return policy.report()["promotions"], hits / total


def test_hysteresis_halves_the_promotions_on_a_steady_text():
    """Hysteresis and rank slack, alone and together, more than halve the promotions. The fraction
    of high uses drops by at most 0.01."""
    restless, share = run_stationary(0.0, 0)
    usual = DynaExq.Settings()
    for margin, slack in [(usual.hysteresis, 0), (0.0, 4), (usual.hysteresis, 4)]:
        promotions, kept = run_stationary(margin, slack)
        assert 0 < promotions < restless / 2, (margin, slack)
        assert kept > share - 0.01


def test_a_new_text_gets_a_new_hot_set():
    rng = np.random.default_rng(1)
    shape = make_shape(n_layers=4, n_expert=32, k=4)
    policy, plan = make(shape)
    store = running(policy, plan)
    for shares in (zipf(rng, shape, 1.2), zipf(rng, shape, 1.2)):
        first = float((shares * (store.tiers == HIGH)).sum(axis=1).mean())
        for _ in range(700):
            store.begin_step()
            store.transition(policy.on_step(report(draw(rng, shares, 4), store)))
        adapted = float((shares * (store.tiers == HIGH)).sum(axis=1).mean())
        best = float(np.sort(shares, axis=1)[:, ::-1][:, : policy.capacity[0]].sum(axis=1).mean())
        assert first < 0.75 * best
        assert adapted > 0.93 * best


def test_transitions_that_the_store_refuses_are_given_up():
    shape = make_shape(n_layers=1, n_expert=4, k=1)
    policy, plan = make(shape, hot_experts=1, update_steps=1, hysteresis=0.0, rank_slack=0)
    store = running(policy, plan)
    counts = np.array([[0, 0, 0, 1]])
    assert policy.on_step(report(counts, store)) == [(0, 0, LOW)]
    policy.on_step(report(counts, store))  # the store did not start the transition
    assert policy.report()["given_up"] == 1


def test_without_counts_nothing_happens():
    policy, _ = make(make_shape())
    assert not policy.on_step(StepReport(Phase.DECODE, 1, 1.0))
    assert policy.report()["updates"] == 0


def test_moving_average_and_intervals():
    """S <- alpha S + (1 - alpha) f after every update_steps decode steps and after each part of a
    prompt. The counts then restart at zero."""
    shape = make_shape(n_layers=1, n_expert=4, k=1)
    policy, plan = make(shape, update_steps=3, hotness_decay=0.75)
    store = running(policy, plan)
    one, other = np.array([[0, 1, 0, 0]]), np.array([[1, 0, 0, 0]])
    for done, counts in ((0, one), (0, one), (1, other)):
        policy.on_step(report(counts, store))
        assert policy.report()["updates"] == done
    expected = np.array([[1 / 3, 2 / 3, 0, 0]]) / 4
    np.testing.assert_allclose(policy.learned().hotness, expected)
    for _ in range(3):
        policy.on_step(report(one, store))
    expected = 0.75 * expected + 0.25 * one
    np.testing.assert_allclose(policy.learned().hotness, expected)
    # A part of a prompt with many tokens counts as one interval, one prompt token as a third of an
    # interval.
    policy.on_step(report(512 * other, store, Phase.PREFILL, n_tokens=512))
    expected = 0.75 * expected + 0.25 * other
    np.testing.assert_allclose(policy.learned().hotness, expected)
    policy.on_step(report(one, store, Phase.PREFILL))
    kept = 0.75 ** (1 / 3)
    np.testing.assert_allclose(policy.learned().hotness, kept * expected + (1 - kept) * one)
    still, _ = make(shape, update_steps=0)
    for phase in [Phase.PREFILL, *[Phase.DECODE] * 100]:
        assert not still.on_step(report(one, store, phase))
    assert still.report()["updates"] == 0


def test_a_layers_decay_follows_its_own_tokens():
    """A layer decays in proportion to its own tokens: the last layer computes one of the prompt's
    512 tokens."""
    shape = make_shape(n_layers=2, n_expert=4, k=1)
    policy, plan = make(shape, hotness_decay=0.5)
    store = running(policy, plan)
    before = np.array([[0, 1, 0, 0], [0, 1, 0, 0]], float)
    policy.recall(before)
    counts = np.array([[512, 0, 0, 0], [1, 0, 0, 0]])
    policy.on_step(report(counts, store, Phase.PREFILL, n_tokens=512))
    kept = 0.5 ** (1 / 512)
    np.testing.assert_allclose(policy.learned().hotness, [[0.5, 0.5, 0, 0], [1 - kept, kept, 0, 0]])


def test_an_interval_in_time_is_summed_from_the_steps():
    """With update_ms, an interval ends when the durations of its steps add up to 5 ms. Each
    interval has the same weight, regardless of its number of steps."""
    shape = make_shape(n_layers=1, n_expert=4, k=1)
    policy, plan = make(shape, update_ms=5, hotness_decay=0.5)
    store = running(policy, plan)
    one, other = np.array([[0, 1, 0, 0]]), np.array([[1, 0, 0, 0]])
    reports = [(Phase.DECODE, 2000.0, 0), (Phase.PREFILL, 2999.0, 0), (Phase.DECODE, 1.0, 1)]
    reports += [(Phase.DECODE, 1.0, 1), (Phase.DECODE, 9000.0, 2), (Phase.DECODE, 4999.0, 2)]
    for phase, us, done in reports:
        policy.on_step(report(one if done < 2 else other, store, phase, us=us))
        assert policy.updates == done
    np.testing.assert_allclose(policy.learned().hotness, [[0.25, 0.5, 0, 0]])
    never, _ = make(shape, update_ms=0, update_steps=1)
    for _ in range(50):
        never.on_step(report(one, store, us=1e6))
    assert never.updates == 0


def test_the_hot_set_is_high_while_caching():
    """If low copies do not all fit, the hot experts are requested in the high tier, without
    transitions."""
    shape = make_shape(n_layers=2, n_expert=24, k=1)
    policy, plan = make(shape, int(0.9 * shape.all_slot_bytes(LOW)))
    n = int(policy.capacity[0])
    assert policy.caching and n > 0 and policy.wants.asked_in == EVERY_STEP
    assert f"a cache for {n} of 24 experts per layer in {shape.tiers[HIGH]}" in policy.describe()
    assert policy.report()["high_per_layer"] == [n, n]
    assert plan.groups[plan.group_of[0, 0, HIGH]].n_slots == n
    assert (policy.cached >= shape.n_expert_used).all()
    store = running(policy, plan)

    def high(layer):
        event, out = make_event(shape, np.random.default_rng(0), layer=layer), make_decision(shape)
        policy.decide(event, make_view(shape), out)
        return np.flatnonzero(out.tier_array == HIGH).tolist()

    assert high(0) == high(1) == list(range(n))
    counts = np.zeros((2, 24))
    counts[1, -n:] = 100
    for _ in range(40):
        assert not policy.on_step(report(counts, store, n_tokens=100 * n))
    assert high(0) == list(range(n))
    assert high(1) == list(range(24 - n, 24))
