"""The policy `floor`: which experts it skips or lowers for which loss, and its prefetches of
predicted and of skipped experts."""

from dataclasses import replace

import numpy as np
import pytest
from shapes import (
    UP,
    change,
    least_of,
    make_decision,
    make_shape,
    make_view,
    placed,
    policy_of,
    prefetches,
)
from tables import cases

from orchestrator.allocation.estimate import KlEstimate
from orchestrator.errors import PolicyError
from orchestrator.events import ABSENT, SKIP, Phase, RouteEvent, StepReport
from orchestrator.policy import floor
from orchestrator.policy.floor import AGAIN_STEPS, Floor

K = 4
ONE = make_shape(n_layers=3, n_expert=8, k=K, tiers=("q4_k",))
TWO = make_shape(n_layers=3, n_expert=8, k=K)
GATES = [0.4, 0.3, 0.2, 0.1]
IDS = [5, 2, 7, 0]
AHEAD = [1, 3, 4, 6], [0.8, 0.6, 0.4, 0.2]  # predicted experts of the next layer and their scores


def report(n_tokens=1, phase=Phase.DECODE, **changes):
    return StepReport(phase, n_tokens, 1000.0, **changes)


def made(shape=ONE, nats=None, price=1.0, kind=Floor, **settings):
    """A policy without limits by depth or price unless the settings have them.

    nats: loss of skipping an expert, or of each lower tier and of skipping, at a gate weight of 1.
    """
    chosen = {
        "max_loss": 1.0,
        "loss_schedule": "flat",
        "prefetch": "off",
        "keep_top": 0,
        "skip_present": 0.0,
        **settings,
    }
    each = np.zeros((shape.n_layers, shape.n_expert, len(shape.tiers) + 1))
    each[..., 1:] = [1.0] if nats is None else nats
    estimate = KlEstimate(shape.tiers[0], each, np.ones(each.shape[:2]))
    asked, budget = Floor.Settings(**chosen), 2 * shape.all_slot_bytes()
    policy = policy_of(kind, shape, asked, budget=budget, estimate=estimate)
    policy._price = price
    return policy


def make(layer=0, step=0, rows=(IDS,), gates=(GATES,), of=(0,), ahead=None, phase=Phase.DECODE):
    """Event for tokens of several sequences.

    rows, gates: [T, k]; of: the sequence of each token; ahead: (experts, scores) predicted for the
    next layer, [T, k] each.
    """
    n = len(rows)
    ids, scores = (np.zeros((1, n, K)), np.ones((1, n, K))) if ahead is None else ahead
    event = RouteEvent(
        *(np.array(rows, np.int32), np.array(gates, np.float32), np.arange(n, dtype=np.int32)),
        *(np.array(ids, np.int32).reshape(1, n, K), np.array(scores, np.float32).reshape(1, n, K)),
        *(np.zeros(n, np.float32), np.full(n, phase, np.uint8), np.array(of, np.int32)),
    )
    event.layer, event.n_tokens, event.step, event.phase = layer, n, step, int(phase)
    event.n_ahead = 0 if ahead is None else 1
    return event


def decided(policy, event, here=(), low=()):
    """({expert: tier} of all lowered experts, the decision). here, low: experts resident in tier 0
    and in tier 1."""
    shape = policy.shape
    resident = np.full((shape.n_layers, shape.n_expert), ABSENT, np.uint8)
    resident[:, list(here)] = 0
    resident[:, list(low)] = 1
    out = make_decision(shape)
    policy.decide(event, make_view(shape, resident), out)
    return {e: int(t) for e, t in enumerate(out.tier) if t}, out


TINY = replace(TWO, slots=tuple((each[0], {UP: 8192}) for each in TWO.slots))
PRICE = 0.05 / ONE.expert_slot_bytes(0, 0)
TENTH, MORE = [0.1, 1.0], {0: SKIP, 7: SKIP}


