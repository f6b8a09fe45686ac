"""`mixed` end to end: every expert in memory in the tier of its plan, and experts that exchange
their tiers while it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from orchestrator.cache import profile
from orchestrator.engine.engine import Engine
from orchestrator.policy.mixed import Mixed

from .test_dynaexq import PLENTY, arrive, build, logits, run

pytestmark = pytest.mark.usefixtures("library_folder")

THREE = ("q8_0", "q4_k", "q2_k")


@pytest.fixture
def three(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3moe", *THREE)


def policy_of(engine: Engine) -> Mixed:
    assert isinstance(engine.policy, Mixed)
    return engine.policy


def test_with_room_for_the_best_it_is_the_best(
    three: Path, tiny_model: Callable[..., Path]
) -> None:
    found = run(three, policy="mixed", expert_ram=PLENTY)
    np.testing.assert_array_equal(found, run(tiny_model("qwen3moe", "q8_0")))


def test_the_plan_goes_by_the_profile_and_nothing_waits(three: Path, tmp_path: Path) -> None:
    """The experts that alone are used are in the best tier."""
    path = tmp_path / "profile.json"
    starts = []
    with Engine.open(build(three, policy="mixed", expert_ram=PLENTY)) as engine:
        model, n_bytes = engine.model, engine.plan.slots.total_bytes * 6 // 10
        for used in (
            np.ones((model.n_layers, model.n_expert)),
            np.eye(model.n_layers, model.n_expert),
        ):
            profile.save(path, model, used)
            options = {"policy": "mixed", "expert_ram": n_bytes, "profile": path}
            with Engine.open(build(three, update_steps=0, **options)) as other:
                starts.append(other.store.resident())
                assert other.plan.slots.total_bytes <= n_bytes
                logits(other)
                assert sum(other.store.stats().wait_us) == 0
                assert (other.store.resident() == starts[-1]).all()
    assert (starts[0] != starts[1]).any()
    at = np.arange(len(starts[1]))
    assert (starts[1][at, at] == 0).all()


def test_experts_exchange_their_tiers_while_it_runs(three: Path) -> None:
    """As many of each tier as before; what is used most moves up."""
    with Engine.open(build(three, policy="mixed", expert_ram=PLENTY)) as engine:
        n_bytes = engine.plan.slots.total_bytes * 6 // 10
    options = {"policy": "mixed", "expert_ram": n_bytes, "update_steps": 4, "hysteresis": 0.0}
    with Engine.open(build(three, transition_rate=0, **options)) as engine:
        before = engine.store.resident().copy()
        for _ in range(6):
            logits(engine)
            arrive(engine)
        policy = policy_of(engine)
        told = policy.report()
        after = engine.store.resident()
        assert told["exchanges"] > 0 and (before != after).any()
        counts = np.bincount(before.ravel(), minlength=3).tolist()
        assert list(told["experts"].values()) == counts
        assert ((before == 0).sum() >= (after == 0).sum()) and (after < 3).all()
        used = policy.hotness
        assert used[after < before].mean() > used[after > before].mean()
        assert engine.store.stats().transitions_failed == 0
        engine.store.check()
