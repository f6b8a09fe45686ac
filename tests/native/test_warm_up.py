"""Warm-up steps, which measure memory when a model is loaded, have no lasting effect."""

import numpy as np
import pytest

from .conftest import opened

POLICIES = (
    {"policy": "lru", "expert_ram": 300_000},
    {"policy": "dynaexq", "expert_ram": 2_200_000, "update_steps": 1},
    {"policy": "context", "expert_ram": 2_200_000},
)
# tiers of warm-up steps: those that the policy requests, or the resident ones
TIERS = (
    ({"policy": "dymoe", "retention": 0.5, "expert_ram": 700_000}, {0, 1}),
    ({"policy": "dymoe", "retention": 0.5, "low_tier": "skip", "expert_ram": 500_000}, {0}),
    *((settings, {0, 1}) for settings in POLICIES[1:]),
)


@pytest.mark.parametrize("settings", POLICIES, ids=lambda each: each["policy"])
def test_a_warm_up_has_no_lasting_effect(both, settings):
    rows = []
    for warm in (False, True):
        with opened(both, ctx=64, ubatch=16, **settings) as runtime, runtime.evaluator() as e:
            if warm:
                e.inside.loaded.warm_up()
                stats = e.inside.store.stats()
                assert not any(stats.requests) and not any(map(sum, stats.routed))
                assert not e.inside.store.take_counts().any()
                # it reads one expert per layer and tier
                assert (e.inside.store.resident() < 255).any()
            rows.append(e.eval([5, 6, 7, 8], 0))
            e.inside.store.check()
    if settings["policy"] == "lru":  # other policies compute with the resident tiers
        np.testing.assert_array_equal(rows[0], rows[1])


@pytest.mark.parametrize(("settings", "tiers"), TIERS)
def test_a_warm_up_computes_in_each_tier(both, monkeypatch, settings, tiers):
    """A warm-up computes in each tier of the policy.

    A GPU kernel takes memory at its first launch, so each type must be computed once.
    """
    with opened(both, ctx=64, ubatch=16, **settings) as runtime, runtime.evaluator() as e:
        forget = e.inside.store.reset_stats
        found = set()

        def look():
            for phase in e.inside.store.stats().computed:
                found.update(tier for tier, n in enumerate(phase) if n)
            forget()

        monkeypatch.setattr(e.inside.store, "reset_stats", look)
        e.inside.loaded.warm_up()
        assert found == tiers
