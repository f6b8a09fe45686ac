"""The memory plan: which path, which tiers, which slots, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gguf_tools import inspect, synthetic
from gguf_tools.errors import GGUFError
from gguf_tools.experts import ExpertModel
from gguf_tools.units import format_size
from orchestrator.config import Config
from orchestrator.errors import BudgetError, ConfigError, PolicyError
from orchestrator.memory.choice import check_unused, without_effect
from orchestrator.memory.footprint import (
    look_ahead_bytes,
    process_bytes,
    scratch_bytes,
    step_tokens,
)
from orchestrator.memory.machine import Machine
from orchestrator.memory.plan import MemoryPlan, plan_memory
from orchestrator.settings import parse_size

ROOMY = Machine(64 * 2**30)
TIERS = ("q8_0", "q4_k", "q2_k")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ExpertModel]:
    folder = tmp_path_factory.mktemp("models")
    files = {"one": ("q4_k",), "three": TIERS, "high": ("q8_0",), "low": ("q2_k",)}
    paths = {
        name: synthetic.write(folder / f"{name}.gguf", "tiny-qwen3moe", tiers=tiers)
        for name, tiers in files.items()
    }
    opened = {name: ExpertModel.open(path) for name, path in paths.items()}
    opened["pair"] = ExpertModel.open(paths["high"], paths["low"])
    return opened


def plan_for(model: ExpertModel, machine: Machine = ROOMY, **settings: Any) -> MemoryPlan:
    return plan_memory(Config.build(model=model.path, **settings), model, machine)


def tight(model: ExpertModel, slots: int, **settings: Any) -> Machine:
    """A machine with room for this many bytes of expert slots."""
    plan = plan_for(model, **settings)
    free = plan.dense_bytes + plan.kv_bytes + plan.scratch_bytes + slots
    headroom = 256 * 2**20
    assert (free + headroom) * 0.1 <= headroom
    return Machine(free + headroom)


def test_everything_fits(models: dict[str, ExpertModel]) -> None:
    plan = plan_for(models["one"])
    assert not plan.managed
    assert "everything fits" in plan.reason
    assert plan.total_bytes <= plan.ram_bytes
    assert plan.expert_bytes == models["one"].tier_bytes[0]
    assert plan.budget_bytes == 0


def test_a_packed_file_runs_its_best_tier_where_it_fits(models: dict[str, ExpertModel]) -> None:
    plan = plan_for(models["three"])
    assert (plan.managed, plan.tier_names) == (False, ("q8_0",))


@pytest.mark.parametrize(
    ("settings", "policy", "tiers"),
    [
        ({"policy": "lru"}, "lru", ("q8_0",)),
        ({"policy": "lru", "expert_ram": 3 * 2**20}, "lru", ("q8_0",)),
        ({"force_managed": True}, "lru", ("q8_0",)),
        ({"high_tier": "q4_k"}, "lru", ("q4_k",)),
        ({"policy": "lru", "high_tier": "q8_0"}, "lru", ("q8_0",)),
        ({"low_tier": "q2_k"}, "dymoe", ("q8_0", "q2_k")),
        ({"low_tier": "q2_k", "high_tier": "q4_k"}, "dymoe", ("q4_k", "q2_k")),
        ({"low_tier": "q2_k", "expert_ram": 2**21}, "dymoe", ("q8_0", "q2_k")),
        ({"low_tier": "q4_k", "expert_ram": 2 * 2**20}, "dymoe", ("q8_0", "q4_k")),
        ({"low_tier": "skip"}, "dymoe", ("q8_0",)),
        ({"low_tier": "skip", "expert_ram": 2**21}, "dymoe", ("q8_0",)),
        ({"policy": "dymoe"}, "dymoe", ("q8_0",)),
        ({"policy": "dymoe", "expert_ram": 2**21}, "dymoe", ("q8_0",)),
        ({"policy": "dymoe", "low_tier": "q2_k"}, "dymoe", ("q8_0", "q2_k")),
        ({"policy": "dymoe", "high_tier": "Q4_K"}, "dymoe", ("q4_k",)),
        ({"policy": "dymoe", "retention": 0.9}, "dymoe", ("q8_0", "q4_k")),
        ({"policy": "dymoe", "retention": 1.0}, "dymoe", ("q8_0",)),
        ({"policy": "dymoe", "retention": 1.0, "low_tier": "q2_k"}, "dymoe", ("q8_0",)),
        ({"policy": "floor", "max_loss": 0.0, "low_tier": "q2_k"}, "floor", ("q8_0",)),
        ({"policy": "floor", "max_loss": 0.0}, "floor", ("q8_0",)),
        ({"policy": "firm"}, "firm", ("q8_0",)),
        ({"retention": 0.9}, "dymoe", ("q8_0", "q4_k")),
        ({"expert_ram": 2**21}, "dymoe", ("q8_0",)),
    ],
)
def test_choices(
    models: dict[str, ExpertModel], settings: dict[str, Any], policy: str, tiers: tuple[str, ...]
) -> None:
    plan = plan_for(models["three"], **settings)
    assert plan.managed
    assert plan.policy is not None
    assert (plan.policy.name, plan.tier_names) == (policy, tiers)


def test_two_files_are_high_and_low(models: dict[str, ExpertModel]) -> None:
    plan = plan_for(models["pair"], low=models["low"].path)
    assert plan.policy is not None
    assert (plan.policy.name, plan.tier_names) == ("dymoe", ("q8_0", "q2_k"))
    lossless = plan_for(models["pair"], low=models["low"].path, retention=1.0)
    assert lossless.tier_names == ("q8_0",)


def test_too_little_memory_is_managed(models: dict[str, ExpertModel]) -> None:
    model = models["one"]
    plan = plan_for(model, tight(model, model.tier_bytes[0] // 2))
    assert plan.managed
    assert plan.slots is not None
    assert plan.slots.total_bytes <= plan.budget_bytes <= model.tier_bytes[0] // 2
    assert plan.total_bytes <= plan.ram_bytes


def named(size_bytes: int) -> str:
    """As a message names a budget that is enough."""
    return format_size(size_bytes, up=True)


@pytest.mark.parametrize("policy", ["lru", "dymoe"])
def test_the_smallest_budget_named_is_the_smallest(
    models: dict[str, ExpertModel], policy: str
) -> None:
    model = models["three"]
    for key in ("expert_ram", "ram"):
        with pytest.raises(BudgetError) as caught:
            plan_for(model, policy=policy, **{key: 1000})
        needed = caught.value.needed_bytes
        assert f"with the policy {policy} is {named(needed)}" in str(caught.value)
        assert key.replace("_", "-") in str(caught.value)
        for enough in (needed, parse_size(named(needed))):
            assert plan_for(model, policy=policy, **{key: enough}).managed
        with pytest.raises(BudgetError):
            plan_for(model, policy=policy, **{key: needed - 1})


def test_ram_caps_everything(models: dict[str, ExpertModel]) -> None:
    model = models["three"]
    with pytest.raises(BudgetError) as caught:
        plan_for(model, policy="dymoe", ram=1)
    for spare in (0, 10**5, 10**6, 10**9):
        plan = plan_for(model, policy="dymoe", ram=caught.value.needed_bytes + spare)
        assert plan.total_bytes <= caught.value.needed_bytes + spare


def test_both_caps_hold(models: dict[str, ExpertModel]) -> None:
    plan = plan_for(models["three"], expert_ram=10**6, ram=2**34)
    assert plan.budget_bytes == 10**6


def test_unknown_names_list_the_known(models: dict[str, ExpertModel]) -> None:
    known = "lru, dymoe, dynaexq, firm, context, floor, mixed or plain"
    with pytest.raises(ConfigError, match=known):
        plan_for(models["one"], policy="belady")
    for key in ("high_tier", "low_tier"):
        with pytest.raises(GGUFError, match="q8_0, q4_k, q2_k"):
            plan_for(models["three"], **{key: "q3_k"})


def test_low_must_be_lower(models: dict[str, ExpertModel]) -> None:
    with pytest.raises(PolicyError, match="not below"):
        plan_for(models["three"], high_tier="q4_k", low_tier="q8_0")


def test_dymoe_on_one_tier_says_what_is_missing(models: dict[str, ExpertModel]) -> None:
    with pytest.raises(PolicyError, match="--low-tier skip"):
        plan_for(models["one"], policy="dymoe", retention=0.75)
    assert plan_for(models["one"], policy="dymoe", low_tier="skip").managed


def test_plain_can_be_asked_for(models: dict[str, ExpertModel]) -> None:
    plan = plan_for(models["three"], Machine(2**28), policy="plain")
    assert not plan.managed
    assert "asked for" in plan.reason
    with pytest.raises(ConfigError, match="best tier"):
        plan_for(models["three"], policy="plain", expert_ram=2**20)


def test_plain_within_a_given_cap(models: dict[str, ExpertModel]) -> None:
    with pytest.raises(BudgetError, match="policy plain") as caught:
        plan_for(models["three"], policy="plain", ram=2**20)
    needed = caught.value.needed_bytes
    assert f"at least {named(needed)};" in str(caught.value)
    assert not plan_for(models["three"], policy="plain", ram=needed).managed
    with pytest.raises(BudgetError):
        plan_for(models["three"], policy="plain", ram=needed - 1)


def test_a_smaller_minimum_of_lru_is_named(models: dict[str, ExpertModel]) -> None:
    for key in ("expert_ram", "ram"):
        with pytest.raises(BudgetError) as caught:
            plan_for(models["three"], **{key: 1000})
        found = re.search(r"--policy lru works from ([\d.]+ \w+)", str(caught.value))
        assert found
        least = parse_size(found[1])
        assert least < caught.value.needed_bytes
        assert plan_for(models["three"], policy="lru", **{key: least}).managed
        with pytest.raises(BudgetError) as caught:
            plan_for(models["three"], policy="lru", **{key: least * 4 // 5})
        assert "works from" not in str(caught.value)


def test_one_precision_is_lossless_by_default(models: dict[str, ExpertModel]) -> None:
    plan = plan_for(models["one"], tight(models["one"], models["one"].tier_bytes[0] // 2))
    assert plan.policy is not None
    assert (plan.policy.name, plan.reason) == ("dymoe", "dymoe q4_k, one precision")
    for settings in ({"low_tier": "skip"}, {"low_tier": "q2_k"}):
        plan = plan_for(models["three"], **settings)
        assert "r=0.75" in plan.reason
    assert "r=0.5" in plan_for(models["three"], policy="dymoe", retention=0.5).reason


@pytest.mark.parametrize("policy", ["plain", "lru"])
@pytest.mark.parametrize(
    "option", [{"low": "b.gguf"}, {"low_tier": "skip"}, {"low_tier": "q2_k"}, {"retention": 1.0}]
)
def test_what_a_policy_does_not_use_is_refused(policy: str, option: dict[str, Any]) -> None:
    name = next(iter(option)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{name} has no effect with --policy {policy}"):
        check_unused(Config.build(model="a.gguf", policy=policy, **option))
    check_unused(Config.build(model="a.gguf", policy=policy))
    check_unused(Config.build(model="a.gguf", policy="dymoe", **option))
    check_unused(Config.build(model="a.gguf", **option))


@pytest.mark.parametrize(
    ("more", "refused"),
    [({}, True), ({"near_slots": "own"}, True), ({"near_slots": "shared"}, False)],
)
def test_a_loss_table_is_for_slots_that_lower_tiers_share(
    more: dict[str, Any], refused: bool
) -> None:
    asked = Config.build(model="a.gguf", policy="context", losses=Path("t.json"), **more)
    if refused:
        with pytest.raises(ConfigError, match="--losses has no effect with --near-slots own"):
            check_unused(asked)
    else:
        check_unused(asked)
    check_unused(asked.with_changes(losses=None))
    check_unused(asked.compared(policy="mixed"))


def test_a_loss_table_is_used_where_a_loss_chooses_the_policy() -> None:
    asked = Config.build(model="a.gguf", losses=Path("t.json"))
    with pytest.raises(ConfigError, match="--losses is for --policy context or floor or mixed"):
        check_unused(asked)
    check_unused(asked.with_changes(max_loss=0.01))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"low_tier": "q2_k", "retention": 1.0}, "--low-tier: no effect with --retention 1"),
        ({"low_tier": "skip", "retention": 1.0}, "--low-tier: no effect with --retention 1"),
        ({"low": "b.gguf", "retention": 1.0}, "--low: no effect with --retention 1"),
        (
            {"low": "b.gguf", "low_tier": "q2_k", "policy": "floor", "max_loss": 0.0},
            "--low and --low-tier: no effect with --max-loss 0",
        ),
        ({"low_tier": "q2_k", "retention": 0.9}, None),
        ({"low_tier": "q2_k"}, None),
        ({"retention": 1.0}, None),
        ({"low_tier": "q2_k", "max_loss": 0.0}, None),
        ({"low": "b.gguf", "policy": "mixed"}, None),
    ],
)
def test_lower_precisions_that_nothing_will_ask_for_are_noted(
    asked: dict[str, Any], said: str | None
) -> None:
    found = without_effect(Config.build(model="a.gguf", **asked))
    assert found is None if said is None else str(found).startswith(said)


def test_what_a_changed_policy_does_not_use_waits(models: dict[str, ExpertModel]) -> None:
    settings = {"low_tier": "q2_k", "retention": 0.5}
    assert plan_for(models["three"], policy="lru", **settings).managed
    assert not plan_for(models["three"], policy="plain", **settings).managed


@pytest.mark.parametrize("name", ["one", "three"])
def test_what_inspect_prints_works_as_ram(models: dict[str, ExpertModel], name: str) -> None:
    model = models[name]
    fixed = scratch_bytes(model, Config.build(model=model.path))
    facts = inspect.describe(model, fixed)
    text = inspect.render(facts)
    for budget in facts["budgets"]:
        printed = format_size(budget["ram_bytes"], up=True)
        assert printed in text
        for ram in (budget["ram_bytes"], parse_size(printed)):
            plan = plan_for(model, ram=ram)
            assert plan.total_bytes <= ram
            if plan.managed:
                assert plan.budget_bytes >= budget["slot_bytes"]
    assert not plan_for(model, ram=facts["budgets"][-1]["ram_bytes"]).managed


def test_context_is_capped_by_the_model(models: dict[str, ExpertModel]) -> None:
    model = models["one"]
    assert plan_for(model, ctx=10**6).n_ctx == model.hparams.context_length
    assert plan_for(model, ctx=512).n_ctx == 512
    assert plan_for(model, ctx=512).kv_bytes == model.kv_bytes(512)


def test_sequences_share_a_larger_context(models: dict[str, ExpertModel]) -> None:
    """Each may be as long as the model was made for."""
    model = models["one"]
    most = model.hparams.context_length
    for sequences, n_ctx in ((0, most), (1, 2 * most), (7, 4 * most)):
        assert plan_for(model, ctx=4 * most, sequences=sequences).n_ctx == n_ctx


def test_logits_of_all_tokens_need_more_scratch(models: dict[str, ExpertModel]) -> None:
    model = models["one"]
    one, every = plan_for(model), plan_for(model, logits_all=True)
    n_vocab = len(model.metadata["tokenizer.ggml.tokens"])
    assert every.scratch_bytes - one.scratch_bytes >= 511 * n_vocab * 4


def test_copies_of_routers_are_scratch_of_a_policy_that_is_asked(
    models: dict[str, ExpertModel],
) -> None:
    model = models["one"]
    asked, never = (plan_for(model, policy=name).scratch_bytes for name in ("firm", "lru"))
    assert asked - never == look_ahead_bytes(model) > 0


def test_a_process_beside_a_gpu_is_larger(models: dict[str, ExpertModel]) -> None:
    """By what its driver keeps there, which nobody measured to the byte."""
    model = models["one"]
    config = Config.build(model=model.path)
    beside = process_bytes(model, config, on_gpu=True) - process_bytes(model, config)
    assert 2**23 <= beside <= 2**26


@pytest.mark.parametrize(
    ("ubatch", "n_ctx", "tokens"), [(None, 8192, 512), (None, 100, 100), (64, 8192, 64)]
)
def test_a_step_has_what_was_asked_for_or_the_least_size(
    models: dict[str, ExpertModel], ubatch: int | None, n_ctx: int, tokens: int
) -> None:
    config = Config.build(model=models["one"].path, ubatch=ubatch)
    assert step_tokens(config, n_ctx) == tokens


def test_a_vocabulary_that_is_no_list(models: dict[str, ExpertModel], tmp_path: Path) -> None:
    with ExpertModel.open(models["one"].path) as model:
        model.metadata["tokenizer.ggml.tokens"] = 7
        with pytest.raises(GGUFError, match=r"one\.gguf: key tokenizer\.ggml\.tokens"):
            plan_for(model)
