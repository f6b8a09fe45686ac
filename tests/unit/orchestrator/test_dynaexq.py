"""DynaExq: slots within the budget, hot sets as a plain reference finds them, and transitions that
a store can always do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plain_store import PlainStore, expert_bytes, make, report
from shapes import make_shape

from gguf_tools.units import format_size
from orchestrator.allocation.slots import ModelShape, Rules
from orchestrator.errors import BudgetError, PolicyError
from orchestrator.events import Phase, StepReport
from orchestrator.policy.base import Learns
from orchestrator.policy.dymoe import DyMoE
from orchestrator.policy.dynaexq import HIGH, LOW, DynaExq, ExpertState, least_resident_bytes
from orchestrator.policy.lru import LRU

HI, LO = ExpertState.HI, ExpertState.LO


def with_larger_last_layer(shape: ModelShape, odd: bool) -> ModelShape:
    """Its last layer has larger matrices, as in mixed quantizations."""
    if not odd:
        return shape
    larger = tuple({kind: 2 * size for kind, size in tier.items()} for tier in shape.slots[0])
    return ModelShape(shape.n_expert, shape.n_expert_used, shape.tiers, (*shape.slots[:-1], larger))


def zipf(rng: np.random.Generator, shape: ModelShape, exponent: float = 0.8) -> np.ndarray:
    """How likely each expert of each layer is chosen, [L, E]: few of them often."""
    share = 1.0 / np.arange(1, shape.n_expert + 1) ** exponent
    share /= share.sum()
    return np.stack([rng.permutation(share) for _ in range(shape.n_layers)])


def draw(rng: np.random.Generator, shares: np.ndarray, k: int) -> np.ndarray:
    """Counts [L, E] of one token."""
    order = np.argsort(-(np.log(shares) + rng.gumbel(size=shares.shape)), axis=1)
    counts = np.zeros(shares.shape, np.uint32)
    np.put_along_axis(counts, order[:, :k], 1, axis=1)
    return counts


def test_it_counts_and_needs_no_callback() -> None:
    shape = make_shape()
    policy, _ = make(shape)
    assert policy.wants.counts and isinstance(policy, Learns)
    assert policy.wants.asked_in == ()
    assert policy.wants.default_tier == LOW
    for other in (LRU, DyMoE):
        assert not other.wants.counts and not issubclass(other, Learns)


@pytest.mark.parametrize(
    ("tiers", "rules"), [(("q4_k",), Rules()), (("q4_k", "q2_k"), Rules(skip=True))]
)
def test_two_precisions_are_needed(tiers: tuple[str, ...], rules: Rules) -> None:
    with pytest.raises(PolicyError, match=r"--low FILE"):
        DynaExq(make_shape(tiers=tiers), rules=rules)


@given(
    layers=st.integers(1, 5),
    n_expert=st.integers(2, 70),
    share=st.floats(0, 1.3),
    most=st.none() | st.integers(0, 80),
    odd=st.booleans(),
)
def test_plans_fit_and_fill_the_budget(
    layers: int, n_expert: int, share: float, most: int | None, odd: bool
) -> None:
    shape = make_shape(n_layers=layers, n_expert=n_expert, k=1)
    shape = with_larger_last_layer(shape, odd)
    low, high = expert_bytes(shape, LOW), expert_bytes(shape, HIGH)
    budget = int(share * (high + low // 4))
    policy = DynaExq(shape, DynaExq.Settings(hot_experts=most))
    try:
        plan = policy.plan(budget)
    except BudgetError as error:
        assert error.needed_bytes > budget
        assert policy.plan(error.needed_bytes).total_bytes == error.needed_bytes
        return
    assert plan.total_bytes <= budget
    assert set(plan.group_of) == {
        (layer, kind, tier)
        for layer in range(layers)
        for tier in (HIGH, LOW)
        for kind in shape.slots[layer][tier]
    }
    for (layer, kind, tier), group in plan.group_of.items():
        assert plan.groups[group].slot_bytes >= shape.slots[layer][tier][kind]
    start = policy.start()
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
    PlainStore(shape, plan, start)  # checks that what it starts with has slots
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


def reference(
    scores: np.ndarray, hot: np.ndarray, capacity: Sequence[int], margin: float, slack: int
) -> set[tuple[int, int, int | None]]:
    """(layer, up, down) of every change, one expert after the other."""
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
def test_changes_are_those_of_a_plain_reference(seed: int, margin: float, slack: int) -> None:
    rng = np.random.default_rng(seed)
    shape = make_shape(n_layers=3, n_expert=12)
    policy, _ = make(shape, hysteresis=margin, rank_slack=slack)
    policy.set_hotness(rng.integers(0, 12, (3, 12)).astype(float))  # with ties
    hot = np.zeros((3, 12), bool)
    for layer, n in enumerate(policy.capacity.tolist()):
        missing = int(rng.integers(0, 2))
        hot[layer, rng.permutation(12)[: n - missing]] = True
    swaps = policy._swaps(hot, np.zeros_like(hot))
    found = {(swap.layer, swap.up, swap.down) for swap in swaps}
    assert len(found) == len(swaps)
    assert found == reference(policy.hotness, hot, policy.capacity.tolist(), margin, slack)


def test_the_hottest_are_high_at_the_start() -> None:
    shape = make_shape(n_layers=2, n_expert=6)
    policy, _ = make(shape, hot_experts=2)
    policy.set_hotness(np.array([[0, 5, 1, 9, 2, 0], [0, 0, 0, 0, 0, 0]], float))
    high = {(layer, expert) for layer, expert, tier in policy.start() if tier == HIGH}
    assert high == {(0, 1), (0, 3), (1, 0), (1, 1)}


def test_a_full_pool_holds_up_no_other() -> None:
    """Layers of two slot sizes: all swaps of the one wait for reads that never end."""
    shape = with_larger_last_layer(make_shape(n_layers=2, n_expert=256, k=1), odd=True)
    policy, plan = make(shape, hot_experts=100, update_steps=1, hysteresis=0.0)
    store = PlainStore(shape, plan, policy.start())
    gains = np.zeros((2, 256))
    gains[0, 100:200] = 100.0  # larger ones than those of the other pool
    gains[1, 100:200] = 1.0
    moved: set[tuple[int, int]] = set()
    for _ in range(40):
        store.begin_step()
        moves = policy.step_done(report(gains, store.states, n_tokens=100))
        store.transition([move for move in moves if move[0] == 0], delay=10_000)
        store.transition([move for move in moves if move[0] == 1])
        moved |= {(layer, expert) for layer, expert, _ in moves}
    assert len([each for each in moved if each[0] == 0]) == 4  # the slots in reserve
    assert len([each for each in moved if each[0] == 1]) > 20


def test_a_swap_demotes_first() -> None:
    shape = make_shape(n_layers=1, n_expert=4, k=1)
    policy, plan = make(shape, hot_experts=1, update_steps=1, hysteresis=0.0, rank_slack=0)
    store = PlainStore(shape, plan, policy.start())
    steps = []
    for _ in range(4):
        store.begin_step()
        moves = policy.step_done(report(np.array([[0, 0, 0, 1]]), store.states))
        store.transition(moves)
        steps.append(list(moves))
    assert steps == [[(0, 0, LOW)], [(0, 3, HIGH)], [], []]
    assert store.states.tolist() == [[LO, LO, LO, HI]]
    counted = policy.report()
    assert (counted["promotions"], counted["demotions"], counted["waiting"]) == (1, 1, 0)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n_layers=st.integers(1, 4),
    n_expert=st.integers(4, 40),
    share=st.floats(0.05, 1.0),
    failing=st.sampled_from([0.0, 0.3]),
)
def test_transitions_always_have_a_slot(
    seed: int, n_layers: int, n_expert: int, share: float, failing: float
) -> None:
    """With reads of any length, and some that fail, in any order: PlainStore.check sees every
    slot. When nothing is left to do, each layer has its n_l experts high."""
    rng = np.random.default_rng(seed)
    shape = make_shape(n_layers=n_layers, n_expert=n_expert, k=2)
    low, high = expert_bytes(shape, LOW), expert_bytes(shape, HIGH)
    policy, plan = make(
        shape, int(low * 1.3 + share * (high - low)), update_steps=4, hysteresis=0.1, rank_slack=0
    )
    assume(not policy.caching)
    store = PlainStore(shape, plan, policy.start())
    shares = zipf(rng, shape)
    for at in range(120):
        if at == 60:
            shares = zipf(rng, shape)
        store.begin_step()
        moves = policy.step_done(report(draw(rng, shares, 2), store.states))
        for move in moves:
            store.transition([move], int(rng.integers(1, 6)), rng.random() < failing)
    # nothing new: what was asked for comes to its end, and what failed is made good
    for _ in range(150):
        store.begin_step()
        store.transition(policy.step_done(report(shares * 1000, store.states)))
    assert not store.under_way
    assert policy.report()["waiting"] == 0
    np.testing.assert_array_equal((store.states == HI).sum(axis=1), policy.capacity)
    for layer, n in enumerate(policy.capacity.tolist()):
        hottest = np.sort(shares[layer])[::-1][:n].sum()
        assert shares[layer][store.states[layer] == HI].sum() >= hottest - 0.1 * n / n_expert - 0.01


def run_stationary(margin: float, slack: int) -> tuple[int, float]:
    """Promotions, and the share of the tokens' experts that were high, over one steady text."""
    rng = np.random.default_rng(5)
    shape = make_shape(n_layers=4, n_expert=32, k=4)
    policy, plan = make(shape, hysteresis=margin, rank_slack=slack)
    store = PlainStore(shape, plan, policy.start())
    shares = zipf(rng, shape)
    high = total = 0
    for _ in range(1000):
        store.begin_step()
        counts = draw(rng, shares, 4)
        high += int(counts[store.high()].sum())
        total += int(counts.sum())
        store.transition(policy.step_done(report(counts, store.states)))
    return store.promoted, high / total


