"""How bytes and slots are allocated: convex hulls, divided budgets, prefix splits, the schedule by
depth (DyMoE, eq. 4 and 5), and slot pools. Also the trials that switch prefetch off if it does not
pay."""

import itertools
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import UP, make_shape, placed
from tables import cases

from orchestrator.allocation.hull import Hull, total_loss
from orchestrator.allocation.look_ahead import (
    BLOCK_STEPS,
    FIRST_STEPS,
    LONGEST_STEPS,
    PERIOD_STEPS,
    PredictionScore,
    Prefetching,
)
from orchestrator.allocation.placement import prefix_split
from orchestrator.allocation.pools import Tracker
from orchestrator.allocation.slots import Share, divide, falling
from orchestrator.errors import ConfigError, PolicyError
from orchestrator.events import Phase, StepReport
from orchestrator.policy.dymoe import DyMoE, counts_for_retention, critical_counts, realised

SIZES = np.array([[9, 5, 4, 2], [8, 6, 3, 1]])


def taken(tiers, sizes):
    return int(np.take_along_axis(sizes, tiers.astype(np.int64), axis=1).sum())


# Every choice of one of four tiers for each of six experts, [4096, 6].
CHOICES = np.array(list(product(range(4), repeat=6)))


def every(of_expert):
    """Sum of a quantity over the six experts, for each row of CHOICES. of_expert: [6, 4]."""
    total: np.ndarray = of_expert[np.arange(6), CHOICES].sum(axis=1)
    return total


def bound(hull, n_bytes):
    """Lower bound of the loss within n_bytes: the hull, interpolated as if experts were
    divisible."""
    return float(np.interp(n_bytes, hull.n_bytes, hull.loss))


