"""Experts that move from one tier to another, with reads that take several steps each."""

import numpy as np

from orchestrator.events import ABSENT


def started(policy):
    """The tier of each expert after the start, uint8 [n_layers, n_expert]."""
    tiers = np.full((policy.shape.n_layers, policy.shape.n_expert), ABSENT, np.uint8)
    for layer, expert, tier in policy.warm():
        tiers[layer, expert] = tier
    return tiers


class MovingStore:
    """What the native store does with transitions, in Python. An expert is never asked for while
    it moves, and nowhere are more slots taken than there are."""

    def __init__(self, plan, tiers):
        """tiers uint8 [n_layers, n_expert] is brought up to date."""
        self.plan, self.tiers = plan, tiers
        self.moved = np.zeros(tiers.shape, int)
        self.way: dict[tuple[int, int], tuple[int, int, bool]] = {}
        self._check()

    @property
    def target(self):
        target = self.tiers.copy()
        for at, (tier, _, _) in self.way.items():
            target[at] = tier
        return target

    def _check(self):
        target, used = self.target, [0] * len(self.plan.groups)
        for (layer, _, tier), group in self.plan.group_of.items():
            used[group] += int(((self.tiers[layer] == tier) | (target[layer] == tier)).sum())
        assert all(n <= group.n_slots for n, group in zip(used, self.plan.groups, strict=True))

    def transition(self, moves, steps=1, fails=False):
        for layer, expert, tier in moves:
            assert (layer, expert) not in self.way and tier != self.tiers[layer, expert]
            self.way[layer, expert] = tier, steps, fails
            self.moved[layer, expert] += 1
        self._check()

    def begin_step(self):
        """What has arrived is in its tier."""
        for at, (tier, left, fails) in list(self.way.items()):
            self.way[at] = tier, left - 1, fails
            if left == 1:
                del self.way[at]
                self.tiers[at] = self.tiers[at] if fails else tier


def settle(plan, resident, rng, moves_for):
    """Lets experts move until none is under way. resident is brought up to date; moves_for: what
    is asked for, by the target of each expert. Returns how often each moved."""
    store = MovingStore(plan, resident)
    for _ in range(400):
        for move in moves_for(store.target):
            store.transition([move], int(rng.integers(1, 4)))
        if not store.way:
            break
        store.begin_step()
    return store.moved
