"""--exact: the settings that it implies and the options that it refuses. Also `pack --for-ram`,
which chooses precisions for a memory size."""

from dataclasses import replace

import numpy as np
import pytest
from command_line import run
from tables import cases

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import MAX_TIERS, bits_per_weight
from gguf_tools.quantize.tiers import parse_types
from orchestrator.config import Config
from orchestrator.errors import BudgetError, ConfigError, PolicyError
from orchestrator.plan.layouts import wants_own_layout
from orchestrator.plan.options import check_unused
from orchestrator.plan.planning import plan_memory
from orchestrator.plan.records import Machine, PlanRequest
from orchestrator.plan.tiers_for import tiers_for


def planned(model, **settings):
    config = Config.build(model=model, ctx=256, exact=True, **settings)
    check_unused(config)
    with ExpertModel.open(model) as opened:
        return config, plan_memory(PlanRequest(config), opened, Machine(8 << 30))


def test_weights_stay_as_they_are_in_the_file(model):
    """With --exact no weight is repacked, neither by the store nor on llama.cpp's own path."""
    config, plan = planned(model, policy="lru", force_managed=True)
    assert (config.layout, config.use_extra_bufts) == ("file", False)
    assert not wants_own_layout(config, plan)
    without = config.with_changes(exact=False, layout="auto", use_extra_bufts=None)
    assert wants_own_layout(without, plan)
    config, plan = planned(model)
    assert not plan.managed and config.use_extra_bufts is False


@pytest.mark.parametrize("policy", [None, "lru", "dymoe", "firm"])
def test_experts_are_in_one_precision(policy, model):
    _, plan = planned(model, policy=policy, expert_ram=1 << 20)
    assert plan.tiers == (0,) and not plan.skip
    assert plan.placement is not None and (plan.placement.fractions(np.ones((1, 1))) == 1.0).all()
    for name, value in (plan.placement.policy.precisions.lossless or {}).items():
        assert getattr(plan.placement.settings, name) == value


@cases(
    "settings, error, sentence",
    ({"layout": "cpu"}, ConfigError, "--layout cpu"),
    ({"low_tier": "skip"}, ConfigError, "leave --low and --low-tier out"),
    ({"policy": "dymoe", "retention": 0.5}, ConfigError, "--retention 0.5 allows lower"),
    ({"policy": "dynaexq"}, PolicyError, "the policy dynaexq keeps some in lower ones"),
    ({"policy": "context"}, PolicyError, "the policy context keeps some in lower ones"),
)
def test_options_that_exact_refuses(settings, error, sentence, model):
    with pytest.raises(error, match=sentence):
        planned(model, expert_ram=1 << 20, **settings)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return {
        tier: synthetic.write(folder / f"{tier}.gguf", "tiny-qwen3moe", tiers=(tier,))
        for tier in ("f16", "q4_k")
    }


def ram_for(path, bits):
    """The --ram with which the expert slots get this number of bits per weight."""
    with ExpertModel.open(path) as model:
        config = Config.build(model=path, policy="lru", ram=1 << 34)
        least = plan_memory(PlanRequest(config), model, Machine(1 << 40))
        fixed = least.dense_bytes + least.kv_bytes + least.scratch_bytes
        return fixed + int(bits * model.tier_bytes[0] / model.tiers[0].bpw)


@pytest.mark.parametrize("bits", [2.7, 3.2, 3.7, 4.6, 5.3, 6.2, 7.0, 8.2])
def test_for_ram_chooses_types_around_the_mean_bits_that_fit(paths, bits):
    """The best type comes first. The others are within 2.2 bits of the mean bits that fit, on both
    sides of it."""
    with ExpertModel.open(paths["f16"]) as model:
        names, why = tiers_for(model, ram_for(paths["f16"], bits))
    widths = [bits_per_weight(each) for each in parse_types(names)]
    assert widths == sorted(widths, reverse=True) and 2 <= len(names) <= MAX_TIERS
    assert names[0] == "q8_0" and f"of memory allow {bits:.1f}" in why
    assert widths[-1] < bits < max(widths)
    assert all(abs(width - bits) < 2.2 for width in widths[1:])


def test_for_ram_with_very_much_and_very_little_memory(paths):
    """If everything fits, one type is chosen. If not even the smallest type fits, three types and a
    note are returned. If the memory is too small, the error names the needed size. A quantized
    source keeps its type as the best one."""
    with ExpertModel.open(paths["f16"]) as model:
        assert tiers_for(model, ram_for(paths["f16"], 9))[0] == ["q8_0"]
        names, why = tiers_for(model, ram_for(paths["f16"], 2.3))
        assert names == ["q8_0", "q4_k", "q2_k"] and "read from disk" in why
        with pytest.raises(BudgetError, match=r"--for-ram 1 MiB is too little") as caught:
            tiers_for(model, 1 << 20)
        assert "--ram " not in str(caught.value) and "--ctx" not in str(caught.value)
        assert tiers_for(model, caught.value.needed_bytes)
    with ExpertModel.open(paths["q4_k"]) as model:
        assert tiers_for(model, ram_for(paths["q4_k"], 5))[0] == ["q4_k"]
        assert tiers_for(model, ram_for(paths["q4_k"], 3))[0] == ["q4_k", "q3_k", "q2_k"]


@cases(
    "own, names",
    ("f16", ["q8_0", "q4_k", "q2_k"]),
    ("q4_1", ["q4_1", "q4_k", "q2_k"]),
    ("q4_0", ["q4_0", "q2_k"]),
)
def test_for_ram_with_rows_that_are_not_a_multiple_of_256(own, names, tmp_path):
    """pack replaces k-quants by types that fit rows of 192 and 64 weights (iq4_nl, q2_0)."""
    narrow = replace(synthetic.preset("tiny-qwen3moe"), n_embd=192, n_ff_exp=64, n_expert=64)
    path = synthetic.write(tmp_path / "narrow.gguf", narrow, tiers=(own,))
    with ExpertModel.open(path) as model:
        assert tiers_for(model, ram_for(path, 2.0))[0] == names


def test_pack_with_for_ram(paths, tmp_path):
    source, out = paths["f16"], tmp_path / "packed.gguf"
    done = run("pack", source, out, "--for-ram", ram_for(source, 3.7))
    assert done.exit_code == 0, done.output
    assert "Note: --tiers q8_0,q4_k,q3_k,q2_k: " in done.stderr
    with ExpertModel.open(out) as model:
        assert [tier.name for tier in model.tiers] == ["q8_0", "q4_k", "q3_k", "q2_k"]
    for args in ((), ("--tiers", "q4_k", "--for-ram", "1GiB")):
        refused = run("pack", source, tmp_path / "other.gguf", *args)
        assert refused.exit_code == 2 and "--for-ram SIZE to choose them" in refused.stderr
