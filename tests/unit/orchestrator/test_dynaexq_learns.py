"""What dynaexq learns from steps, and its hot sets where low copies are cached."""

from __future__ import annotations

import numpy as np
from plain_store import PlainStore, expert_bytes, make, report
from shapes import make_decision, make_event, make_shape, make_view

from orchestrator.events import Phase
from orchestrator.policy.base import EVERY_STEP
from orchestrator.policy.dynaexq import HIGH, LOW, ExpertState

LO = ExpertState.LO


def test_moving_average_and_intervals() -> None:
    """S <- alpha S + (1 - alpha) f, each update_steps decode steps and after each part of a
    prompt; the counts start again from zero."""
    shape = make_shape(n_layers=1, n_expert=4, k=1)
    policy, plan = make(shape, update_steps=3, hotness_decay=0.75)
    store = PlainStore(shape, plan, policy.start())
    one, other = np.array([[0, 1, 0, 0]]), np.array([[1, 0, 0, 0]])
    for done, counts in ((0, one), (0, one), (1, other)):
        policy.step_done(report(counts, store.states))
        assert policy.report()["updates"] == done
    expected = np.array([[1 / 3, 2 / 3, 0, 0]]) / 4
    np.testing.assert_allclose(policy.hotness, expected)
    for _ in range(3):
        policy.step_done(report(one, store.states))
    expected = 0.75 * expected + 0.25 * one
    np.testing.assert_allclose(policy.hotness, expected)
    # a prompt's part of many tokens is one interval, and one token of a prompt a third of one
    policy.step_done(report(512 * other, store.states, Phase.PREFILL, n_tokens=512))
    expected = 0.75 * expected + 0.25 * other
    np.testing.assert_allclose(policy.hotness, expected)
    policy.step_done(report(one, store.states, Phase.PREFILL))
    kept = 0.75 ** (1 / 3)
    np.testing.assert_allclose(policy.hotness, kept * expected + (1 - kept) * one)
    still, _ = make(shape, update_steps=0)
    for phase in [Phase.PREFILL, *[Phase.DECODE] * 100]:
        assert not still.step_done(report(one, store.states, phase))
    assert still.report()["updates"] == 0


def test_a_layer_that_sees_little_of_a_prompt_forgets_little() -> None:
    """The last layer computes one of a prompt's 512 tokens."""
    shape = make_shape(n_layers=2, n_expert=4, k=1)
    policy, plan = make(shape, hotness_decay=0.5)
    store = PlainStore(shape, plan, policy.start())
    before = np.array([[0, 1, 0, 0], [0, 1, 0, 0]], float)
    policy.set_hotness(before)
    counts = np.array([[512, 0, 0, 0], [1, 0, 0, 0]])
    policy.step_done(report(counts, store.states, Phase.PREFILL, n_tokens=512))
    kept = 0.5 ** (1 / 512)
    np.testing.assert_allclose(policy.hotness, [[0.5, 0.5, 0, 0], [1 - kept, kept, 0, 0]])


def test_an_interval_in_time_is_summed_from_the_steps() -> None:
    """Whatever the steps are, and however many; each interval counts alike."""
    shape = make_shape(n_layers=1, n_expert=4, k=1)
    policy, plan = make(shape, update_ms=5, hotness_decay=0.5)
    states = PlainStore(shape, plan, policy.start()).states
    one, other = np.array([[0, 1, 0, 0]]), np.array([[1, 0, 0, 0]])
    told = [(Phase.DECODE, 2000.0, 0), (Phase.PREFILL, 2999.0, 0), (Phase.DECODE, 1.0, 1)]
    told += [(Phase.DECODE, 1.0, 1), (Phase.DECODE, 9000.0, 2), (Phase.DECODE, 4999.0, 2)]
    for phase, us, done in told:
        policy.step_done(report(one if done < 2 else other, states, phase, us=us))
        assert policy.updates == done
    np.testing.assert_allclose(policy.hotness, [[0.25, 0.5, 0, 0]])
    never, _ = make(shape, update_ms=0, update_steps=1)
    for _ in range(50):
        never.step_done(report(one, states, us=1e6))
    assert never.updates == 0


def test_too_small_for_all_low_means_caching() -> None:
    shape = make_shape(n_layers=2, n_expert=8)
    policy, plan = make(shape, expert_bytes(shape, LOW) // 2, hot_experts=0)
    assert policy.caching
    assert policy.wants.asked_in == ()
    assert "dynaexq q2_k, caching" in policy.describe()
    assert plan.total_bytes <= expert_bytes(shape, LOW) // 2
    kept = policy.cached.tolist()
    assert [sum(layer == at for layer, _, _ in policy.start()) for at in (0, 1)] == kept
    states = np.full((2, 8), LO, np.uint8)
    for _ in range(100):
        assert not policy.step_done(report(np.eye(2, 8), states))
    assert policy.hotness.any()


def test_the_hot_set_is_high_while_caching() -> None:
    """What is asked for follows the hotness; without transitions, since tokens wait anyway."""
    shape = make_shape(n_layers=2, n_expert=24, k=1)
    policy, plan = make(shape, int(0.9 * expert_bytes(shape, LOW)))
    n = int(policy.capacity[0])
    assert policy.caching and n > 0 and policy.wants.asked_in == EVERY_STEP
    assert f"caching {n} high and" in policy.describe()
    assert policy.report()["high_per_layer"] == [n, n]
    assert plan.groups[plan.group_of[0, 0, HIGH]].n_slots == n
    assert (policy.cached >= shape.n_expert_used).all()
    policy.start()

    def high(layer: int) -> list[int]:
        event, out = make_event(shape, np.random.default_rng(0), layer=layer), make_decision(shape)
        policy.decide(event, make_view(shape), out)
        return np.flatnonzero(out.tier_array == HIGH).tolist()

    assert high(0) == high(1) == list(range(n))
    counts = np.zeros((2, 24))
    counts[1, -n:] = 100
    states = np.full((2, 24), LO, np.uint8)
    for _ in range(40):
        assert not policy.step_done(report(counts, states, n_tokens=100 * n))
    assert high(0) == list(range(n))
    assert high(1) == list(range(24 - n, 24))
