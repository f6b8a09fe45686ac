"""Near tiers that share slots: counts that follow the split, losses, and slots that always do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moving import settle, started
from shapes import make_decision, make_event, make_view

from orchestrator.allocation.placement import PlacementSettings, place
from orchestrator.allocation.slots import ModelShape, Transition
from orchestrator.engine.driver import Driver
from orchestrator.errors import PolicyError
from orchestrator.events import Phase, StepReport
from orchestrator.policy.base import WaitsBeforeAnswer
from orchestrator.policy.context import ContextAware

TIERS = ("q8_0", "q4_k", "q3_k", "q2_k", "q1_0")
BITS = (8.5, 4.5, 3.44, 2.63, 1.13)
N_LAYERS, N_EXPERT = 4, 16


def five_tiers(odd: bool = False) -> ModelShape:
    """odd: its last layer has slots of another size."""
    tiers = tuple({0: 4096 * n, 1: 4096 * n, 3: 4096 * n} for n in (5, 3, 2, 2, 1))
    last = tuple({kind: 2 * size for kind, size in each.items()} for each in tiers)
    layers = (tiers,) * (N_LAYERS - 1) + ((last,) if odd else (tiers,))
    return ModelShape(N_EXPERT, 4, TIERS, layers, BITS)


def make(shape: ModelShape, **options: object) -> ContextAware:
    policy = ContextAware(shape, ContextAware.Settings(near_slots="shared", **options))
    policy.plan(1 << 40)
    return policy


def told(
    policy: ContextAware, phase: Phase, resident: np.ndarray, target: np.ndarray, **more: object
):
    counts = np.zeros(resident.shape, np.uint32)
    return policy.step_done(StepReport(phase, 1, 1.0, counts, resident, target, **more))


def prefill(
    policy: ContextAware, rng: np.random.Generator, step: int, resident: np.ndarray
) -> None:
    for layer in range(N_LAYERS):
        event = make_event(policy.shape, rng, 6, layer, Phase.PREFILL)
        event.step = step
        policy.decide(event, make_view(policy.shape, resident), make_decision(policy.shape))


def test_one_group_of_slots_holds_all_near_tiers_and_each_is_of_the_largest():
    policy = ContextAware(five_tiers(), ContextAware.Settings(near_slots="shared", hot_experts=4))
    plan = policy.plan(1 << 40)
    for kind in (0, 1, 3):
        near = {plan.group_of[layer, kind, tier] for layer in range(4) for tier in range(1, 5)}
        assert len(near) == 1 and plan.group_of[0, kind, 0] not in near
        assert plan.groups[near.pop()].slot_bytes == 3 * 4096
    fewer = ContextAware(
        five_tiers(),
        ContextAware.Settings(near_slots="shared", hot_experts=4, near_tiers="q2_k,q1_0"),
    )
    plan = fewer.plan(1 << 40)
    assert plan.groups[plan.group_of[0, 0, 4]].slot_bytes == 2 * 4096
    assert plan.groups[plan.group_of[0, 0, 1]].n_slots == 1  # the store wants one of every tier


def test_the_bits_follow_the_losses_and_the_use():
    """As place says with no limit on the experts of a tier, so that layers differ."""
    rng, policy = np.random.default_rng(3), make(five_tiers(), hot_experts=4)
    losses = np.zeros((N_LAYERS, N_EXPERT, 5))
    losses[..., 1:] = np.sort(rng.random((N_LAYERS, N_EXPERT, 4)) ** 4, axis=2)
    nominal = started(policy)
    policy.set_losses(losses)
    assert (policy.losses == losses).all()
    policy.set_hotness(rng.random((N_LAYERS, N_EXPERT)) ** 3)
    found = started(policy)
    expected = place(policy._scores, 4, losses[..., 1:], (4, 3, 2, 1), PlacementSettings())
    assert (found == expected).all() and (found != nominal).any()
    counts = [tuple((row == tier).sum() for tier in range(5)) for row in found]
    assert len(set(counts)) > 1
    bits = np.array([0, 4, 3, 2, 1])[found].sum(axis=1)
    assert (bits <= 3 * 12).all()
    report = policy.report()
    of_tier = [float((found == tier).sum() / N_LAYERS) for tier in range(1, 5)]
    assert list(report["near_per_layer"].values()) == of_tier
    stored = np.array([0, *BITS[1:]])[found].sum() / (12 * N_LAYERS)
    assert report["near_bits"] == pytest.approx(bits.sum() / (12 * N_LAYERS))
    assert report["near_bits_stored"] == pytest.approx(stored)


def test_slots_of_their_own_have_the_counts_of_like_experts():
    """No loss table changes that, so that none is asked for."""
    own = ContextAware(five_tiers(), ContextAware.Settings(hot_experts=4))
    own.plan(1 << 40)
    before_losses = started(own)
    assert not own.losses_matter and make(five_tiers(), hot_experts=4).losses_matter
    losses = np.sort(np.random.default_rng(4).random((N_LAYERS, N_EXPERT, 5)), axis=2)
    before = own.report()["near_per_layer"]
    own.set_losses(losses)
    tiers = started(own)
    assert (tiers == before_losses).all()
    for tier, n in enumerate((4, *before.values())):
        assert ((tiers == tier).sum(axis=1) == n).all()


def test_real_bits_stand_beside_the_nominal_ones():
    text = make(five_tiers(), hot_experts=4).describe()
    assert "q4_k (4.50 bits), q3_k (3.44 bits), q2_k (2.63 bits), q1_0 (1.13 bits)" in text
    assert "3 nominal bits" in text
    own = ContextAware(
        five_tiers(), ContextAware.Settings(near_tiers="q2_k", near_bits=2.0, hot_experts=4)
    )
    own.plan(1 << 40)
    assert "12 q2_k (2.63 bits)" in own.describe()


def test_a_device_has_no_such_slots():
    shape = replace(five_tiers(), shares_slots=False)
    with pytest.raises(PolicyError, match="--near-slots shared needs slots in host memory"):
        make(shape)
    make(shape, near_tiers="q2_k", near_bits=2.0)  # there is nothing to share
    ContextAware(shape).plan(1 << 40)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    hot=st.integers(0, 16),
    bits=st.sampled_from([1.0, 1.5, 2.5, 3.0, 4.0]),
    odd=st.booleans(),
    waits=st.booleans(),
)
def test_every_expert_moves_once_in_shared_slots(
    seed: int, hot: int, bits: float, odd: bool, waits: bool
):
    """From one placement to the next, with reads that take several steps each."""
    rng, shape = np.random.default_rng(seed), five_tiers(odd)
    asked = ContextAware.Settings(
        hot_experts=hot,
        near_bits=bits,
        near_slots="shared",
        placement="wait" if waits else "async",
    )
    policy = ContextAware(shape, asked)
    plan = policy.plan(1 << 40)
    policy.set_losses(np.sort(rng.random((N_LAYERS, N_EXPERT, 5)) ** 3, axis=2))
    resident = started(policy)
    for number in range(3):
        before = resident.copy()
        prefill(policy, rng, number, resident)
        told(policy, Phase.PREFILL, resident, resident, starts=(number,), ends=(number - 1,))

        def moves_for(target: np.ndarray) -> Sequence[Transition]:
            if waits:
                return policy.before_answer(resident, target)
            return told(policy, Phase.DECODE, resident, target)

        moved = settle(plan, resident, rng, moves_for)
        assert policy.updates == number + 1
        assert (resident == policy._latest).all()
        assert (moved == (resident != before)).all()


def test_better_slots_are_freed_first_and_the_most_important_experts_move_first():
    rng, shape = np.random.default_rng(7), five_tiers()
    policy = make(shape, hot_experts=4, placement="wait")
    resident = started(policy)
    prefill(policy, rng, 1, resident)
    told(policy, Phase.PREFILL, resident, resident, starts=(0,))
    everywhere = SimpleNamespace(admitted=list)
    policy._pools = SimpleNamespace(track=lambda *_: everywhere)
    moves = policy.before_answer(resident, resident)
    assert moves is not None
    up = [tier < resident[layer, expert] for layer, expert, tier in moves]
    assert sum(up) > 1 and up.count(False) > 1 and up == sorted(up)
    for way in (False, True):
        scores = [
            policy._scores[layer, expert]
            for (layer, expert, _), of in zip(moves, up, strict=True)
            if of == way
        ]
        assert scores == sorted(scores, reverse=True)


def test_only_a_policy_that_waits_settles():
    rng, shape = np.random.default_rng(5), five_tiers()
    for waits in (False, True):
        policy = make(shape, hot_experts=4, placement="wait" if waits else "async")
        assert policy.wants.transition_rate == 0
        resident = started(policy)
        assert not policy.before_answer(resident, resident)
        prefill(policy, rng, 1, resident)
        told(policy, Phase.PREFILL, resident, resident, starts=(0,))
        assert bool(policy.before_answer(resident, resident)) == waits
    slow = ContextAware(shape, ContextAware.Settings(placement="wait", transition_rate=5))
    assert slow.wants.transition_rate == 0
    assert ContextAware(shape, ContextAware.Settings(transition_rate=5)).wants.transition_rate == 5


@pytest.mark.parametrize("waits", [True, False])
def test_an_answer_waits_for_what_is_under_way_as_well(waits: bool):
    """Of an earlier placement, say: nothing new has to be asked for."""
    resident, left = np.zeros((1, 2), np.uint8), [3]
    asked: list[Sequence[Transition]] = []

    def states():
        target = resident + np.array([[0, left[0] > 0]], np.uint8)
        return resident, target

    store = SimpleNamespace(
        states=states,
        stats=lambda: SimpleNamespace(transitions_failed=0),
        transition=lambda moves: asked.append(moves) or len(moves),
        begin_step=lambda phase: left.__setitem__(0, left[0] - 1),
    )

    class Policy(WaitsBeforeAnswer):
        def before_answer(self, resident, target):
            return () if waits else None

    Driver(Policy(), store, lambda: None).before_answer()
    assert left == [0 if waits else 3] and not any(asked)


def test_a_restored_sequence_is_placed_behind_what_follows():
    rng, shape = np.random.default_rng(6), five_tiers()
    policy, other = make(shape, hot_experts=4), make(shape, hot_experts=4)
    resident = started(policy)
    started(other)
    prefill(policy, rng, 1, resident)
    told(policy, Phase.PREFILL, resident, resident, starts=(0,))
    told(policy, Phase.DECODE, resident, resident)
    state = policy.save_sequence(0)
    assert state is not None and other.save_sequence(0) is None
    other.restore_sequence(3, state)
    told(other, Phase.DECODE, resident, resident)
    assert other.updates == 1 and (other._latest == policy._latest).all()
    assert not other.fresh
