"""The policy `mixed`: its slots, the tiers at the start, and experts that exchange their tiers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moving import settle, started
from shapes import BITS, FIVE, N_EXPERT, N_LAYERS, five_tiers, least_of, policy_of

from orchestrator.allocation.hull import Hull, total_loss
from orchestrator.allocation.pools import slot_sizes
from orchestrator.allocation.slots import ModelShape
from orchestrator.events import Phase, StepReport
from orchestrator.policy.base import TierOffer
from orchestrator.policy.mixed import Mixed, exchanges, moves, nominal, weights


def make(shape, budget=1 << 40, hotness=None, losses=None, **options):
    known = {"hotness": hotness, "losses": losses}
    return policy_of(Mixed, shape, Mixed.Settings(**options), budget=budget, **known)


def finish_step(policy, counts, resident, target):
    return policy.on_step(
        StepReport(Phase.DECODE, 1, 1.0, counts.astype(np.uint32), resident, target)
    )


def middle(shape):
    """Budget halfway between all experts in the third tier and all in the second."""
    return (shape.all_slot_bytes(1) + shape.all_slot_bytes(2)) // 2


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("tenths", [0, 3, 9, 20, 40, 80])
def test_the_plan_keeps_the_budget_and_wastes_less_than_an_expert(odd, tenths):
    """The unused rest of the budget is smaller than one expert. The slots hold all experts at the
    start, and a larger budget does not increase the loss."""
    shape = five_tiers(odd)
    rng = np.random.default_rng(tenths)
    hotness = rng.random((N_LAYERS, N_EXPERT)) ** 3
    least = least_of(Mixed, shape)
    budget = least + tenths * shape.all_slot_bytes(4) // 10
    smallest = make(shape, least, hotness)
    before = total_loss(smallest.weighted, started(smallest))
    policy = make(shape, budget, hotness)
    plan, tiers = policy.placement.slots, started(policy)
    assert plan.total_bytes <= budget
    whole = shape.all_slot_bytes(0)
    assert min(budget, whole) - plan.total_bytes < shape.expert_slot_bytes(3, 0)
    used = [0] * len(plan.groups)
    for (layer, _, tier), group in plan.group_of.items():
        used[group] += int((tiers[layer] == tier).sum())
    assert all(n <= group.n_slots for n, group in zip(used, plan.groups, strict=True))
    assert total_loss(policy.weighted, tiers) <= before
    assert (
        policy.wants.asked_in == () and policy.wants.all_resident and policy.wants.default_tier == 4
    )


def test_the_best_tier_is_at_most_one_above_the_uniform_tier_that_fits():
    """The best tier offered is one above the uniform tier that fits, because the store needs one
    slot of each tier. With many experts that slot is cheap, and the best tier of the file is
    offered."""
    shape = five_tiers()

    def offered(budget, n_expert):
        def of(tiers):
            part = tuple(tuple(each[at] for at in tiers) for each in shape.slots)
            return ModelShape(n_expert, 4, tuple(FIVE[at] for at in tiers), part)

        return Mixed.precisions.high(TierOffer(FIVE, of, budget * n_expert // N_EXPERT))

    sizes = [shape.all_slot_bytes(tier) for tier in range(5)]
    assert [offered(size, N_EXPERT) for size in sizes] == [0, 0, 1, 1, 3]
    assert offered(sizes[4] - 1, N_EXPERT) == 3
    assert [offered(size, 1600) for size in sizes] == [0] * 5


def test_the_start_is_the_hulls_allocation_of_usage_times_loss():
    """The tiers at the start minimise the sum of usage times loss. Unused experts keep a small
    weight, and without a loss table losses are nominal."""
    shape = five_tiers()
    rng = np.random.default_rng(1)
    hotness = rng.random((N_LAYERS, N_EXPERT)) ** 3
    hotness[0, 3] = 0
    losses = np.sort(rng.random((N_LAYERS, N_EXPERT, 5)) ** 4, axis=2)
    policy = make(shape, middle(shape), hotness, losses)
    plan, tiers = policy.placement.slots, started(policy)
    hull = Hull(weights(hotness)[..., None] * losses, slot_sizes(shape))
    n_bytes = int(np.take_along_axis(slot_sizes(shape), tiers.astype(int), axis=1).sum())
    reserve = 1 * shape.expert_slot_bytes(0, 4)
    assert n_bytes + reserve == plan.total_bytes
    assert total_loss(policy.weighted, tiers) == pytest.approx(
        total_loss(policy.weighted, hull.at(n_bytes))
    )
    assert weights(hotness)[0, 3] > 0
    assert (policy.placement.losses == losses).all() and make(shape).placement.losses is None
    assert nominal(shape)[0, 0] == pytest.approx(0.25 ** np.array(BITS))


def test_a_change_of_topic_moves_the_tiers_in_the_same_slots():
    """After a change of topic the tiers are exchanged within the same slots.

    After 12 intervals the allocation equals the best one with the same number of experts in each
    tier. Every transition has a slot, and in the end none is in progress.
    """
    shape = five_tiers()
    rng = np.random.default_rng(5)
    hotness = rng.random((N_LAYERS, N_EXPERT)) ** 3
    asked = {"update_steps": 1, "hotness_decay": 0.5, "hysteresis": 0.0}
    policy = make(shape, middle(shape), hotness, **asked)
    plan, resident = policy.placement.slots, started(policy)
    counts = np.bincount(resident.ravel(), minlength=5)
    other = rng.integers(0, 100, (N_LAYERS, N_EXPERT)) ** 2
    first = policy.weighted
    for _ in range(12):
        settle(plan, resident, rng, lambda target: finish_step(policy, other, resident, target))
    assert (np.bincount(resident.ravel(), minlength=5) == counts).all()
    now = policy.weighted
    assert not np.allclose(first, now)
    # All losses are equal, so in the best allocation the most used experts have the best tiers.
    best = np.sort(resident.ravel())
    order = np.argsort(-now[..., -1].ravel(), kind="stable")
    ideal = np.empty_like(best)
    ideal[order] = best
    assert total_loss(now, resident) == pytest.approx(
        total_loss(now, ideal.reshape(resident.shape))
    )
    reported = policy.report()
    assert reported["exchanges"] > 0 and reported["moves"] >= 2 * reported["exchanges"]
    assert reported["experts"] == dict(zip(FIVE, counts.tolist(), strict=True))


@given(st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_every_assignment_is_reached_with_reserve_slots_in_the_lowest_tier(seed):
    """Any permutation of tiers is reached, even if all direct transitions are blocked by full
    pools."""
    rng = np.random.default_rng(seed)
    shape = five_tiers(odd=bool(seed % 2))
    hotness = rng.random((N_LAYERS, N_EXPERT)) ** 4
    policy = make(shape, int(shape.all_slot_bytes(4) * rng.uniform(2.2, 4)), hotness)
    plan, resident = policy.placement.slots, started(policy)
    pools = policy._pools
    wanted = resident.copy()
    for some in (slice(0, N_LAYERS - 1), slice(N_LAYERS - 1, None)):
        part = wanted[some]
        wanted[some] = rng.permutation(part.ravel()).reshape(part.shape)
    losses = rng.standard_normal((*resident.shape, len(FIVE)))
    settle(plan, resident, rng, lambda target: moves(pools, wanted, resident, target, losses))
    assert (resident == wanted).all()


def test_exchanges_need_more_than_the_margin():
    """Two tiers with equal losses: an exchange needs a difference in usage of more than margin
    times the mean usage."""
    used = np.array([[1.0, 2.0, 2.4, 2.6]])
    losses = used[..., None] * np.array([0.0, 1.0])
    tiers = np.array([[1, 0, 1, 1]], np.uint8)
    pool_of, free = np.zeros((1, 2), np.int64), np.ones((1, 4), bool)
    assert exchanges(losses, tiers, pool_of, free, 0.29) == [(3, 1)]
    assert exchanges(losses, tiers, pool_of, free, 0.31) == []
    busy = free.copy()
    busy[0, 3] = False
    assert exchanges(losses, tiers, pool_of, busy, 0.0) == [(2, 1)]
    unused = np.array([[0, -1]])
    assert exchanges(losses, tiers, unused, free, 0.0) == []


def test_layers_of_other_sizes_exchange_among_themselves():
    losses = np.array([[[0.0, 1.0]], [[0.0, 9.0]]])
    tiers, free = np.array([[0], [1]], np.uint8), np.ones((2, 1), bool)
    assert exchanges(losses, tiers, np.zeros((2, 2), int), free, 0.0) == [(1, 0)]
    assert exchanges(losses, tiers, np.array([[0, 0], [1, 1]]), free, 0.0) == []