@cases(
    "shape, nats, settings, here, low, lowered",
    # A layer's share is 0.051 nats. 0.01 and 0.04 fit, the next 0.09 does not.
    (ONE, None, {"max_loss": 3 * 0.051}, [], [], MORE),
    (ONE, None, {"max_loss": 3 * 0.051}, [0], [], {7: SKIP}),
    (ONE, None, {}, IDS, [], {}),
    (ONE, None, {"max_loss": 0.0}, [], [], {}),
    # Skipping a resident expert saves the fraction skip_present of its bytes. With 0.5, each saved
    # byte costs twice as much.
    (ONE, None, {"price": PRICE, "skip_present": 0.5}, IDS, [], {0: SKIP}),
    (ONE, None, {"price": PRICE, "skip_present": 0.1}, IDS, [], {}),
    (ONE, None, {"price": PRICE, "skip_present": 0.5}, [0], [], MORE),
    # The experts with the top gate weights are kept. The default is one.
    (ONE, None, {"keep_top": Floor.Settings().keep_top}, [], [], {2: SKIP, **MORE}),
    (ONE, None, {"keep_top": 3}, [], [], {0: SKIP}),
    # A resident low copy is used instead of a missing high one, except for a kept expert.
    (TWO, TENTH, {}, [0], [5, 7], {5: 1, 7: 1, 2: SKIP}),
    (TWO, TENTH, {"keep_top": 1}, [0], [5, 7], {7: 1, 2: SKIP}),
    # Low costs a tenth of skipping and saves two fifths of the bytes, so a further byte costs six
    # times as much. Lowering 0 and 7 costs 0.005 nats. Next, skipping 0 costs 0.009 more, then
    # lowering 2 adds 0.009, and lowering 5 adds 0.016.
    (TWO, TENTH, {"max_loss": 3 * 0.006}, [], [], {7: 1, 0: 1}),
    (TWO, TENTH, {"max_loss": 3 * 0.031}, [], [], {2: 1, 7: 1, 0: SKIP}),
    (TWO, TENTH, {"max_loss": 3 * 0.04}, [], [], {5: 1, 2: 1, 7: 1, 0: SKIP}),
    # If low costs nearly as much as skipping, nothing is lowered.
    (TWO, [0.9, 1.0], {"max_loss": 3 * 0.06}, [], [], MORE),
    # With low copies of a fifth of the bytes, skipping adds fewer nats per byte than lowering.
    (TINY, [0.6, 1.0], {"max_loss": 3 * 0.08}, [2, 7, 0], [], {}),
    (TINY, [0.6, 1.0], {"max_loss": 3 * 0.17}, [2, 7, 0], [], {5: SKIP}),
)
def test_experts_that_are_lowered_or_skipped_in_a_layer(shape, nats, settings, here, low, lowered):
    found, out = decided(made(shape, nats, **settings), make(), here, low)
    assert found == lowered and not prefetches(out)


def test_keep_top_uses_gate_weights_and_not_their_order():
    shuffled = make(gates=[[0.1, 0.4, 0.2, 0.3]])
    assert set(decided(made(keep_top=2), shuffled)[0]) == {5, 7}


def test_skipped_resident_experts_are_neither_missing_nor_read():
    policy = made(price=PRICE, skip_present=0.5)
    decided(policy, make(0), here=IDS)
    policy.on_step(report())
    policy._price = PRICE
    assert not prefetches(decided(policy, make(1, step=1), here=IDS)[1])
    assert policy.report()["missing"] == 0 and policy.report()["lowered"] > 0


def test_a_layer_may_spend_what_earlier_layers_left():
    policy = made(max_loss=3 * 0.06)
    assert decided(policy, make(0), here=[0])[0] == {7: SKIP}  # spends 0.04 of 0.06 nats
    assert decided(policy, make(1), here=[0, 7])[0] == {}  # 0.09 exceeds the 0.08 that are left
    assert decided(policy, make(2), here=[0, 7])[0] == {2: SKIP}  # spends 0.09 of 0.14


def test_the_cosine_schedule_gives_the_first_layer_no_budget():
    policy = made(loss_schedule="cosine", max_loss=0.16)  # shares of the layers: 0, 1/3 and 2/3
    found = [decided(policy, make(layer))[0] for layer in range(3)]
    assert found == [{}, {0: SKIP, 7: SKIP}, {0: SKIP, 7: SKIP}]


def test_unspent_budget_is_carried_to_later_tokens():
    policy = made(max_loss=3 * 0.02)
    assert decided(policy, make(0), here=[0])[0] == {}  # 0.04 exceeds 0.02
    policy.on_step(report())
    policy._price = 1.0
    assert decided(policy, make(0, 1), here=[0])[0] == {7: SKIP}  # spends 0.05 of 0.08
    policy.on_step(report())
    account = policy._accounts[0]
    assert account.left == pytest.approx(2 * 0.06 - 0.04)
    for step in range(2, 99):
        decided(policy, make(0, step), here=IDS)
        policy.on_step(report())
    assert account.left == pytest.approx(floor._CARRIED_TOKENS * 0.06)


