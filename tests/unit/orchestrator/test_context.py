"""The policy `context`: its formulas against values by hand, its counts of each sequence,
transitions that a store can execute, and near tiers that share slots."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moving import settle, started
from shapes import (
    BITS,
    N_EXPERT,
    N_LAYERS,
    five_tiers,
    in_one_step,
    least_of,
    make_decision,
    make_event,
    make_shape,
    make_view,
    placed,
    policy_of,
)
from tables import cases

from orchestrator.allocation.placement import PlacementSettings, importance, place
from orchestrator.allocation.pools import nominal_losses
from orchestrator.allocation.slots import ModelShape, Rules
from orchestrator.errors import PolicyError
from orchestrator.events import Phase, StepReport
from orchestrator.policy.context import ContextAware, SequenceUse
from orchestrator.policy.dynaexq import DynaExq
from orchestrator.policy.mixed import Mixed

TIERS = ("q8_0", "q4_k", "q2_k")
PAPER = {"prior_tokens": 0.0, "near_weights": "plain"}


def three_tiers():
    sizes = tuple(dict.fromkeys((0, 1, 3), n_bytes) for n_bytes in (20480, 12288, 8192))
    return ModelShape(16, 4, TIERS, (sizes,) * 4)


def shared(shape, **options):
    return make(shape, near_slots="shared", **options)


def make(shape, budget=1 << 40, **options):
    known = {name: options.pop(name, None) for name in ("hotness", "losses")}
    asked = ContextAware.Settings(**options)
    return policy_of(ContextAware, shape, asked, budget=budget, **known)


def test_importance_without_a_prior_is_the_papers():
    """Importance is S = a P / sum P + (1 - a) W / sum W, for each layer."""
    counts, gates = np.array([[3.0, 1.0], [0.0, 4.0]]), np.array([[0.2, 0.6], [1.0, 1.0]])
    asked = PlacementSettings(importance_mix=0.25, prior_tokens=0.0)
    found = importance(counts, gates, np.array([[9.0, 1.0], [9.0, 1.0]]), asked, 1)
    assert found == pytest.approx(np.array([[0.375, 0.625], [0.375, 0.625]]))


def test_a_profile_counts_as_prior_tokens():
    # four tokens with two experts each in layer 0, none in layer 1
    counts = np.array([[6.0, 2.0], [0.0, 0.0]])
    usual = np.array([[1.0, 3.0], [1.0, 3.0]])
    asked = PlacementSettings(importance_mix=1.0, prior_tokens=4.0)
    found = importance(counts, counts, usual, asked, 2)
    assert found == pytest.approx(np.array([[(6 + 2) / 16, (2 + 6) / 16], [0.25, 0.75]]))
    nothing = importance(counts, counts, np.zeros_like(usual), asked, 2)
    assert nothing == pytest.approx(np.array([[(6 + 4) / 16, (2 + 4) / 16], [0.5, 0.5]]))
    alone = importance(counts, counts, usual, PlacementSettings(prior_tokens=0.0), 2)
    assert alone == pytest.approx(np.array([[0.75, 0.25], [0.25, 0.75]]))


def test_the_most_important_are_hot_and_the_next_ones_have_more_bits():
    scores = np.array([[0.1, 0.3, 0.2, 0.2, 0.15, 0.05]])
    asked = PlacementSettings(near_bits=3.0)
    losses = nominal_losses((4, 2), 1, 6)
    assert place(scores, 2, losses, (4, 2), asked).tolist() == [[2, 0, 0, 1, 1, 2]]
    assert place(scores, 2, losses, (4, 2), asked, most=(1, 4)).tolist() == [[2, 0, 0, 1, 2, 2]]
    # Expert 3 has no loss in any tier. It is the first of the prefix that gets the better tier, so
    # no expert gets it.
    losses[0, 3] = 0.0, 0.0
    losses[0, 4] = 0.5, 0.1
    plain = PlacementSettings(near_bits=3.0, near_weights="plain")
    assert place(scores, 2, losses, (4, 2), plain).tolist() == [[2, 0, 0, 1, 2, 2]]


def test_as_many_are_hot_as_fit_the_budget():
    shape = three_tiers()
    least = least_of(ContextAware, shape)
    assert make(shape, least).report()["hot_per_layer"] == 1
    before = 1
    for budget in range(least, least * 2, least // 16):
        policy = make(shape, budget)
        assert policy.placement.slots.total_bytes <= budget
        assert policy.report()["hot_per_layer"] >= before
        before = policy.report()["hot_per_layer"]
    assert before > 8
    two = placed(ContextAware, shape, ContextAware.Settings(hot_experts=2), budget=least)
    assert two.slots.total_bytes > least


@cases(
    "options, message",
    (
        {"near_tiers": "q3_k"},
        "no precision q3_k below q8_0. Choose from q4_k, q2_k",
    ),
    ({"near_tiers": "q8_0"}, "no precision q8_0 below q8_0"),
    (
        {"near_bits": 1.5},
        "--near-bits 1.5 is too small: the lowest precision q2_k has 2 bits per weight",
    ),
    ({"near_bits": 3.0, "near_tiers": "q4_k"}, "q4_k has 4 bits"),
)
def test_tiers_and_bits_that_the_file_lacks_are_refused(options, message):
    with pytest.raises(PolicyError, match=message):
        make(three_tiers(), **options)


@pytest.mark.parametrize("policy", [ContextAware, Mixed, DynaExq])
def test_several_precisions_are_needed(policy):
    for shape, rules in ((make_shape(tiers=("q4_k",)), Rules()), (make_shape(), Rules(skip=True))):
        with pytest.raises(PolicyError, match="--low FILE"):
            placed(policy, shape, rules=rules)


def finish_step(policy, resident, phase=Phase.PREFILL, **more):
    counts = more.pop("counts", np.zeros(resident.shape, np.uint32))
    target = more.pop("target", resident)
    return policy.on_step(StepReport(phase, 1, 1.0, counts, resident, target, **more))


def prefill(policy, rng, step, n_ahead=1):
    """Decode the events of one part of a prompt.

    Returns the uses of each expert, [L, E]. If n_ahead is set, those of the last layer are its
    predicted experts.
    """
    shape = policy.shape
    used = np.zeros((shape.n_layers, shape.n_expert))
    resident = np.full((shape.n_layers, shape.n_expert), 1, np.uint8)
    for layer in range(shape.n_layers):
        last = layer == shape.n_layers - 1
        event = make_event(
            shape, rng, 1 if last else 6, layer, Phase.PREFILL, 0 if last else n_ahead
        )
        event.step = step
        policy.decide(event, make_view(shape, resident), make_decision(shape))
        if not last or not n_ahead:
            np.add.at(used[layer], event.ids_array, 1)
        if layer == shape.n_layers - 2 and n_ahead:
            np.add.at(used[-1], event.ahead_ids_array[0], 1)
    return used


@pytest.mark.parametrize("n_ahead", [0, 1])
def test_prompts_are_counted_and_the_last_layer_by_its_prediction(n_ahead):
    rng, shape = np.random.default_rng(1), three_tiers()
    policy, resident = make(shape, hot_experts=4), np.zeros((4, 16), np.uint8)
    first = prefill(policy, rng, 0, n_ahead)
    finish_step(policy, resident, starts=(0,))
    second = prefill(policy, rng, 1, n_ahead)
    finish_step(policy, resident)
    assert policy.updates == 0
    answered = rng.integers(0, 3, (4, 16))
    for _ in range(2):
        finish_step(policy, resident, Phase.DECODE, counts=answered.astype(np.uint32))
        assert policy.updates == 1  # one update for each prompt
    expected = first + second + 2 * answered
    hotness = policy.learned().hotness
    assert hotness == pytest.approx(4 * expected / expected.sum(axis=1, keepdims=True))


def test_a_decode_token_in_a_prompts_step_has_no_gate_sums():
    """A decode token in the same step as a prompt is counted as in a step of its own: its uses, but
    no gate weights, also in layers that are counted by their predicted experts."""
    rng, shape = np.random.default_rng(5), three_tiers()
    policy, resident = make(shape, hot_experts=4), np.full((4, 16), 1, np.uint8)
    together = [(1, Phase.DECODE), *[(0, Phase.PREFILL)] * 5]
    for layer in range(3):
        event = make_event(shape, rng, len(together), layer, n_ahead=1)
        in_one_step(event, together)
        policy.decide(event, make_view(shape, resident), make_decision(shape))
    finish_step(policy, resident, starts=(0, 1))
    for sequence, tokens in ((0, 5), (1, 1)):
        counts, gates = policy.use._of[sequence]
        assert counts.sum(axis=1).tolist() == [4 * tokens] * 4
        assert bool(gates.any()) == (sequence == 0)


def test_a_failed_step_counts_nothing_and_a_new_sequence_starts_at_zero():
    rng, shape = np.random.default_rng(2), three_tiers()
    policy = make(shape, hot_experts=4, **PAPER)
    resident = np.zeros((4, 16), np.uint8)
    prefill(policy, rng, 0)  # a step without a report: it failed
    once = prefill(policy, rng, 1)
    finish_step(policy, resident, starts=(0,))
    assert policy.learned().hotness == pytest.approx(4 * once / once.sum(axis=1, keepdims=True))
    other = prefill(policy, rng, 2)
    # sequence 1 runs next to sequence 0, and their counts are added
    finish_step(policy, resident, starts=(1,))
    assert policy.use.sums[0] == pytest.approx(once + other)
    third = prefill(policy, rng, 3)
    finish_step(policy, resident, ends=(0, 1), starts=(2,))
    assert policy.use.sums[0] == pytest.approx(third)
    both = once + other + third
    assert policy.learned().hotness == pytest.approx(4 * both / both.sum(axis=1, keepdims=True))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    hot=st.integers(0, 16),
    bits=st.sampled_from([1.0, 1.5, 2.5, 3.0, 4.0]),
    odd=st.booleans(),
    near_slots=st.sampled_from(["own", "shared"]),
    placement=st.sampled_from(["wait", "async"]),
)
def test_every_expert_moves_once_and_slots_suffice(seed, hot, bits, odd, near_slots, placement):
    """When a placement changes, each expert moves at most once, and no slot group overflows. Reads
    take one to three steps each."""
    rng, shape = np.random.default_rng(seed), five_tiers(odd)
    asked = {"near_slots": near_slots, "placement": placement}
    losses = np.sort(rng.random((N_LAYERS, N_EXPERT, 5)) ** 3, axis=2)
    policy = make(shape, hot_experts=hot, near_bits=bits, losses=losses, **asked)
    plan, resident = policy.placement.slots, started(policy)
    for number in range(3):
        before = resident.copy()
        prefill(policy, rng, number)
        finish_step(policy, resident, starts=(number,), ends=(number - 1,))

        def moves_for(target):
            if placement == "wait":
                return policy.warm(resident, target)
            return finish_step(policy, resident, Phase.DECODE, target=target)

        moved = settle(plan, resident, rng, moves_for)
        assert policy.updates == number + 1
        assert (resident == policy._latest).all()
        assert (moved == (resident != before)).all()


def test_one_group_of_slots_holds_all_near_tiers_and_each_is_of_the_largest():
    plan = shared(five_tiers(), hot_experts=4).placement.slots
    for kind in (0, 1, 3):
        near = {plan.group_of[layer, kind, tier] for layer in range(4) for tier in range(1, 5)}
        assert len(near) == 1 and plan.group_of[0, kind, 0] not in near
        assert plan.groups[near.pop()].slot_bytes == 3 * 4096
    plan = shared(five_tiers(), hot_experts=4, near_tiers="q2_k,q1_0").placement.slots
    assert plan.groups[plan.group_of[0, 0, 4]].slot_bytes == 2 * 4096
    # the store needs at least one slot of every tier
    assert plan.groups[plan.group_of[0, 0, 1]].n_slots == 1


def test_the_bits_follow_the_losses_and_the_use():
    """The tiers equal those of `place` without a limit on the experts of a tier, so layers have
    different numbers of experts in each tier."""
    rng = np.random.default_rng(3)
    losses = np.zeros((N_LAYERS, N_EXPERT, 5))
    losses[..., 1:] = np.sort(rng.random((N_LAYERS, N_EXPERT, 4)) ** 4, axis=2)
    nominal = started(shared(five_tiers(), hot_experts=4))
    hotness = rng.random((N_LAYERS, N_EXPERT)) ** 3
    policy = shared(five_tiers(), hot_experts=4, losses=losses, hotness=hotness)
    assert (policy.placement.losses == losses).all()
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


def test_shared_near_slots_are_refused_on_a_device():
    shape = replace(five_tiers(), shares_slots=False)
    with pytest.raises(PolicyError, match="--near-slots shared does not work in the GPU's memory"):
        shared(shape)
    # one near tier has no other tier to share slots with
    shared(shape, near_tiers="q2_k", near_bits=2.0)
    make(shape)


def test_only_placement_wait_waits_for_transitions():
    rng, shape = np.random.default_rng(5), five_tiers()
    for waits in (False, True):
        policy = shared(shape, hot_experts=4, placement="wait" if waits else "async")
        assert policy.wants.transition_rate == 0
        resident = started(policy)
        assert not policy.warm(resident, resident)
        prefill(policy, rng, 1)
        finish_step(policy, resident, starts=(0,))
        assert bool(policy.warm(resident, resident)) == waits
    assert make(shape, placement="wait", transition_rate=5).wants.transition_rate == 0
    assert make(shape, transition_rate=5).wants.transition_rate == 5


SIZE = (2, 4)


def read(use, step, tokens, **said):
    """Report one prefill step. tokens: (sequence, experts) of each token, the same in both layers,
    with gate weights 0.75 and 0.25."""
    ids = np.array([experts for _, experts in tokens], np.int32)
    gates = np.tile(np.array([0.75, 0.25], np.float32), (len(tokens), 1))
    of = np.array([sequence for sequence, _ in tokens], np.int32)
    for layer in range(SIZE[0]):
        use.count(step, layer, ids, gates, of)
    use.step_done(StepReport(Phase.PREFILL, len(tokens), 1.0, **said))


def answer(use, counts, **said):
    both = np.tile(np.array(counts, np.uint32), (SIZE[0], 1))
    use.step_done(StepReport(Phase.DECODE, 1, 1.0, counts=both, **said))


def test_a_conversation_counts_until_it_ends_and_several_add_up():
    use = SequenceUse(*SIZE)
    read(use, 1, [(0, [0, 1]), (0, [0, 2])], starts=(0,))
    answer(use, [0, 0, 1, 1])
    assert use.sums[0].tolist() == [[2, 1, 2, 1]] * 2
    assert use.sums[1].tolist() == [[1.5, 0.25, 0.25, 0]] * 2  # decode steps have no gate weights
    # a further turn of sequence 0 and the prompt of sequence 5
    read(use, 2, [(0, [3, 0]), (5, [3, 2])], starts=(5,))
    assert use.sums[0].tolist() == [[3, 1, 3, 3]] * 2
    answer(use, [2, 0, 0, 2])
    assert use.sums[0].tolist() == [[5, 1, 3, 5]] * 2
    answer(use, [0, 4, 0, 0], ends=(0,))
    # Sequence 5 keeps its prompt, half of the shared decode counts, and all counts after sequence 0
    # ended.
    assert use.sums[0].tolist() == [[1, 4, 1, 2]] * 2
    assert use.past.tolist() == [[4, 1, 2, 3]] * 2
    assert use.sums[1].tolist() == [[0, 0, 0.25, 0.75]] * 2
    answer(use, [1, 1, 0, 0], ends=(5,))
    assert not use.sums[0].any() and use.past.tolist() == [[6, 6, 3, 5]] * 2


def test_a_restored_sequence_has_its_counts():
    use = SequenceUse(*SIZE)
    read(use, 1, [(0, [0, 1]), (0, [0, 2])], starts=(0,))
    answer(use, [1, 0, 0, 1])
    kept = use.save(0)
    assert kept is not None and use.save(7) is None
    before = use.sums[0]
    more = np.array([0, 1, 0, 1])
    read(use, 2, [(0, [2, 3])], starts=(0,), ends=(0,))  # another conversation replaces sequence 0
    use.restore(0, kept)
    # The end in this report concerns the conversation that was replaced, and not the restored one.
    read(use, 3, [(0, [3, 1])], ends=(0,))
    assert use.sums[0].tolist() == (before + more).tolist()
    use.restore(4, kept)
    answer(use, [0, 0, 0, 0])
    assert use.sums[0].tolist() == (2 * before + more).tolist()
    answer(use, [0, 0, 0, 0], ends=(4,))  # this end concerns the restored sequence
    assert use.sums[0].tolist() == (before + more).tolist()
    other = SequenceUse(*SIZE)
    other.restore(1, kept)
    assert other.save(1) == kept


@pytest.mark.parametrize("damage", [b"", b"x", "cut", "more", "other", "nan", "negative"])
def test_a_damaged_state_is_refused(damage):
    use = SequenceUse(*SIZE)
    read(use, 1, [(0, [0, 1])], starts=(0,))
    kept = use.save(0)
    bad = {"cut": kept[:-8], "more": kept + bytes(8), "other": b"x" + kept[1:]}
    bad |= {name: kept[:-8] + np.float64(v).tobytes() for name, v in WRONG.items()}
    with pytest.raises(PolicyError, match="state of a sequence"):
        use.restore(0, bad[damage] if isinstance(damage, str) else damage)
    assert use.save(0) == kept


WRONG = {"nan": np.nan, "negative": -1.0}
