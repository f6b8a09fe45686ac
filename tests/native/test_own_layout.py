"""Experts in the CPU's own layout, and dense weights beside managed experts: upstream's bits with
repacked weights, within the same slots."""

import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gguf_tools import synthetic
from gguf_tools.file.layout import GGMLType
from orchestrator.lab.bench.plain import PlainModel

from .conftest import drawn, opened

TOKENS = drawn(24, 5)
WORDS = [7, 300, 12, 99, 41, 250, 3, 17, 64, 128, 5, 201]
TYPES = ("q4_0", "q4_k", "iq4_nl", "mxfp4", "q2_k")
SETTINGS = {"ctx": 256, "ubatch": 32, "threads": 2, "policy": "lru"}


@pytest.fixture(autouse=True)
def cpu_has_one(library, request):
    tier = getattr(request.node, "callspec", None) and request.node.callspec.params.get("tier")
    if not library.interleaves(GGMLType[(tier or "q4_0").upper()], 256, 256):
        pytest.skip(f"this CPU has no layout of its own for {tier or 'q4_0'}")


def one_by_one(evaluate):
    """Logits behind each of the tokens, decoded one at a time."""
    return np.concatenate([evaluate([token], at) for at, token in enumerate(TOKENS)])


def prompt(evaluate):
    """Logits behind a prompt of three micro-batches."""
    return evaluate(TOKENS * 4, 0)[-1]


def upstream(path, repack, read=one_by_one, n_ubatch=32):
    asked = {"n_ctx": 256, "n_ubatch": n_ubatch, "threads": 2, "mmap": False}
    with PlainModel(path, **asked, extra_bufts=repack) as model:
        return read(model.eval)


def managed(path, read=one_by_one, share=0, **options):
    """Logits, and the mode line; the store's invariants hold, and its slots are within budget."""
    with (
        opened(path, share, force_managed=True, **(SETTINGS | options)) as runtime,
        runtime.evaluator() as e,
    ):
        found = read(e.eval)
        e.inside.store.check()
        stats = e.inside.store.stats()
        assert stats.slot_bytes_peak <= stats.budget_bytes
        return found, runtime.mode


@pytest.mark.parametrize("tier", TYPES)
@pytest.mark.parametrize("shape", ["qwen3moe", "olmoe", "deepseek2-fused"])
def test_decoding_is_upstream_with_repacked_weights_bit_for_bit(shape, tier, tiny_model):
    path = tiny_model(shape, tier)
    found, mode = managed(path, use_extra_bufts=True)
    assert f"{tier} in this CPU's own layout" in mode
    np.testing.assert_array_equal(found, upstream(path, repack=True))
    as_in_file, mode = managed(path, use_extra_bufts=False)
    assert "own layout" not in mode
    np.testing.assert_array_equal(as_in_file, upstream(path, repack=False))


@pytest.mark.parametrize("tier", TYPES)
def test_exact_is_upstream_without_repacked_weights(tier, tiny_model):
    """With everything in memory, where `auto` would change the layout, and in prompts too."""
    path = tiny_model("olmoe", tier)
    for read in (one_by_one, prompt):
        found, mode = managed(path, read, exact=True)
        assert "own layout" not in mode
        np.testing.assert_array_equal(found, upstream(path, False, read))


def test_where_experts_come_and_go(tiny_model):
    """auto keeps what the file has; asked for, the layout is changed at each read."""
    path = tiny_model("qwen3moe", "q4_0")
    _, mode = managed(path, share=0.5)
    assert "own layout" not in mode
    whole, _ = managed(path)
    found, mode = managed(path, share=0.5, layout="cpu")
    assert "q4_0 in this CPU's own layout" in mode
    np.testing.assert_array_equal(found, whole)


def test_auto_is_for_experts_that_stay(tiny_model):
    """Not where one of twenty comes and goes; but where all stay and change versions seldom."""
    path = tiny_model("qwen3moe", "q4_0")
    assert "own layout" not in managed(path, share=0.95)[1]
    low = tiny_model("qwen3moe", "q2_k")
    asked = SETTINGS | {"low": low, "policy": "dynaexq"}
    for rate, changed in ((1 << 20, True), (0, False)):
        with opened(path, 0.95, transition_rate=rate, **asked) as runtime, runtime.evaluator() as e:
            assert e.inside.policy.wants.all_resident
            assert ("q4_0 in this CPU's own layout" in runtime.mode) == changed
            one_by_one(e.eval)
            e.inside.store.check()


def test_types_without_one_stay_as_in_the_file(tiny_model):
    """Neither Q8_0 nor Q6_K has such kernels on x86."""
    for tier in ("q8_0", "q6_k"):
        path = tiny_model("olmoe", tier)
        found, mode = managed(path, layout="cpu", use_extra_bufts=False)
        assert "own layout" not in mode
        np.testing.assert_array_equal(found, upstream(path, repack=False))


@pytest.mark.parametrize("tier", TYPES)
def test_prompts_are_upstream_too(tier, tiny_model):
    """With four rows or more of an expert we take upstream's matrix product, where upstream goes
    row by row. Only for Q4_K its sums have another order."""
    path = tiny_model("olmoe", tier)
    found, _ = managed(path, prompt, use_extra_bufts=True)
    expected = upstream(path, True, prompt)
    if tier == "q4_k":
        assert np.square(found - expected).sum() < 5e-4 * np.square(expected).sum()
    else:
        np.testing.assert_array_equal(found, expected)


def written(folder, dense):
    shape = replace(synthetic.preset("tiny-qwen3moe"), dense_type=dense)
    return synthetic.write(folder / "m.gguf", shape, tiers=("q8_0",))


def few(evaluate):
    """Logits behind a prompt of fewer tokens than go by tiles, and behind each of some tokens."""
    found = [evaluate(WORDS[:7], 0)]
    found += [evaluate([token], 7 + i) for i, token in enumerate((11, 222, 33))]
    return np.concatenate(found)


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="Q8_0 experts stay as they are on x86 alone"
)
@pytest.mark.parametrize("repack", [True, False])
def test_managed_beside_repacked_dense_weights_is_upstream_bit_for_bit(tmp_path, repack):
    # upstream repacks Q4_K for this CPU, and has no such form of Q8_0
    path = written(tmp_path, GGMLType.Q4_K)
    found, _ = managed(path, few, use_extra_bufts=repack)
    np.testing.assert_array_equal(found, upstream(path, repack, few))


def has_tiles():
    """Whether prompts are faster by tiles on this CPU: moe-edge-layout.cpp says when."""
    return "avx512_vnni" in Path("/proc/cpuinfo").read_text()


@pytest.mark.skipif(not has_tiles(), reason="on this CPU prompts stay in its own layout")
@pytest.mark.parametrize("dense, least", [(GGMLType.Q4_K, 8), (GGMLType.Q2_K, 10)])
def test_prompts_over_repacked_dense_weights_are_those_over_plain_ones(
    library, tmp_path, dense, least
):
    """From so many activations on, in windows that are not full: tiles are those of plain rows."""
    if not library.interleaves(dense, 256, 256):
        pytest.skip(f"this CPU has no layout of its own for {dense.name}")
    path = written(tmp_path, dense)
    for n, is_plain in ((least - 1, False), (least, True), (120, True)):

        def prompt(evaluate, n=n):
            return evaluate((WORDS * 10)[:n], 0)

        found, _ = managed(path, prompt, use_extra_bufts=True, ubatch=128)
        np.testing.assert_array_equal(found, upstream(path, not is_plain, prompt, 128))
