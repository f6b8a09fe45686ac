"""The plan's part for prompts that were read before, and for keys and values of a precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.errors import BudgetError, ConfigError
from orchestrator.memory.footprint import PROMPT_SHARE, part_bytes
from orchestrator.memory.machine import Machine
from orchestrator.memory.plan import MemoryPlan, plan_memory

MIB = 2**20
ROOMY = Machine(64 * 2**30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ExpertModel:
    path = tmp_path_factory.mktemp("plan") / "model.gguf"
    shape = replace(synthetic.preset("tiny-qwen3moe"), n_expert=64)
    return ExpertModel.open(synthetic.write(path, shape, tiers=("q4_k",)))


def plan_for(model: ExpertModel, machine: Machine = ROOMY, **settings: Any) -> MemoryPlan:
    return plan_memory(Config.build(model=model.path, ctx=512, **settings), model, machine)


def test_conversations_get_one_more_context(model: ExpertModel) -> None:
    assert plan_for(model).prompt_bytes == 0
    plan = plan_for(model, conversations=True)
    assert plan.prompt_bytes == plan.kv_bytes
    assert plan.total_bytes == plan_for(model).total_bytes + plan.kv_bytes


def test_where_it_costs_experts_it_is_a_small_share(model: ExpertModel) -> None:
    usual = plan_for(model, policy="lru")
    ram = usual.total_bytes - model.tier_bytes[0] // 2
    without = plan_for(model, policy="lru", ram=ram)
    plan = plan_for(model, policy="lru", ram=ram, conversations=True)
    left = without.budget_bytes
    assert 0 < plan.prompt_bytes <= PROMPT_SHARE * left
    assert plan.budget_bytes == left - plan.prompt_bytes
    assert plan.total_bytes <= ram


def test_what_fits_whole_still_does(model: ExpertModel) -> None:
    least = plan_for(model).total_bytes
    for spare in (0, 1000, MIB):
        plan = plan_for(model, ram=least + spare, conversations=True)
        assert not plan.managed
        assert plan.prompt_bytes <= spare


def test_what_is_asked_for_is_set_aside_or_refused(model: ExpertModel) -> None:
    assert plan_for(model, cache_ram=3 * MIB).prompt_bytes == 3 * MIB
    assert plan_for(model, cache_ram=0, conversations=True).prompt_bytes == 0
    with pytest.raises(BudgetError) as least:
        plan_for(model, policy="lru", ram=MIB)
    enough = least.value.needed_bytes
    plan_for(model, policy="lru", ram=enough)
    plan_for(model, policy="lru", ram=enough, conversations=True)  # goes without
    with pytest.raises(BudgetError) as more:
        plan_for(model, policy="lru", ram=enough, cache_ram=3 * MIB)
    assert more.value.needed_bytes == enough + 3 * MIB
    plan_for(model, policy="lru", ram=enough + 3 * MIB, cache_ram=3 * MIB)


def test_a_memory_that_cannot_be_cut_gets_marks(model: ExpertModel) -> None:
    config = Config.build(model=model.path)
    assert part_bytes(model, config) == 0
    recurrent = {"ssm.inner_size": 4096, "ssm.state_size": 128, "ssm.group_count": 16}
    model.metadata.update({f"qwen3moe.{key}": n for key, n in recurrent.items()})
    model.metadata["qwen3moe.ssm.conv_kernel"] = 4
    try:
        # of Qwen3-Next: 2 MiB of state a layer, and three columns of what is convolved
        assert part_bytes(model, config) == 3 * 4 * (128 * 4096 + 3 * 8192)
        plan = plan_for(model, conversations=True)
        assert plan.prompt_bytes == plan.kv_bytes + 6 * part_bytes(model, config)
    finally:
        for key in [key for key in model.metadata if ".ssm." in key]:
            del model.metadata[key]


def test_8_bits_leave_more_for_experts(model: ExpertModel) -> None:
    ram = plan_for(model, policy="lru").total_bytes - model.tier_bytes[0] // 2
    usual = plan_for(model, policy="lru", ram=ram)
    plan = plan_for(model, policy="lru", ram=ram, kv="q8_0")
    assert usual.kv_bytes - plan.kv_bytes == plan.budget_bytes - usual.budget_bytes
    assert plan.kv_bytes * 32 == usual.kv_bytes * 17


def test_heads_that_are_no_blocks_are_refused(tmp_path: Path) -> None:
    shape = replace(synthetic.preset("tiny-qwen3moe"), head_dim=40)
    path = synthetic.write(tmp_path / "odd.gguf", shape, tiers=("q4_k",))
    with (
        ExpertModel.open(path) as model,
        pytest.raises(ConfigError, match="multiple of 32, and those of this model have 40"),
    ):
        plan_for(model, kv="q8_0")