def test_hysteresis_halves_the_promotions_on_a_steady_text() -> None:
    """Each form by itself, and both; the hot set is no worse for it."""
    restless, share = run_stationary(0.0, 0)
    usual = DynaExq.Settings()
    for margin, slack in [
        (usual.hysteresis, 0),
        (0.0, 4),
        (usual.hysteresis, 4),
    ]:
        promotions, kept = run_stationary(margin, slack)
        assert 0 < promotions < restless / 2, (margin, slack)
        assert kept > share - 0.01


def test_a_new_text_gets_a_new_hot_set() -> None:
    rng = np.random.default_rng(1)
    shape = make_shape(n_layers=4, n_expert=32, k=4)
    policy, plan = make(shape)
    store = PlainStore(shape, plan, policy.start())
    for shares in (zipf(rng, shape, 1.2), zipf(rng, shape, 1.2)):
        first = float((shares * store.high()).sum(axis=1).mean())
        for _ in range(700):
            store.begin_step()
            store.transition(policy.step_done(report(draw(rng, shares, 4), store.states)))
        adapted = float((shares * store.high()).sum(axis=1).mean())
        best = float(np.sort(shares, axis=1)[:, ::-1][:, : policy.capacity[0]].sum(axis=1).mean())
        assert first < 0.75 * best
        assert adapted > 0.93 * best


