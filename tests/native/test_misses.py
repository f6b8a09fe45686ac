"""How a device serves misses (`--misses`): logits are the same for every setting.

The device is main memory, whose executor reads experts in place. tests/native/cuda tests a GPU.
"""

import numpy as np
import pytest

from orchestrator.errors import ConfigError

from .conftest import build, drawn, greedy, opened

PROMPT = drawn(12, 2)
# With exact tiers, the computed tier does not depend on residency.
POLICIES = {
    "lru": {"policy": "lru", "expert_ram": 300_000},
    "dymoe 4/2": {"retention": 0.5, "expert_ram": 700_000, "exact_tiers": True},
    "dymoe 4/0": {"retention": 0.5, "expert_ram": 500_000, "low_tier": "skip"},
}


def decode(model, n, **options):
    """Return the logits of each token, the store's counters, and the status line on misses."""
    with opened(model, **{"device": "host:100", **options}) as runtime, runtime.evaluator() as e:
        rows = greedy(e, PROMPT, n)
        e.inside.store.check()
        how = runtime.mode.rpartition("misses: ")[2].partition(", micro-batch")[0]
        return rows, e.inside.store.stats(), how


@pytest.mark.parametrize("name", POLICIES)
def test_logits_do_not_depend_on_misses(both, name):
    wanted, copied, how = decode(both, 12, **POLICIES[name], misses="copy")
    assert how == "copy" and sum(copied.host_computed) == 0
    rows, stats, how = decode(both, 12, **POLICIES[name], misses="compute")
    assert how == "compute"
    assert np.array_equal(rows, wanted)
    # in a prompt only the last layer has few tokens, so the host computes only that layer
    assert stats.host_computed[0] <= 2 * 3 < stats.host_computed[1]
    assert stats.host_computed_bytes[1] > stats.host_computed[1]
    # experts that the host computed are copied to slots afterwards, except with exact tiers
    assert (stats.copy_bytes[1] > 0) != ("exact_tiers" in POLICIES[name])
    assert sum(stats.routed[1]) == sum(copied.routed[1])
    assert stats.slot_bytes_peak <= stats.budget_bytes


def test_without_measured_speeds_all_misses_are_copied(both):
    for misses in (None, "auto"):
        _, stats, how = decode(both, 2, **POLICIES["lru"], misses=misses)
        assert how == "copy (auto is not possible)" and sum(stats.host_computed) == 0


def test_misses_need_a_gpu(one):
    with pytest.raises(ConfigError, match="--misses has no effect without a GPU"):
        opened(one, device="cpu", misses="copy")
    with pytest.raises(ConfigError, match="auto, copy or compute, not 'swap'"):
        build(one, misses="swap")
