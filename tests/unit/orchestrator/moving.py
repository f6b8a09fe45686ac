"""A simulated store whose transitions (experts that change their tier) take several steps each."""

import numpy as np

from orchestrator.events import ABSENT


def started(policy):
    """The tier of each expert after the start, uint8 [n_layers, n_expert]."""
    tiers = np.full((policy.shape.n_layers, policy.shape.n_expert), ABSENT, np.uint8)
    for layer, expert, tier in policy.warm():
        tiers[layer, expert] = tier
    return tiers


class MovingStore:
    """The native store's transitions in Python.

    Asserts that no expert in transition gets a second transition, and that no slot group exceeds
    its number of slots.
    """

    def __init__(self, plan, tiers):
        """tiers: uint8 [n_layers, n_expert], updated in place."""
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
        """Advance every transition by one step. A finished transition changes `tiers`, unless it
        fails."""
        for at, (tier, left, fails) in list(self.way.items()):
            self.way[at] = tier, left - 1, fails
            if left == 1:
                del self.way[at]
                self.tiers[at] = self.tiers[at] if fails else tier


def settle(plan, resident, rng, moves_for):
    """Run steps until no transition is in progress.

    resident: tiers of the experts, updated in place. moves_for: function that returns the requested
    transitions for the target tier of each expert. Returns how often each expert moved.
    """
    store = MovingStore(plan, resident)
    for _ in range(400):
        for move in moves_for(store.target):
            store.transition([move], int(rng.integers(1, 4)))
        if not store.way:
            break
        store.begin_step()
    return store.moved
