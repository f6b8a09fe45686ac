"""Policies that are not told of every step decide what they would decide if they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from moving import MovingStore, started
from shapes import five_tiers, make_shape

from orchestrator.allocation.estimate import KlEstimate
from orchestrator.allocation.slots import ModelShape, SlotPlan, Transition
from orchestrator.engine.driver import Driver
from orchestrator.engine.loss_meter import LossMeter
from orchestrator.events import ComputedStep, Phase
from orchestrator.native import Store
from orchestrator.policy.dynaexq import DynaExq
from orchestrator.policy.learning import Learning
from orchestrator.policy.mixed import LOOK_US, Mixed

N_STEPS = 400


class Always(Mixed):
    """Told of every step."""

    def wants_report(self, phase: Phase) -> bool:
        return True


class AlwaysHot(DynaExq):
    """Told of every step."""

    def wants_report(self, phase: Phase) -> bool:
        return True


class FakeStore(MovingStore):
    """Counts what it is given, and brings what it is asked for some steps later."""

    def __init__(self, policy: Learning, plan: SlotPlan, seed: int) -> None:
        super().__init__(plan, started(policy))
        self._rng = np.random.default_rng(seed)
        self.step_counts = np.zeros(self.tiers.shape, np.uint32)
        self.looks = self.number = 0
        self.asked: list[tuple[int, Transition]] = []

    def take_counts(self) -> np.ndarray:
        counts, self.step_counts = self.step_counts, np.zeros_like(self.step_counts)
        return counts

    def states(self) -> tuple[np.ndarray, np.ndarray]:
        self.looks += 1
        return self.tiers.copy(), self.target

    def transition(self, moves: Sequence[Transition]) -> int:
        for move in moves:
            self.asked.append((self.number, move))
            super().transition([move], int(self._rng.integers(1, 4)))
        return len(moves)

    def begin_step(self) -> None:
        self.number += 1
        super().begin_step()


def run(
    policy: Learning, shape: ModelShape, budget: int, seed: int, us: float = LOOK_US
) -> tuple[Any, ...]:
    """What comes of a run whose use of experts changes in its middle; prompts come between. us: of
    a step."""
    rng = np.random.default_rng(seed)
    policy.set_hotness(rng.random((shape.n_layers, shape.n_expert)) ** 2)
    store = FakeStore(policy, policy.plan(budget), seed)
    driver = Driver(policy, cast(Store, store))
    size = shape.n_layers, shape.n_expert
    nats = rng.random((*size, len(shape.tiers) + 1)).cumsum(axis=2)
    driver.meter = LossMeter(KlEstimate(shape.tiers[0], nats, np.ones(size)), exact=False)
    use = rng.random(size) ** 6
    for number in range(N_STEPS):
        if number == N_STEPS // 2:
            use = rng.permuted(use, axis=1)
        phase = Phase.PREFILL if number % 50 == 17 else Phase.DECODE
        n_tokens = 9 if phase is Phase.PREFILL else 1
        store.begin_step()
        store.step_counts = rng.poisson(n_tokens * use / use.mean()).astype(np.uint32)
        driver.step_done(ComputedStep(number, phase, n_tokens, us, (), (), ()))
    totals = [driver.meter.mean(phase) for phase in Phase]
    return store.asked, policy.hotness.tolist(), policy.updates, totals, store.looks


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("policies", "shape", "share"),
    [((Mixed, Always), five_tiers(), 0.4), ((DynaExq, AlwaysHot), make_shape(), 0.75)],
    ids=["mixed", "dynaexq"],
)
def test_it_decides_the_same(
    policies: tuple[type[Learning], type[Learning]], shape: ModelShape, share: float, seed: int
) -> None:
    budget = int(share * shape.all_slot_bytes())
    found = [
        run(policy(shape, policy.Settings(update_steps=32)), shape, budget, seed)
        for policy in policies
    ]
    (asked, hotness, updates, totals, looks), (same, hot, as_often, whole, every) = found
    assert asked == same and len(asked) > 4
    assert hotness == hot and updates == as_often
    assert totals == pytest.approx(whole)
    assert looks < 0.8 * every == 0.8 * N_STEPS


@pytest.mark.parametrize("seed", range(3))
def test_fast_tokens_do_not_each_look_after_what_moves(seed: int) -> None:
    """As many experts change their tiers, some steps later, and less than half of the looks between
    two updates do. What they are foreseen to lose lags as much."""
    shape = five_tiers()
    budget = int(0.4 * shape.all_slot_bytes())
    slow, fast = (
        run(Mixed(shape, Mixed.Settings(update_steps=32)), shape, budget, seed, us)
        for us in (LOOK_US, LOOK_US / 8)
    )
    (moved, hotness, updates, totals, looks), (as_many, same, as_often, later, fewer) = slow, fast
    assert len(moved) == len(as_many) > 4
    assert hotness == same and updates == as_often
    assert fewer - updates < (looks - updates) / 2
    assert later == pytest.approx(totals, rel=0.05)
