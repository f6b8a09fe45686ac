"""--exact: what it stands for, and what it does not go with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.errors import ConfigError, MoeEdgeError, PolicyError
from orchestrator.memory.choice import check_unused
from orchestrator.memory.layouts import wants_own_layout
from orchestrator.memory.machine import Machine
from orchestrator.memory.plan import MemoryPlan, plan_memory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return synthetic.write(path, "tiny-olmoe", tiers=("q4_k", "q2_k"))


def planned(model: Path, **settings: Any) -> tuple[Config, MemoryPlan]:
    config = Config.build(model=model, ctx=256, exact=True, **settings)
    check_unused(config)
    with ExpertModel.open(model) as opened:
        return config, plan_memory(config, opened, Machine(8 << 30))


def test_weights_stay_as_they_are_in_the_file(model: Path) -> None:
    config, plan = planned(model, policy="lru", force_managed=True)
    assert (config.layout, config.use_extra_bufts) == ("file", False)
    assert not wants_own_layout(config, plan)
    without = config.with_changes(exact=False, layout="auto", use_extra_bufts=None)
    assert wants_own_layout(without, plan)


def test_the_plain_path_repacks_nothing(model: Path) -> None:
    config, plan = planned(model)
    assert not plan.managed and config.use_extra_bufts is False


@pytest.mark.parametrize("policy", [None, "lru", "dymoe", "firm"])
def test_experts_are_in_one_precision(policy: str | None, model: Path) -> None:
    _, plan = planned(model, policy=policy, expert_ram=1 << 20)
    assert plan.tiers == (0,) and not plan.skip
    assert plan.policy is not None and (plan.policy.asked_mix(np.ones((1, 1))) == 1.0).all()
    for name, value in (plan.policy.precisions.lossless or {}).items():
        assert getattr(plan.policy.settings, name) == value


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"layout": "cpu"}, ConfigError, "--layout cpu"),
        ({"low_tier": "skip"}, ConfigError, "leave --low and --low-tier out"),
        ({"policy": "dymoe", "retention": 0.5}, ConfigError, "--retention 0.5 does not"),
        ({"policy": "dynaexq"}, PolicyError, "the policy dynaexq keeps some in lower ones"),
        ({"policy": "context"}, PolicyError, "the policy context keeps some in lower ones"),
    ],
)
def test_what_it_does_not_go_with(
    settings: dict[str, Any], error: type[MoeEdgeError], sentence: str, model: Path
) -> None:
    with pytest.raises(error, match=sentence):
        planned(model, expert_ram=1 << 20, **settings)
