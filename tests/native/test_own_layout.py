"""Experts in the CPU's own layout, and repacked dense weights next to managed experts.

Logits equal upstream's with repacked weights, and the slots do not grow.
"""

import platform
import re
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
        pytest.skip(f"this CPU has no own layout for {tier or 'q4_0'}")


def one_by_one(evaluate):
    """Return the logits after each token, decoded one at a time."""
    return np.concatenate([evaluate([token], at) for at, token in enumerate(TOKENS)])


def prompt(evaluate):
    """Return the logits after a prompt of three micro-batches."""
    return evaluate(TOKENS * 4, 0)[-1]


def upstream(path, repack, read=one_by_one, n_ubatch=32):
    asked = {"n_ctx": 256, "n_ubatch": n_ubatch, "threads": 2, "mmap": False}
    with PlainModel(path, **asked, extra_bufts=repack) as model:
        return read(model.eval)


def managed(path, read=one_by_one, share=0, **options):
    """Return the logits and the status line. Check the store's invariants and its budget."""
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
def test_decoding_equals_upstream_with_repacked_weights(shape, tier, tiny_model):
    path = tiny_model(shape, tier)
    found, mode = managed(path, use_extra_bufts=True)
    assert f"experts of type {tier} repacked for this CPU" in mode
    np.testing.assert_array_equal(found, upstream(path, repack=True))
    as_in_file, mode = managed(path, use_extra_bufts=False)
    assert "repacked for this CPU" not in mode
    np.testing.assert_array_equal(as_in_file, upstream(path, repack=False))


@pytest.mark.parametrize("tier", TYPES)
def test_exact_equals_upstream_without_repacked_weights(tier, tiny_model):
    """With `exact`, logits equal upstream's without repacked weights.

    All experts are resident, so `auto` would change the layout. Prompts are included.
    """
    path = tiny_model("olmoe", tier)
    for read in (one_by_one, prompt):
        found, mode = managed(path, read, exact=True)
        assert "repacked for this CPU" not in mode
        np.testing.assert_array_equal(found, upstream(path, False, read))


def test_layout_with_evictions(tiny_model):
    """If experts are evicted, `auto` keeps the file's layout.

    With `layout=cpu`, each read is converted.
    """
    path = tiny_model("qwen3moe", "q4_0")
    _, mode = managed(path, share=0.5)
    assert "repacked for this CPU" not in mode
    whole, _ = managed(path)
    found, mode = managed(path, share=0.5, layout="cpu")
    assert "experts of type q4_0 repacked for this CPU" in mode
    np.testing.assert_array_equal(found, whole)


def test_auto_converts_resident_experts_only(tiny_model):
    """`auto` converts if all experts are resident and rarely change tiers.

    It does not convert if slots hold only 95 % of the experts.
    """
    path = tiny_model("qwen3moe", "q4_0")
    assert "repacked for this CPU" not in managed(path, share=0.95)[1]
    low = tiny_model("qwen3moe", "q2_k")
    asked = SETTINGS | {"low": low, "policy": "dynaexq"}
    for rate, changed in ((1 << 20, True), (0, False)):
        with opened(path, 0.95, transition_rate=rate, **asked) as runtime, runtime.evaluator() as e:
            assert e.inside.policy.wants.all_resident
            # Some processors also have a layout for the low precision.
            repacked = re.search("experts of type [^,]*q4_0[^,]* repacked", runtime.mode)
            assert (repacked is not None) == changed
            one_by_one(e.eval)
            e.inside.store.check()


def test_types_without_an_own_layout_stay_as_in_the_file(tiny_model):
    """Q8_0 and Q6_K have no such kernels on x86."""
    for tier in ("q8_0", "q6_k"):
        path = tiny_model("olmoe", tier)
        found, mode = managed(path, layout="cpu", use_extra_bufts=False)
        assert "repacked for this CPU" not in mode
        np.testing.assert_array_equal(found, upstream(path, repack=False))


@pytest.mark.parametrize("tier", TYPES)
def test_prompts_equal_upstream(tier, tiny_model):
    """Logits of prompts equal upstream's, except with Q4_K.

    With four or more rows per expert we use upstream's matrix product, while upstream computes row
    by row. Only Q4_K then sums in another order, with a relative squared error below 5e-4.
    """
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
    """Return the logits after a prompt that is too short for tiles, and after three more tokens."""
    found = [evaluate(WORDS[:7], 0)]
    found += [evaluate([token], 7 + i) for i, token in enumerate((11, 222, 33))]
    return np.concatenate(found)


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="Q8_0 experts keep their layout on x86 only"
)
@pytest.mark.parametrize("repack", [True, False])
def test_repacked_dense_weights_next_to_managed_experts(tmp_path, repack):
    # upstream repacks Q4_K for this CPU, but not Q8_0
    path = written(tmp_path, GGMLType.Q4_K)
    found, _ = managed(path, few, use_extra_bufts=repack)
    np.testing.assert_array_equal(found, upstream(path, repack, few))


def has_tiles():
    """Return whether prompts are faster with tiles on this CPU (see moe-edge-layout.cpp)."""
    return "avx512_vnni" in Path("/proc/cpuinfo").read_text()


@pytest.mark.skipif(not has_tiles(), reason="this CPU computes prompts without tiles")
@pytest.mark.parametrize("dense, least", [(GGMLType.Q4_K, 8), (GGMLType.Q2_K, 10)])
def test_long_prompts_use_tiles_of_plain_dense_weights(library, tmp_path, dense, least):
    """From `least` tokens on, logits equal those with plain rows.

    This includes windows of tokens that are not full.
    """
    if not library.interleaves(dense, 256, 256):
        pytest.skip(f"this CPU has no own layout for {dense.name}")
    path = written(tmp_path, dense)
    for n, is_plain in ((least - 1, False), (least, True), (120, True)):

        def prompt(evaluate, n=n):
            return evaluate((WORDS * 10)[:n], 0)

        found, _ = managed(path, prompt, use_extra_bufts=True, ubatch=128)
        np.testing.assert_array_equal(found, upstream(path, not is_plain, prompt, 128))