def test_a_failed_step_spends_nothing():
    policy = made(max_loss=3 * 0.051)
    for step in range(3):
        assert decided(policy, make(0, step))[0] == {0: SKIP, 7: SKIP}
    assert policy._accounts[0].left == 0


def test_each_sequence_has_its_own_budget():
    """Both tokens need experts 2 and 7. If the second sequence has no loss budget left, both are
    kept."""
    rows, gates = ([2, 7, 1, 3], [2, 7, 4, 6]), ([0.2] * 4, [0.1] * 4)
    policy = made(max_loss=3 * 0.17)
    both = make(rows=rows, gates=gates, of=(4, 9))
    assert decided(policy, both)[0] == dict.fromkeys((2, 7, 1, 3, 4, 6), SKIP)
    assert policy._accounts[4].spent == pytest.approx(0.16)
    assert policy._accounts[9].spent == pytest.approx(0.04)
    policy.on_step(report(2))
    policy._accounts[9].left = -0.17
    policy._price = 1.0
    assert decided(policy, make(step=1, rows=rows, gates=gates, of=(4, 9)))[0] == {1: SKIP, 3: SKIP}
    policy.on_step(report(2, ends=(9,)))
    assert set(policy._accounts) == {4}


def test_the_price_rises_with_unspent_and_falls_with_spent_budget():
    policy, poor = made(max_loss=1.0, price=PRICE), made(max_loss=3 * 0.051, price=PRICE)
    for each in (policy, poor):
        decided(each, make())
    poor._accounts[0].spent = 10.0
    for each in (policy, poor):
        each.on_step(report())
    assert policy._price > PRICE > poor._price == pytest.approx(PRICE * np.exp(-0.1))


def test_experts_that_would_not_be_skipped_are_prefetched():
    """An expert is prefetched if it would not be skipped at the current price. The predicted scores
    are scaled to the sum of the gate weights: 0.4, 0.3, 0.2, 0.1."""
    policy = made(price=PRICE, prefetch="on", read_behind=False)
    _, out = decided(policy, make(ahead=AHEAD), here=[6])
    assert prefetches(out) == [(1, e, 0, 0) for e in (1, 3, 6)]
    kept = made(price=1.0, prefetch="on", read_behind=False, keep_top=1)
    assert [e for _, e, *_ in prefetches(decided(kept, make(ahead=AHEAD))[1])] == [1]


def test_experts_beyond_the_budget_are_prefetched():
    """An expert is prefetched if the budget left for the next layer does not cover its loss: 0.16,
    0.09, 0.04 and 0.01 nats, and 0.058 nats are left."""
    # in the second case 0.01 nats are spent first
    for here, wanted in ((IDS, [1, 3]), ([5, 2, 7], [1, 3, 4])):
        policy = made(max_loss=3 * 0.029, prefetch="on", read_behind=False)
        _, out = decided(policy, make(ahead=AHEAD), here=here)
        assert prefetches(out) == [(1, e, 0, 0) for e in wanted]


def test_experts_beyond_the_budget_of_one_of_several_tokens_are_prefetched():
    ahead = [[[1, 3, 4, 6]] * 2], [[[0.8, 0.6, 0.4, 0.2]] * 2]
    both = make(rows=[IDS] * 2, gates=[GATES] * 2, of=(4, 9), ahead=ahead)
    policy = made(max_loss=3 * 0.03, prefetch="on", read_behind=False)
    assert [e for _, e, *_ in prefetches(decided(policy, both, here=IDS)[1])] == [1, 3]
    policy._accounts[9].left = -0.013  # with 0.01 nats spent, 0.037 are left
    assert [e for _, e, *_ in prefetches(decided(policy, both, here=IDS)[1])] == [1, 3, 4]


def test_experts_skipped_twice_are_read_within_the_transition_rate():
    expert_bytes = ONE.expert_slot_bytes(0, 0)
    fast, slow = made(transition_rate=0), made(transition_rate=1000 * 2 * expert_bytes)

    def asked_behind(policy, step):
        policy._price, policy._accounts = 1.0, {}
        assert set(decided(policy, make(step=step))[0]) == set(IDS)
        found = prefetches(decided(policy, make(1, step=step), here=IDS)[1])
        assert all(layer == 0 and tier == 0 for layer, _, tier, _ in found)
        return [expert for _, expert, *_ in found]

    for policy, wanted in ((fast, [0, 7, 2, 5]), (slow, [0, 7]), (made(read_behind=False), [])):
        assert asked_behind(policy, 0) == []
        policy.on_step(report())  # one millisecond
        assert asked_behind(policy, AGAIN_STEPS) == wanted
        assert asked_behind(policy, 2 * AGAIN_STEPS + 1) == []
    assert not prefetches(decided(slow, make(2))[1])