def test_what_the_store_refuses_is_given_up() -> None:
    shape = make_shape(n_layers=1, n_expert=4, k=1)
    policy, plan = make(shape, hot_experts=1, update_steps=1, hysteresis=0.0, rank_slack=0)
    states = PlainStore(shape, plan, policy.start()).states
    counts = np.array([[0, 0, 0, 1]])
    assert policy.step_done(report(counts, states)) == [(0, 0, LOW)]
    policy.step_done(report(counts, states))  # nothing moved
    assert policy.report()["given_up"] == 1


def test_without_counts_nothing_happens() -> None:
    policy, _ = make(make_shape())
    assert not policy.step_done(StepReport(Phase.DECODE, 1, 1.0))
    assert policy.report()["updates"] == 0
    assert policy.change("retention", 0.5) is False


@given(layers=st.integers(1, 5), n_expert=st.integers(2, 70), odd=st.booleans())
def test_the_smallest_budget_without_caching_is_the_smallest(
    layers: int, n_expert: int, odd: bool
) -> None:
    shape = with_larger_last_layer(make_shape(n_layers=layers, n_expert=n_expert, k=1), odd)
    least = least_resident_bytes(shape)
    policy = DynaExq(shape)
    assert policy.plan(least).total_bytes == least
    assert not policy.caching
    assert policy.plan(least - 1).total_bytes < least
    assert policy.caching
    assert f"they take {format_size(least)}" in policy.describe()


def test_the_mode_line_says_how_many_are_high() -> None:
    shape = make_shape(n_layers=2, n_expert=8)
    assert "4 of 8 experts a layer high" in make(shape, hot_experts=4)[0].describe()
    assert make(shape, 2 * expert_bytes(shape, HIGH))[0].describe() == (
        "dynaexq q4_k/q2_k, 8 of 8 experts a layer high"
    )
