"""The memory plan: llama.cpp's own path or a store, tiers, slots, and refusals."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asking import request_of
from gguf_split import split
from tables import cases

from gguf_tools import inspect, synthetic
from gguf_tools.errors import GGUFError
from gguf_tools.experts import ExpertModel
from gguf_tools.units import format_least, format_size
from orchestrator.config import Config
from orchestrator.errors import BudgetError, ConfigError, PolicyError
from orchestrator.plan import planning as planning
from orchestrator.plan.footprint import PROMPT_SHARE, part_bytes
from orchestrator.plan.options import check_unused, notes_of, without_effect
from orchestrator.plan.planning import plan_memory, scratch_bytes
from orchestrator.plan.records import Device, Machine
from orchestrator.policy import POLICIES
from orchestrator.settings import parse_size

MIB = 2**20
ROOMY = Machine(64 * 2**30)
TIERS = ("q8_0", "q4_k", "q2_k")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny = synthetic.preset("tiny-qwen3moe")
    # The context of a large model, and experts much larger than the KV cache of 4,096 tokens.
    long = replace(tiny, context=65536, n_expert=128, n_head_kv=1, head_dim=32)
    files = {
        "one": (tiny, ("q4_k",)),
        "three": (tiny, TIERS),
        "high": (tiny, ("q8_0",)),
        "low": (tiny, ("q2_k",)),
        "more": (replace(tiny, n_expert=64), ("q4_k",)),
        "long": (long, ("q4_k", "q2_k")),
        "odd heads": (replace(tiny, head_dim=40), ("q4_k",)),
    }
    paths = {
        name: synthetic.write(folder / f"{name}.gguf", shape, tiers=tiers)
        for name, (shape, tiers) in files.items()
    }
    opened = {name: ExpertModel.open(path) for name, path in paths.items()}
    opened["pair"] = ExpertModel.open(paths["high"], paths["low"])
    return opened


def plan_for(model, machine=ROOMY, **settings):
    return plan_memory(request_of(model=model.path, **settings), model, machine)


def tight(model, slots, **settings):
    """A machine with this number of bytes for expert slots."""
    plan = plan_for(model, **settings)
    free = plan.dense_bytes + plan.kv_bytes + plan.scratch_bytes + slots
    headroom = 256 * 2**20
    assert (free + headroom) * 0.1 <= headroom
    return Machine(free + headroom)


@pytest.mark.parametrize(("name", "tier"), [("one", "q4_k"), ("three", "q8_0")])
def test_everything_fits(models, name, tier):
    """If all experts fit, no store is used. A packed file then runs in its best tier."""
    plan = plan_for(models[name])
    assert (plan.managed, plan.tier_names) == (False, (tier,))
    assert "everything fits" in plan.reason
    assert plan.total_bytes <= plan.ram_bytes
    assert (plan.expert_bytes, plan.budget_bytes) == (models[name].tier_bytes[0], 0)


@cases(
    "settings, policy, tiers",
    ({"policy": "lru"}, "lru", ("q8_0",)),
    ({"force_managed": True}, "lru", ("q8_0",)),
    ({"high_tier": "q4_k"}, "lru", ("q4_k",)),
    ({"low_tier": "q2_k"}, "dymoe", ("q8_0", "q2_k")),
    ({"low_tier": "q2_k", "high_tier": "q4_k"}, "dymoe", ("q4_k", "q2_k")),
    ({"low_tier": "q4_k", "expert_ram": 2 * 2**20}, "dymoe", ("q8_0", "q4_k")),
    ({"low_tier": "skip"}, "dymoe", ("q8_0",)),
    ({"policy": "dymoe"}, "dymoe", ("q8_0",)),
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
)
def test_settings_choose_the_policy_and_the_tiers(models, settings, policy, tiers):
    plan = plan_for(models["three"], **settings)
    assert plan.managed
    assert (plan.placement.name, plan.tier_names) == (policy, tiers)


def test_two_files_are_high_and_low(models):
    plan = plan_for(models["pair"], low=models["low"].path)
    assert (plan.placement.name, plan.tier_names) == ("dymoe", ("q8_0", "q2_k"))
    lossless = plan_for(models["pair"], low=models["low"].path, retention=1.0)
    assert lossless.tier_names == ("q8_0",)


def test_too_little_memory_is_managed(models):
    """If the experts do not fit, dymoe streams them from a store: with one precision without loss,
    with several precisions at a retention ratio."""
    model = models["one"]
    plan = plan_for(model, tight(model, model.tier_bytes[0] // 2))
    assert (plan.placement.name, plan.reason) == ("dymoe", "dymoe q4_k, one precision")
    assert plan.slots.total_bytes <= plan.budget_bytes <= model.tier_bytes[0] // 2
    assert plan.total_bytes <= plan.ram_bytes
    for settings in ({"low_tier": "skip"}, {"low_tier": "q2_k"}):
        assert "retention=0.75" in plan_for(models["three"], **settings).reason
    assert "retention=0.5" in plan_for(models["three"], policy="dymoe", retention=0.5).reason


def named(size_bytes):
    """The size as error messages write it, rounded up."""
    return format_least(size_bytes)


@pytest.mark.parametrize("policy", ["lru", "dymoe"])
def test_the_smallest_budget_named_is_the_smallest(models, policy):
    model = models["three"]
    for key in ("expert_ram", "ram"):
        with pytest.raises(BudgetError) as caught:
            plan_for(model, policy=policy, **{key: 1000})
        needed = caught.value.needed_bytes
        said = f"with the policy {policy}" + (
            " and a context of 2048 tokens" if key == "ram" else ""
        )
        assert f"{said} is {named(needed)}" in str(caught.value)
        assert key.replace("_", "-") in str(caught.value)
        for enough in (needed, parse_size(named(needed)), needed + 10**6):
            plan = plan_for(model, policy=policy, **{key: enough})
            assert plan.managed and (key == "expert_ram" or plan.total_bytes <= enough)
        with pytest.raises(BudgetError):
            plan_for(model, policy=policy, **{key: needed - 1})
    assert plan_for(model, policy=policy, expert_ram=10**6, ram=2**34).budget_bytes == 10**6


def test_notes_on_the_context_and_on_mixed_parts(models, tmp_path):
    """Notes say that --ctx exceeds the training context, and that a part belongs to another
    quantization. Two separate files may differ."""

    def notes(path, low=None, **settings):
        with ExpertModel.open(path, low) as model:
            return notes_of(Config.build(model=path, low=low, **settings), model)

    high, low = models["high"].path, models["low"].path
    assert notes(high, ctx=2048) == []
    assert notes(high, ctx=4000) == [
        "--ctx 4000 is reduced to the model's training context, 2048 tokens."
    ]
    parts, others = (split(each, tmp_path / each.stem, 3) for each in (high, low))
    assert notes(parts[0]) == notes(parts[0], low=others[0]) == []
    parts[1].write_bytes(others[1].read_bytes())
    (said,) = notes(parts[0], low=others[0])
    assert said.startswith(
        f"{parts[1]}: this part seems to belong to another quantization: its experts are q2_k"
    )


def test_a_cache_that_is_too_large_is_named(models):
    """The error names --cache-ram. It names --ram only if --ram was given."""
    for ram, remedy in ((None, "or free memory"), (2**30, r"or give --ram \d+ MiB")):
        with pytest.raises(
            BudgetError, match=rf"--cache-ram 99 GiB is too much.*{remedy}"
        ) as caught:
            plan_for(models["three"], cache_ram=99 << 30, ram=ram)
        needed = caught.value.needed_bytes
        assert plan_for(models["three"], Machine(2**40), cache_ram=99 << 30, ram=needed)


@cases(
    "name, settings, error, said",
    ("one", {"policy": "belady"}, ConfigError, ", ".join(POLICIES) + " or plain"),
    ("three", {"high_tier": "q3_k"}, GGUFError, "q8_0, q4_k, q2_k"),
    ("three", {"low_tier": "q3_k"}, GGUFError, "q8_0, q4_k, q2_k"),
    ("three", {"high_tier": "q4_k", "low_tier": "q8_0"}, PolicyError, "not below"),
    ("one", {"policy": "dymoe", "retention": 0.75}, PolicyError, "--low-tier skip"),
    ("three", {"policy": "plain", "expert_ram": MIB}, ConfigError, "best precision"),
)
def test_impossible_settings_are_refused(models, name, settings, error, said):
    with pytest.raises(error, match=said):
        plan_for(models[name], **settings)


def test_policy_plain_uses_llama_cpps_own_path(models):
    plan = plan_for(models["three"], Machine(2**28), policy="plain")
    assert not plan.managed
    assert "asked for" in plan.reason


def test_plain_within_a_given_cap(models):
    with pytest.raises(BudgetError, match="policy plain") as caught:
        plan_for(models["three"], policy="plain", ram=2**20)
    needed = caught.value.needed_bytes
    assert f"at least {named(needed)} with a context of 2048 tokens." in str(caught.value)
    assert not plan_for(models["three"], policy="plain", ram=needed).managed
    with pytest.raises(BudgetError):
        plan_for(models["three"], policy="plain", ram=needed - 1)


def test_a_smaller_minimum_of_lru_is_named(models):
    for key in ("expert_ram", "ram"):
        with pytest.raises(BudgetError) as caught:
            plan_for(models["three"], **{key: 1000})
        found = re.search(r"With --policy lru, --[\w-]+ ([\d.]+ \w+) is enough", str(caught.value))
        assert found
        least = parse_size(found[1])
        assert least < caught.value.needed_bytes
        assert plan_for(models["three"], policy="lru", **{key: least}).managed
        with pytest.raises(BudgetError) as caught:
            plan_for(models["three"], policy="lru", **{key: least * 4 // 5})
        assert "With --policy lru" not in str(caught.value)


@pytest.mark.parametrize("policy", ["plain", "lru"])
@cases("option", {"low": "b.gguf"}, {"low_tier": "skip"}, {"low_tier": "q2_k"}, {"retention": 1.0})
def test_options_that_the_policy_does_not_use_are_refused(policy, option):
    name = next(iter(option)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{name} has no effect with --policy {policy}"):
        check_unused(Config.build(model="a.gguf", policy=policy, **option))
    check_unused(Config.build(model="a.gguf", policy=policy))
    check_unused(Config.build(model="a.gguf", policy="dymoe", **option))
    check_unused(Config.build(model="a.gguf", **option))


@cases(
    "asked, refused",
    ({"policy": "context"}, "has no effect with --near-slots own"),
    ({"policy": "context", "near_slots": "own"}, "has no effect with --near-slots own"),
    ({"policy": "context", "near_slots": "shared"}, None),
    ({"policy": "mixed"}, None),
    ({}, "is for --policy context or floor or mixed"),
    ({"max_loss": 0.01}, None),
)
def test_a_loss_table_is_refused_if_nothing_reads_it(asked, refused):
    """Only shared near slots, `mixed` and --max-loss read a loss table."""
    config = Config.build(model="a.gguf", losses=Path("t.json"), **asked)
    if refused:
        with pytest.raises(ConfigError, match=f"--losses {refused}"):
            check_unused(config)
    else:
        check_unused(config)
    check_unused(config.with_changes(losses=None))


@cases(
    "asked, said",
    (
        {"low_tier": "q2_k", "retention": 1.0},
        "--low-tier: no effect, because every expert has the high precision with --retention 1",
    ),
    (
        {"low_tier": "skip", "retention": 1.0},
        "--low-tier: no effect, because every expert has the high precision with --retention 1",
    ),
    (
        {"low": "b.gguf", "retention": 1.0},
        "--low: no effect, because every expert has the high precision with --retention 1",
    ),
    (
        {"low": "b.gguf", "low_tier": "q2_k", "policy": "floor", "max_loss": 0.0},
        "--low and --low-tier: no effect, because every expert has the high precision with "
        "--max-loss 0",
    ),
    ({"low_tier": "q2_k", "retention": 0.9}, None),
    ({"low_tier": "q2_k"}, None),
    ({"retention": 1.0}, None),
    ({"low_tier": "q2_k", "max_loss": 0.0}, None),
    ({"low": "b.gguf", "policy": "mixed"}, None),
)
def test_lower_precisions_without_effect_are_noted(asked, said):
    found = without_effect(Config.build(model="a.gguf", **asked))
    assert found is None if said is None else str(found).startswith(said)


def test_settings_that_the_new_policy_does_not_use_are_ignored(models):
    settings = {"low_tier": "q2_k", "retention": 0.5}
    assert plan_for(models["three"], policy="lru", **settings).managed
    assert not plan_for(models["three"], policy="plain", **settings).managed


@pytest.mark.parametrize("name", ["one", "three"])
def test_the_sizes_that_inspect_prints_work_as_ram(models, name):
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
    # the lookup tables are left out only with a store
    whole = facts["budgets"][-1]["ram_bytes"] + model.lookup_bytes
    assert not plan_for(model, ram=whole).managed


def test_context_is_capped_by_the_model(models):
    """One sequence gets at most the model's training context. Several sequences share a larger
    context."""
    model = models["one"]
    most = model.hparams.context_length
    for sequences, n_ctx in ((0, most), (1, 2 * most), (7, 4 * most)):
        assert plan_for(model, ctx=4 * most, sequences=sequences).n_ctx == n_ctx
    short = plan_for(model, ctx=512)
    assert (short.n_ctx, short.kv_bytes) == (512, model.kv_bytes(512))


def test_logits_of_all_tokens_need_more_scratch(models):
    model = models["one"]
    one, every = plan_for(model), plan_for(model, logits_all=True)
    n_vocab = len(model.metadata["tokenizer.ggml.tokens"])
    assert every.scratch_bytes - one.scratch_bytes >= 511 * n_vocab * 4


def test_look_ahead_needs_scratch_for_copies_of_routers(models):
    model = models["one"]
    asked, never = (plan_for(model, policy=name).scratch_bytes for name in ("firm", "lru"))
    routers = (model.n_layers - 1) * model.n_expert * model.hparams.embedding_length
    assert asked - never == 2 * routers > 0  # in half precision


def test_a_vocabulary_that_is_not_a_list_is_refused(models, tmp_path):
    with ExpertModel.open(models["one"].path) as model:
        model.metadata["tokenizer.ggml.tokens"] = 7
        with pytest.raises(GGUFError, match=r"one\.gguf: key tokenizer\.ggml\.tokens"):
            plan_for(model)


def test_more_memory_gives_more_context_until_the_models_own(models):
    free = (400, 450, 1000, 3000, 64 * 1024)
    contexts = [plan_for(models["long"], Machine(each * MIB)).n_ctx for each in free]
    assert contexts == sorted(contexts)
    assert len(set(contexts)) > 2
    assert contexts[0] >= 4096
    assert contexts[-1] == 65536
    for machine, ctx in ((Machine(400 * MIB), 512), (ROOMY, 4096)):
        assert plan_for(models["long"], machine, ctx=ctx).n_ctx == ctx


def test_a_model_that_fits_with_the_minimum_context_stays_whole(models):
    least = plan_for(models["long"], ctx=4096, ubatch=16).total_bytes
    for spare in (0, MIB // 4, 40 * MIB):
        plan = plan_for(models["long"], ram=least + spare, ubatch=16)
        assert not plan.managed
        assert plan.total_bytes <= least + spare


def test_a_policy_without_spare_memory_gets_the_minimum_context(models, monkeypatch):
    model, settings = models["long"], {"policy": "lru", "force_managed": True, "ubatch": 16}
    with pytest.raises(BudgetError) as too_little:
        plan_for(model, ctx=4096, ram=MIB, **settings)
    monkeypatch.setattr(planning, "longest_context", lambda *_: 65536)
    least = too_little.value.needed_bytes
    assert plan_for(model, ram=least, **settings).n_ctx == 4096
    assert plan_for(model, ram=least + 60 * MIB, **settings).n_ctx == 65536


def test_conversations_get_memory_for_prompt_copies(models):
    """Kept conversations get memory of up to one context: at most a small share of the slots, and
    nothing if the model would no longer fit whole."""
    model = models["more"]
    whole = plan_for(model, ctx=512)
    assert whole.prompt_bytes == 0
    plan = plan_for(model, ctx=512, conversations=True)
    assert plan.prompt_bytes == plan.kv_bytes
    assert plan.total_bytes == whole.total_bytes + plan.kv_bytes
    for spare in (0, 1000, MIB):
        plan = plan_for(model, ctx=512, ram=whole.total_bytes + spare, conversations=True)
        assert not plan.managed
        assert plan.prompt_bytes <= spare
    ram = plan_for(model, ctx=512, policy="lru").total_bytes - model.tier_bytes[0] // 2
    left = plan_for(model, ctx=512, policy="lru", ram=ram).budget_bytes
    plan = plan_for(model, ctx=512, policy="lru", ram=ram, conversations=True)
    assert 0 < plan.prompt_bytes <= PROMPT_SHARE * left
    assert plan.budget_bytes == left  # prompt copies take only memory that slots do not use
    assert plan.total_bytes <= ram


def test_memory_for_prompt_copies_is_reserved_or_refused(models):
    model = models["more"]
    assert plan_for(model, ctx=512, cache_ram=3 * MIB).prompt_bytes == 3 * MIB
    assert plan_for(model, ctx=512, cache_ram=0, conversations=True).prompt_bytes == 0
    asked: dict[str, Any] = {"ctx": 512, "policy": "lru"}
    with pytest.raises(BudgetError) as least:
        plan_for(model, ram=MIB, **asked)
    enough = least.value.needed_bytes
    plan_for(model, ram=enough, **asked)
    plan_for(model, ram=enough, conversations=True, **asked)  # without prompt copies
    with pytest.raises(BudgetError) as more:
        plan_for(model, ram=enough, cache_ram=3 * MIB, **asked)
    assert more.value.needed_bytes == enough + 3 * MIB
    plan_for(model, ram=enough + 3 * MIB, cache_ram=3 * MIB, **asked)


def test_recurrent_layers_get_memory_for_checkpoints(models):
    with ExpertModel.open(models["more"].path) as model:
        config = Config.build(model=model.path)
        assert part_bytes(model, config) == 0
        recurrent = {"inner_size": 4096, "state_size": 128, "group_count": 16, "conv_kernel": 4}
        model.metadata.update({f"qwen3moe.ssm.{key}": n for key, n in recurrent.items()})
        # as in Qwen3-Next: 2 MiB of state per layer, and three columns of convolution input
        assert part_bytes(model, config) == 3 * 4 * (128 * 4096 + 3 * 8192)
        plan = plan_for(model, ctx=512, conversations=True)
        assert plan.prompt_bytes == plan.kv_bytes + 6 * part_bytes(model, config)


def test_an_8_bit_kv_cache_leaves_more_for_experts(models):
    asked: dict[str, Any] = {"ctx": 512, "policy": "lru"}
    ram = plan_for(models["more"], **asked).total_bytes - models["more"].tier_bytes[0] // 2
    usual = plan_for(models["more"], ram=ram, **asked)
    plan = plan_for(models["more"], ram=ram, kv="q8_0", **asked)
    assert usual.kv_bytes - plan.kv_bytes == plan.budget_bytes - usual.budget_bytes
    assert plan.kv_bytes * 32 == usual.kv_bytes * 17
    with pytest.raises(
        ConfigError, match="multiple of 32, and those of this model have the length 40"
    ):
        plan_for(models["odd heads"], kv="q8_0", ctx=512)


CTX, BATCH = 2048, 512  # the model's training context


def on_gpu(model, flash, **settings):
    machine = Machine(8 << 30, Device("cuda0", "a card", 8 << 30, 8 << 30, flash))
    return plan_for(model, machine, ctx=CTX, ubatch=BATCH, policy="lru", vram=4 << 30, **settings)


def test_flash_attention_needs_less_scratch(models):
    """Without flash attention, scratch also has attention weights in single and half precision and
    a mask. For Qwen3-30B at 4k tokens that is 0.4 GB."""
    model = models["one"]
    slow, fast = on_gpu(model, False), on_gpu(model, True)
    assert slow.n_ctx == CTX
    weights = max(model.hparams.n_head) * BATCH * CTX
    saved = slow.scratch_bytes - fast.scratch_bytes
    assert 6 * weights < saved < 7 * weights + 5 * BATCH * CTX
    # exact importance needs the attention weights, so flash attention saves nothing
    exact = [on_gpu(model, flash, importance="exact") for flash in (False, True)]
    assert exact[0].scratch_bytes == exact[1].scratch_bytes


def test_a_cache_in_8_bits_is_unpacked_a_layer_at_a_time(models):
    model = models["one"]
    hparams = model.hparams
    of_layer = 2 * CTX * max(hparams.n_head_kv) * (hparams.key_length + hparams.value_length)
    packed, plain = (on_gpu(model, True, kv=kv).scratch_bytes for kv in ("q8_0", "f16"))
    assert of_layer < packed - plain < 1.4 * of_layer