def test_prompts_are_lossless():
    policy = made(prefetch="on")
    for n in (1, 2):
        event = make(rows=[IDS] * n, gates=[GATES] * n, of=[0] * n, phase=Phase.PREFILL)
        assert decided(policy, event)[0] == {}


def test_the_report_has_the_estimated_loss():
    policy = made(max_loss=3 * 0.051)
    assert policy.report()["loss"] is None
    decided(policy, make(), here=[5])
    policy.on_step(report())
    said = policy.report()
    assert said["loss"] == pytest.approx(0.05)
    assert (said["missing"], said["lowered"]) == (0.75, 0.5)
    assert "0.153 nats" in policy.describe()


def test_slots_for_low_copies_are_a_share():
    budget = TWO.all_slot_bytes() // 2
    asked = Floor.Settings(low_share=0.5)
    plan = placed(Floor, TWO, asked, budget=budget).slots
    low = {group for (_, _, tier), group in plan.group_of.items() if tier == 1}
    n_bytes = sum(plan.groups[group].slot_bytes * plan.groups[group].n_slots for group in low)
    assert 0.4 * budget < n_bytes <= 0.5 * budget and plan.total_bytes <= budget
    least_of(Floor, TWO, asked)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.6, 1.0])
def test_low_share_leaves_slots_for_the_minimum_of_high_copies(share):
    """The minimum budget is one expert of each tier in each layer, for every low_share."""
    each = range(TWO.n_layers)
    least = sum(TWO.expert_slot_bytes(layer, tier) for layer in each for tier in (0, 1))
    assert least_of(Floor, TWO, Floor.Settings(low_share=share)) == least
    for budget in range(least, 3 * TWO.all_slot_bytes(), least // 7):
        plan = placed(Floor, TWO, Floor.Settings(low_share=share), budget=budget).slots
        assert plan.total_bytes <= budget


def test_a_missing_estimate_is_an_error():
    policy = policy_of(Floor, ONE, budget=ONE.all_slot_bytes())
    with pytest.raises(PolicyError, match="no estimate of the quality loss of lower precisions"):
        decided(policy, make())


def test_max_loss_can_change_while_running():
    policy = made(max_loss=0.0)
    change(policy, max_loss=3 * 0.051)
    assert policy._price > 0
    policy._price = 1.0
    assert decided(policy, make())[0] == {0: SKIP, 7: SKIP}


def test_unusual_routing_halves_the_limit_until_it_is_usual_again():
    policy, few = made(max_loss=3 * 0.051), made(max_loss=3 * 0.0255)
    assert "(estimated quality loss at most 0.153 nats per token)" in policy.describe()
    policy.on_step(report(phase=Phase.PREFILL, unusual=True))
    policy._price = 1.0
    assert decided(policy, make())[0] == decided(few, make())[0]
    assert policy.allowed == policy.report()["max_loss"] == few.allowed
    change(policy, max_loss=1.0)
    assert policy.allowed == 0.5
    policy.on_step(report(phase=Phase.PREFILL, unusual=False))
    assert policy.allowed == 1.0


class General(Floor):
    """Uses the code for several tokens also for single tokens."""

    _lower = Floor._lower_all
    _ask = Floor._ask_all


@pytest.mark.parametrize("shape", [ONE, TWO])
@pytest.mark.parametrize("seed", range(4))
def test_a_single_token_is_decided_like_several(seed, shape):
    """Both code paths give the same tiers, prefetches, accounts and prices for 40 tokens with
    random gate weights, predictions and residency."""
    rng = np.random.default_rng(seed)
    settings = {
        "keep_top": seed % 3,
        "skip_present": 0.2 * (seed % 2),
        "max_loss": 0.3,
        "prefetch": "on",
        "loss_schedule": "cosine",
    }
    nats = rng.lognormal(size=(shape.n_layers, shape.n_expert, len(shape.tiers))).cumsum(axis=2)
    both = [made(shape, nats, PRICE, kind, **settings) for kind in (Floor, General)]
    lowered = asked = 0
    for step in range(40):
        for layer in range(shape.n_layers):
            ids, then = rng.permutation(8)[:K], rng.permutation(8)[:K]
            ahead = (then, np.sort(rng.random(K))[::-1]) if layer + 1 < shape.n_layers else None
            event = make(layer, step, [ids], [rng.dirichlet(np.ones(K))], ahead=ahead)
            here, low = np.split(rng.permutation(8)[:5], [4])
            low = low if len(shape.tiers) > 1 else ()
            (tiers, out), (same_tiers, same) = (
                decided(policy, event, here.tolist(), low) for policy in both
            )
            assert (tiers, prefetches(out)) == (same_tiers, prefetches(same))
            lowered, asked = lowered + len(tiers), asked + out.n_prefetch
        states = [(p._accounts[0].left, p._accounts[0].spent, p._price) for p in both]
        assert states[0] == states[1]
        for policy in both:
            policy.on_step(report())
    assert lowered > 40 and asked > 40
    one, other = (policy.report() for policy in both)
    assert [one[name] for name in ("loss", "missing", "lowered")] == [
        other[name] for name in ("loss", "missing", "lowered")
    ]


@pytest.mark.parametrize("kind", [Floor, General])
def test_the_predicted_expert_with_the_largest_loss_is_prefetched(kind):
    """The predicted expert with the lowest gate weight has ten times the loss, so the budget does
    not cover it and it is prefetched."""
    nats = np.ones((ONE.n_layers, ONE.n_expert, 1))
    nats[:, 6] = 10.0
    policy = made(ONE, nats, kind=kind, max_loss=3 * 0.175, prefetch="on")
    _, out = decided(policy, make(ahead=([1, 3, 4, 6], [0.4, 0.3, 0.3, 0.2])), here=IDS)
    assert [expert for _, expert, *_ in prefetches(out)] == [6]


def played(policy, n_steps, n_here):
    """Run n_steps tokens with random gate weights and residency. n_here of the eight experts are
    resident."""
    rng = np.random.default_rng(1)
    for step in range(n_steps):
        for layer in range(ONE.n_layers):
            gates = np.sort(rng.dirichlet(np.ones(K)))[::-1]
            event = make(layer, step, [rng.permutation(8)[:K]], [gates])
            decided(policy, event, here=rng.permutation(8)[:n_here].tolist())
        policy.on_step(report())


def test_a_price_that_is_too_high_falls():
    """A price that is too high falls to the usual one, although no more than the budget is spent.

    At this price every expert would be skipped, so each token spends its whole budget in the first
    layers.
    """
    policy = made(max_loss=0.05, price=1.0, keep_top=1)
    played(policy, 300, 4)
    usual = made(max_loss=0.05, price=1e-3 / ONE.expert_slot_bytes(0, 0), keep_top=1)
    played(usual, 300, 4)
    assert policy.report()["loss"] == pytest.approx(0.05, rel=0.05)
    assert policy._price == pytest.approx(usual._price, rel=0.2)


def test_the_price_is_limited_to_the_most_expensive_choice():
    policy = made(max_loss=5.0)
    played(policy, 300, 4)
    assert policy._price == pytest.approx(1 / ONE.expert_slot_bytes(0, 0))
    assert policy.report()["lowered"] == policy.report()["missing"]


def test_the_price_is_constant_while_no_expert_is_missing():
    policy = made(max_loss=5.0, price=PRICE, skip_present=Floor.Settings().skip_present)
    played(policy, 300, 8)
    assert policy._price == PRICE and policy.report()["lowered"] == 0


def test_resident_experts_are_skipped_with_the_budget_that_is_left():
    """Resident experts are skipped only with the budget that missing experts leave.

    Half of the routed experts are missing. With max_loss 0.01 and 0.05 they take the whole budget;
    with 0.6 they do not.
    """
    found = []
    for max_loss in (0.01, 0.05, 0.6):
        policy = made(max_loss=max_loss, keep_top=1, skip_present=Floor.Settings().skip_present)
        policy._price = 1e-3 / ONE.expert_slot_bytes(0, 0)
        played(policy, 400, 4)
        assert policy.report()["loss"] <= max_loss
        alone = made(max_loss=max_loss, keep_top=1)
        alone._price = 1e-3 / ONE.expert_slot_bytes(0, 0)
        played(alone, 400, 4)
        found.append(policy.report()["lowered"] - alone.report()["lowered"])
    assert found[0] == found[1] == 0 < 0.05 < found[2]
