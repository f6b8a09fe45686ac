"""Costs of an answer are differences of the store's counters."""

from types import SimpleNamespace

import numpy as np
import pytest

from orchestrator.allocation.estimate import KlEstimate
from orchestrator.events import SKIP_TIER, Phase
from orchestrator.native.abi import MAX_TIERS, CStats
from orchestrator.runtime.loss_meter import LossMeter
from orchestrator.runtime.report import StoreCosts


def counted(times):
    """Counters of a store, multiplied by `times`."""
    stats = CStats()
    for phase, scale in ((Phase.PREFILL, 3), (Phase.DECODE, 1)):
        stats.requests[phase], stats.hits[phase] = 40 * times * scale, 30 * times
        stats.demand_bytes[phase], stats.prefetch_bytes[phase] = 100 * times, 10 * times
        stats.wait_us[phase] = 2000 * times
        stats.routed[phase][0], stats.routed[phase][MAX_TIERS] = 9 * times, times
        stats.computed[phase][0], stats.computed[phase][1] = 6 * times, 2 * times
    stats.transition_bytes = 1000 * times
    return stats


@pytest.mark.parametrize("skip", [True, False])
def test_costs_are_differences_of_counters(skip):
    found = [counted(2), counted(5)]
    store = SimpleNamespace(
        stats=lambda: found.pop(0), calls=7, callback_us=lambda since: float(since)
    )
    costs = StoreCosts(store, ("q8_0", "q4_k"), skip).fields()
    assert costs["hit_rate"] == 30 / 40 and costs["prefill_hit_rate"] == 30 / 120
    assert costs["bytes_read"] == 3 * (1000 + 2 * 110) and costs["wait_ms"] == 3 * 2 * 2.0
    assert costs["mix"] == {"q8_0": 0.9, "q4_k": 0.0, **({SKIP_TIER: 0.1} if skip else {})}
    assert costs["computed"] == {"q8_0": 0.75, "q4_k": 0.25}
    assert costs["callback_us_p50"] == 7.0
    assert costs["kl_estimate"] is None and not costs["limit_halved"]


def test_the_estimated_loss_has_the_spread_between_texts():
    meter = LossMeter(KlEstimate("q8_0", np.zeros((1, 2, 2)), np.ones((1, 2)), 0.25), True)
    meter.halved = True
    meter.step_done(Phase.DECODE, 5)
    store = SimpleNamespace(stats=lambda: counted(1), calls=0, callback_us=lambda since: 0.0)
    for halved in (True, False):
        costs = StoreCosts(store, ("q8_0",), True, meter)
        meter.halved = halved
        meter.nats[Phase.DECODE] += 0.08
        meter.step_done(Phase.DECODE, 4)
        said = costs.fields()
        assert said["kl_estimate"] == pytest.approx(0.02)
        assert said["kl_low"] == pytest.approx(0.005)
        assert said["limit_halved"] == halved
