"""Budgets divided into slots: never over, no group without a slot, no waste."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import DOWN, GATE, UP, make_shape

from orchestrator.allocation.slots import Share, divide
from orchestrator.errors import BudgetError
from orchestrator.policy import policy_class
from orchestrator.policy.dymoe import DyMoE

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


def needed(shares: list[Share]) -> int:
    return sum(share.unit_bytes * share.floor for share in shares)


@given(SHARES, st.integers(0, 10**6))
def test_divide_stays_within(shares: list[Share], spare: int) -> None:
    budget = needed(shares) + spare
    units = divide(shares, budget)
    cost = sum(share.unit_bytes * n for share, n in zip(shares, units, strict=True))
    assert cost <= budget
    for share, n in zip(shares, units, strict=True):
        assert share.floor <= n <= max(share.floor, share.full)
        if share.weight > 0 and n < share.full:
            assert share.unit_bytes > budget - cost


@given(SHARES)
def test_divide_refuses_less_than_the_floors(shares: list[Share]) -> None:
    least = needed(shares)
    if least == 0:
        return
    with pytest.raises(BudgetError) as caught:
        divide(shares, least - 1)
    assert caught.value.needed_bytes == least


@pytest.mark.parametrize("name", ["lru", "dymoe"])
@pytest.mark.parametrize("spare", [0, 5000, 10**6, 10**8])
def test_plans(name: str, spare: int) -> None:
    shape = make_shape()
    policy = policy_class(name)(shape)
    with pytest.raises(BudgetError) as caught:
        policy.plan(1)
    budget = caught.value.needed_bytes + spare
    plan = policy.plan(budget)
    assert plan.total_bytes <= budget
    assert all(group.n_slots >= 1 for group in plan.groups)
    tiers = range(1 if name == "lru" else 2)
    wanted = {
        (layer, kind, tier)
        for layer in range(shape.n_layers)
        for tier in tiers
        for kind in (UP, GATE, DOWN)
    }
    assert set(plan.group_of) == wanted
    for (layer, kind, tier), group in plan.group_of.items():
        assert plan.groups[group].slot_bytes >= shape.slots[layer][tier][kind]
    with pytest.raises(BudgetError):
        policy.plan(caught.value.needed_bytes - 1)


def test_dymoe_holds_a_token_without_waves_before_it_caches() -> None:
    shape = make_shape()
    policy = DyMoE(shape, DyMoE.Settings(retention=0.75))
    one_token = sum(
        t * shape.expert_slot_bytes(layer, 0) + max(1, 4 - t) * shape.expert_slot_bytes(layer, 1)
        for layer, t in enumerate(policy.critical)
    )
    plan = policy.plan(one_token)
    for layer, t in enumerate(policy.critical):
        assert plan.groups[plan.group_of[layer, UP, 0]].n_slots == t
        assert plan.groups[plan.group_of[layer, UP, 1]].n_slots == max(1, 4 - t)


def test_dymoe_gives_spare_memory_to_high_slots() -> None:
    shape = make_shape()
    policy = DyMoE(shape, DyMoE.Settings(retention=0.75))
    plan = policy.plan(6 * 10 * shape.expert_slot_bytes(0, 0))
    low = [plan.groups[plan.group_of[layer, UP, 1]].n_slots for layer in range(6)]
    high = [plan.groups[plan.group_of[layer, UP, 0]].n_slots for layer in range(6)]
    assert low == [max(1, 4 - t) for t in policy.critical]
    assert sum(high) > 6 * 7
    assert high == sorted(high, reverse=True)
