"""Experts that move from one placement to the next, with reads that take several steps each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from orchestrator.allocation.slots import SlotPlan, Transition


def settle(
    plan: SlotPlan,
    resident: np.ndarray,
    rng: np.random.Generator,
    moves_for: Callable[[np.ndarray], Sequence[Transition]],
) -> np.ndarray:
    """Lets experts move until none is under way. resident uint8 [n_layers, n_expert] is brought up
    to date; moves_for: what is asked for, by the target of each expert. An expert is never asked
    for while it moves, and nowhere are more slots taken than there are. Returns how often each
    moved."""
    moved = np.zeros(resident.shape, int)
    under_way: dict[tuple[int, int], tuple[int, int]] = {}
    for _ in range(400):
        target = resident.copy()
        for at, (tier, _) in under_way.items():
            target[at] = tier
        used = [0] * len(plan.groups)
        for (layer, _, tier), group in plan.group_of.items():
            used[group] += int(((resident[layer] == tier) | (target[layer] == tier)).sum())
        assert all(n <= group.n_slots for n, group in zip(used, plan.groups, strict=True))
        for layer, expert, tier in moves_for(target):
            assert (layer, expert) not in under_way and tier != resident[layer, expert]
            under_way[layer, expert] = tier, int(rng.integers(1, 4))
            moved[layer, expert] += 1
        if not under_way:
            break
        for at, (tier, left) in list(under_way.items()):
            if left > 1:
                under_way[at] = tier, left - 1
            else:
                resident[at] = tier
                del under_way[at]
    return moved
