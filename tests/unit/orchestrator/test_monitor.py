"""Prefetching stops while it does not pay, and says how well it predicts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from orchestrator.allocation.look_ahead import (
    BLOCK_STEPS,
    FIRST_STEPS,
    LONGEST_STEPS,
    PERIOD_STEPS,
    PredictionScore,
    Prefetching,
)
from orchestrator.events import Phase, StepReport

TRIAL_STEPS = 4 * BLOCK_STEPS


def run(monitor: Prefetching, n: int, with_us: float, without_us: float) -> list[bool]:
    """n steps of these costs; whether each of them prefetched."""
    ran = []
    for _ in range(n):
        ran.append(monitor.on)
        monitor.step_done(StepReport(Phase.DECODE, 1, with_us if monitor.on else without_us))
    return ran


@pytest.mark.parametrize("with_us", [80.0, 99.0, 100.0, 101.0])
def test_it_stays_while_nothing_else_is_clearly_better(with_us: float) -> None:
    monitor = Prefetching("auto", 1)
    ran = run(monitor, FIRST_STEPS + TRIAL_STEPS + PERIOD_STEPS, with_us, 100.0)
    assert monitor.pays
    assert ran.count(False) == 2 * BLOCK_STEPS
    assert ran[:FIRST_STEPS] == [True] * FIRST_STEPS


def test_it_stops_where_it_costs_and_comes_back() -> None:
    monitor = Prefetching("auto", 1)
    run(monitor, FIRST_STEPS + TRIAL_STEPS, 130.0, 100.0)
    assert not monitor.pays
    assert run(monitor, PERIOD_STEPS, 130.0, 100.0) == [False] * PERIOD_STEPS
    run(monitor, TRIAL_STEPS, 70.0, 100.0)
    assert monitor.pays


def test_trials_grow_rare_while_they_confirm() -> None:
    monitor = Prefetching("auto", 1)
    ran = run(monitor, 20 * LONGEST_STEPS, 70.0, 100.0)
    starts = [i for i in range(1, len(ran)) if ran[i - 1] and not ran[i]][::2]
    gaps = [b - a - TRIAL_STEPS for a, b in pairwise(starts)]
    assert gaps[:3] == [2 * PERIOD_STEPS, 4 * PERIOD_STEPS, 8 * PERIOD_STEPS]
    assert gaps[-1] == LONGEST_STEPS


def test_a_few_slow_steps_decide_nothing() -> None:
    monitor = Prefetching("auto", 1)
    run(monitor, FIRST_STEPS, 80.0, 100.0)
    for step in range(TRIAL_STEPS):
        monitor.step_done(
            StepReport(
                Phase.DECODE, 1, 10_000.0 if step % 4 == 0 else 80.0 if monitor.on else 100.0
            )
        )
    assert monitor.pays


def test_recall_and_precision() -> None:
    """FIRM-MoE's eq. 7 and 8. Of layer 0 two of the four in use were expected, and two of the three
    expected are used. Nothing was expected of layer 1, and what was of layer 2 is not seen."""
    seen = PredictionScore(4)
    for layer, expected, used in ((0, [5, 2, 7], [2, 7, 8, 9]), (1, [], [1, 2])):
        seen.expect(layer, expected)
        seen.observe(layer, used)
    seen.expect(2, [1])
    seen.observe(3, [1])  # another layer than the one of which something was expected
    assert seen.recall() == [0.5, 0.0, None, None]
    assert seen.precision() == [pytest.approx(2 / 3), None, None, None]
    assert seen.size() == [3.0, 0.0, None, None]