@given(st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_nothing_is_better_at_the_break_points(seed):
    """Compare the hull with all 4^6 choices, also for losses that do not fall with the tier.

    No choice is better at a break point. Between break points no choice is below the bound, and the
    allocation within a budget is at most as bad as the break point below it.
    """
    rng = np.random.default_rng(seed)
    losses = rng.random((2, 3, 4)) ** 3
    if seed % 2:
        losses = np.sort(losses, axis=2)
    hull = Hull(losses, SIZES)
    bytes_of, loss_of = every(np.repeat(SIZES, 3, axis=0)), every(losses.reshape(6, 4))

    def best(budget):
        return float(loss_of[bytes_of <= budget].min())

    assert (np.diff(hull.n_bytes) > 0).all() and (np.diff(hull.loss) < 0).all()
    for n_bytes, loss in zip(hull.n_bytes.tolist(), hull.loss.tolist(), strict=True):
        tiers = hull.at(n_bytes)
        assert taken(tiers, SIZES) == n_bytes
        assert total_loss(losses, tiers) == pytest.approx(loss)
        assert best(n_bytes) == pytest.approx(loss)
    budget = int(rng.integers(hull.least_bytes, hull.n_bytes[-1] + 5))
    tiers = hull.at(budget)
    below = hull.loss[hull.n_bytes <= budget][-1]
    assert taken(tiers, SIZES) <= budget
    assert bound(hull, budget) - 1e-12 <= best(budget)
    assert best(budget) <= total_loss(losses, tiers) + 1e-12 <= below + 2e-12


def test_a_budget_too_small_for_one_edge_goes_to_later_edges():
    """If the steepest edge does not fit the budget, that expert's further edges are skipped too,
    and flatter edges of other experts are used."""
    losses = np.array([[[0.0, 8.0, 9.0], [0.0, 0.5, 4.0]]])
    sizes = np.array([[9, 4, 1]])
    hull = Hull(losses, sizes)
    assert hull.at(2).tolist() == [[2, 2]]
    assert hull.at(5).tolist() == [[2, 1]]  # loss falls by 3.5 for 3 bytes
    assert hull.at(9).tolist() == [[2, 1]]
    # the edge of 9 for 8 bytes does not fit, that of 0.5 for 5 bytes does
    assert hull.at(10).tolist() == [[2, 0]]
    assert hull.at(13).tolist() == [[0, 1]]
    assert hull.at(1 << 40).tolist() == [[0, 0]]
    assert bound(hull, 8.5) == pytest.approx(9.5 - 9 * 3.5 / 8)
    assert hull.at(1).tolist() == hull.at(hull.least_bytes).tolist() == [[2, 2]]


SHARES = st.lists(
    st.builds(
        lambda unit, floor, more, weight: Share(unit, floor, floor + more, weight),
        st.integers(1, 5000),
        st.integers(0, 4),
        st.integers(0, 60),
        st.sampled_from([0.0, 0.3, 1.0, 2.5, 64.0]),
    ),
    min_size=1,
    max_size=8,
)


def needed(shares):
    return sum(share.unit_bytes * share.floor for share in shares)


@given(SHARES, st.integers(0, 10**6))
def test_divide_stays_within(shares, spare):
    budget = needed(shares) + spare
    units = divide(shares, budget)
    cost = sum(share.unit_bytes * n for share, n in zip(shares, units, strict=True))
    assert cost <= budget
    for share, n in zip(shares, units, strict=True):
        assert share.floor <= n <= max(share.floor, share.full)
        if share.weight > 0 and n < share.full:
            assert share.unit_bytes > budget - cost


@given(SHARES)
def test_divide_returns_the_floors_if_the_budget_is_too_small(shares):
    assert divide(shares, needed(shares) - 1) == [share.floor for share in shares]


def test_dymoe_holds_a_token_without_waves_before_it_caches():
    shape = make_shape()
    asked = DyMoE.Settings(retention=0.75)
    critical = placed(DyMoE, shape, asked).depth.critical
    one_token = sum(
        t * shape.expert_slot_bytes(layer, 0) + max(1, 4 - t) * shape.expert_slot_bytes(layer, 1)
        for layer, t in enumerate(critical)
    )
    plan = placed(DyMoE, shape, asked, budget=one_token).slots
    for layer, t in enumerate(critical):
        assert plan.groups[plan.group_of[layer, UP, 0]].n_slots == t
        assert plan.groups[plan.group_of[layer, UP, 1]].n_slots == max(1, 4 - t)


def test_dymoe_gives_spare_memory_to_high_slots():
    shape = make_shape()
    budget = 6 * 10 * shape.expert_slot_bytes(0, 0)
    policy = placed(DyMoE, shape, DyMoE.Settings(retention=0.75), budget=budget)
    plan = policy.slots
    low = [plan.groups[plan.group_of[layer, UP, 1]].n_slots for layer in range(6)]
    high = [plan.groups[plan.group_of[layer, UP, 0]].n_slots for layer in range(6)]
    assert low == [max(1, 4 - t) for t in policy.depth.critical]
    assert sum(high) > 6 * 7
    assert high == sorted(high, reverse=True)


PAPER = (4, 3, 2, 1)


def loss_of(counts, loss, weights=None):
    """Loss of a split. The first counts[0] experts get the first width, and so on."""
    columns = np.repeat(np.arange(len(counts)), counts)
    lost = loss[np.arange(len(loss)), columns]
    return float((lost if weights is None else lost * weights).sum())


def splits(n, widths, budget, most=None):
    """Yield each split within the budget in bits and the limit of slots per width (`most`)."""
    for counts in itertools.product(range(n + 1), repeat=len(widths)):
        if sum(counts) != n or sum(c * b for c, b in zip(counts, widths, strict=True)) > budget:
            continue
        if all(c <= m for c, m in zip(counts, most or counts, strict=True)):
            yield counts


@pytest.mark.parametrize("widths", [PAPER, (4, 3, 2), (4, 2, 1), (3, 1), (8, 4, 2), (4,)])
@pytest.mark.parametrize("falls", [True, False])
def test_prefix_split_is_the_best_of_all_splits(widths, falls):
    random = np.random.default_rng(len(widths))
    for n in range(1, 7):
        loss = random.random((n, len(widths)))
        if falls:
            loss.sort(axis=1)
        for budget in range(n * widths[-1], n * widths[0] + 2):
            every = list(splits(n, widths, budget))
            for weights in (None, np.sort(random.random(n))[::-1]):
                found = prefix_split(loss, widths, budget, weights)
                assert found in every
                least = min(loss_of(each, loss, weights) for each in every)
                assert loss_of(found, loss, weights) == pytest.approx(least, abs=1e-12)


def test_slots_limit_the_split():
    random = np.random.default_rng(5)
    loss = np.sort(random.random((5, 4)), axis=1)
    for most in itertools.product((1, 2, 5), repeat=4):
        every = list(splits(5, PAPER, 12, most))
        if not every:
            with pytest.raises(PolicyError, match="5 experts"):
                prefix_split(loss, PAPER, 12, most=most)
            continue
        found = prefix_split(loss, PAPER, 12, most=most)
        assert found in every
        assert loss_of(found, loss) == pytest.approx(min(loss_of(each, loss) for each in every))


def test_impossible_splits_are_refused():
    with pytest.raises(PolicyError, match=r"need more than 1\.83 bits"):
        prefix_split(np.ones((6, 2)), (4, 2), 11)
    with pytest.raises(PolicyError, match="each smaller than"):
        prefix_split(np.ones((6, 2)), (2, 4), 24)
    assert prefix_split(np.zeros((0, 4)), PAPER, 0) == (0, 0, 0, 0)


# Eq. 4 and 5 by hand: lambda, r(l) of each layer, M, t_l of each layer. The cosines of 5 layers are
# 1, sqrt(1/2), 0, -sqrt(1/2), -1; those of 7 layers 1, sqrt(3)/2, 1/2, 0, and the same negative;
# those of 4 layers 1, 1/2, -1/2, -1. If r(l) * M is a whole number, the ceiling does not change it.
BY_HAND = [
    (0.5, [1.0, 0.9267766953, 0.75, 0.5732233047, 0.5], 8, [8, 8, 6, 5, 4]),
    (0.0, [1.0, 0.8535533906, 0.5, 0.1464466094, 0.0], 8, [8, 7, 4, 2, 1]),
    (0.2, [1.0, 0.9464101615, 0.8, 0.6, 0.4, 0.2535898385, 0.2], 10, [10, 10, 8, 6, 4, 3, 2]),
    (0.25, [1.0, 0.8125, 0.4375, 0.25], 16, [16, 13, 7, 4]),
    (1.0, [1.0, 1.0, 1.0], 6, [6, 6, 6]),
    (0.3, [1.0, 0.3], 4, [4, 2]),
]


@pytest.mark.parametrize(("lam", "r", "m", "t"), BY_HAND)
def test_the_schedule_is_the_papers(lam, r, m, t):
    """r(l) = (1 - lambda) * (cos(pi * l / (L - 1)) + 1) / 2 + lambda, and t_l = ceil(r(l) * M).

    With lambda = 0 the last layer's t_l would be 0. It keeps one expert; this is our addition.
    """
    assert [(1 - lam) * c + lam for c in falling("cosine", len(r))] == pytest.approx(r, abs=1e-9)
    assert critical_counts(lam, len(r), m) == t


@given(
    st.floats(0.0, 1.0) | st.just(1.0),
    st.integers(2, 24),
    st.integers(1, 8),
    st.sampled_from(["cosine", "linear", "flat"]),
)
def test_the_solved_schedule_is_the_nearest_to_the_retention(retention, n_layers, m, schedule):
    counts = counts_for_retention(retention, n_layers, m, schedule)
    error = abs(realised(counts, m) - retention)
    for other in np.linspace(0, 1, 401):
        mean = realised(critical_counts(float(other), n_layers, m, schedule), m)
        assert error <= abs(mean - retention) + 1e-9
    assert retention < 1.0 or counts == [m] * n_layers


def test_shapes_of_the_schedules():
    assert falling("linear", 3) == [1.0, 0.5, 0.0]
    assert falling("flat", 5) == [0.0] * 5
    cosine, linear = falling("cosine", 9), falling("linear", 9)
    # the cosine falls more slowly at first
    assert all(a > b for a, b in zip(cosine[1:4], linear[1:4], strict=True))
    with pytest.raises(ConfigError, match="cosine, linear, flat"):
        falling("steep", 3)


@cases("retention, count", (0.0, 1), (0.25, 1), (0.5, 2), (0.75, 3), (1.0, 4))
def test_one_layer_keeps_the_share(retention, count):
    assert counts_for_retention(retention, 1, 4) == [count]


TRIAL_STEPS = 4 * BLOCK_STEPS


def run(monitor, n, with_us, without_us):
    """Report n decode steps with these costs in microseconds. Returns for each whether it
    prefetched."""
    ran = []
    for _ in range(n):
        ran.append(monitor.on)
        monitor.step_done(StepReport(Phase.DECODE, 1, with_us if monitor.on else without_us))
    return ran


@pytest.mark.parametrize("with_us", [80.0, 99.0, 100.0, 101.0])
def test_prefetch_stays_on_while_it_is_not_clearly_slower(with_us):
    monitor = Prefetching("auto", 1)
    ran = run(monitor, FIRST_STEPS + TRIAL_STEPS + PERIOD_STEPS, with_us, 100.0)
    assert monitor.pays
    assert ran.count(False) == 2 * BLOCK_STEPS
    assert ran[:FIRST_STEPS] == [True] * FIRST_STEPS


def test_prefetch_stops_if_it_costs_time_and_restarts():
    monitor = Prefetching("auto", 1)
    run(monitor, FIRST_STEPS + TRIAL_STEPS, 130.0, 100.0)
    assert not monitor.pays
    assert run(monitor, PERIOD_STEPS, 130.0, 100.0) == [False] * PERIOD_STEPS
    run(monitor, TRIAL_STEPS, 70.0, 100.0)
    assert monitor.pays


def test_trials_become_rarer_while_they_confirm():
    monitor = Prefetching("auto", 1)
    ran = run(monitor, 20 * LONGEST_STEPS, 70.0, 100.0)
    starts = [i for i in range(1, len(ran)) if ran[i - 1] and not ran[i]][::2]
    gaps = [b - a - TRIAL_STEPS for a, b in pairwise(starts)]
    assert gaps[:3] == [2 * PERIOD_STEPS, 4 * PERIOD_STEPS, 8 * PERIOD_STEPS]
    assert gaps[-1] == LONGEST_STEPS


def test_a_few_slow_steps_decide_nothing():
    monitor = Prefetching("auto", 1)
    run(monitor, FIRST_STEPS, 80.0, 100.0)
    for step in range(TRIAL_STEPS):
        us = 10_000.0 if step % 4 == 0 else 80.0 if monitor.on else 100.0
        monitor.step_done(StepReport(Phase.DECODE, 1, us))
    assert monitor.pays


def test_recall_and_precision():
    """Recall and precision of predicted experts (FIRM-MoE, eq. 7 and 8).

    Layer 0: two of four used experts were predicted, and two of three predicted experts are used.
    Layer 1: nothing was predicted. Layer 2: its experts are not observed.
    """
    seen = PredictionScore(4)
    for layer, expected, used in ((0, [5, 2, 7], [2, 7, 8, 9]), (1, [], [1, 2])):
        seen.expect(layer, expected)
        seen.observe(layer, used)
    seen.expect(2, [1])
    seen.observe(3, [1])  # nothing was predicted for layer 3
    assert seen.recall() == [0.5, 0.0, None, None]
    assert seen.precision() == [pytest.approx(2 / 3), None, None, None]
    assert seen.size() == [3.0, 0.0, None, None]


def test_transitions_reserve_slots_in_order():
    """Transitions reserve slots in order, each from the pool of its layer and tier.

    In tier 0 each of the two layers has its own pool; tiers 1 and 2 of both layers share one. A
    full pool takes no slot from another pool, and the iteration ends when all pools are full.
    """
    shared = [2]
    apart, together = np.array([0, 1]), np.array([0, 0])
    tracker = Tracker([[1, 0], shared, shared], [apart, together, together])
    looked = []

    def wanting():
        for move in ((1, 0, 0), (0, 1, 0), (0, 2, 0), (0, 3, 1), (1, 4, 2), (1, 5, 1), (0, 6, 0)):
            looked.append(move)
            yield move

    assert not tracker.full
    assert tracker.admitted(wanting()) == [(0, 1, 0), (0, 3, 1), (1, 4, 2)]
    assert tracker.full and looked[-1] == (1, 5, 1)
    assert not tracker.try_reserve(0, 2)
    tracker = Tracker([[-1, 1]], [np.array([0, 1])])
    assert tracker.admitted([(0, 0, 0), (1, 0, 0), (1, 1, 0)]) == [(1, 0, 0)]
    assert tracker.full
