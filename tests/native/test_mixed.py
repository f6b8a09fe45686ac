"""`mixed` on a model.

Every expert is resident in its planned tier, and experts exchange their tiers while the model runs.
"""

import numpy as np

from orchestrator.cache import profile

from .test_dynaexq import arrive, logits, opened


def test_the_plan_follows_the_profile_and_no_token_waits(three, tmp_path):
    """The experts that the profile lists as used are in the best tier."""
    path = tmp_path / "profile.json"
    starts = []
    with opened(three, policy="mixed") as runtime, runtime.evaluator() as e:
        model, n_bytes = e.inside.model, e.plan.slots.total_bytes * 6 // 10
        for used in (
            np.ones((model.n_layers, model.n_expert)),
            np.eye(model.n_layers, model.n_expert),
        ):
            profile.save(path, model, used)
            options = {"policy": "mixed", "expert_ram": n_bytes, "profile": path}
            with (
                opened(three, update_steps=0, **options) as other,
                other.evaluator() as asked,
            ):
                store = asked.inside.store
                starts.append(store.resident())
                assert asked.plan.slots.total_bytes <= n_bytes
                logits(asked)
                assert sum(store.stats().wait_us) == 0
                assert (store.resident() == starts[-1]).all()
    assert (starts[0] != starts[1]).any()
    at = np.arange(len(starts[1]))
    assert (starts[1][at, at] == 0).all()


def test_experts_exchange_their_tiers_while_it_runs(three):
    """The number of experts in each tier stays, and the most used experts are promoted."""
    with opened(three, policy="mixed") as runtime, runtime.evaluator() as e:
        n_bytes = e.plan.slots.total_bytes * 6 // 10
    options = {"update_steps": 4, "hysteresis": 0.0, "transition_rate": 0}
    with (
        opened(three, policy="mixed", expert_ram=n_bytes, **options) as runtime,
        runtime.evaluator() as e,
    ):
        before = e.inside.store.resident().copy()
        for _ in range(6):
            logits(e)
            arrive(e)
        report, after = e.inside.policy.report(), e.inside.store.resident()
        assert report["exchanges"] > 0 and (before != after).any()
        counts = np.bincount(before.ravel(), minlength=3).tolist()
        assert list(report["experts"].values()) == counts
        assert ((before == 0).sum() >= (after == 0).sum()) and (after < 3).all()
        used = e.inside.policy.learned().hotness
        assert used[after < before].mean() > used[after > before].mean()
        assert e.inside.store.stats().transitions_failed == 0
        e.inside.store.check()
