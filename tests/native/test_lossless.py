"""With one tier, what a managed model computes is what upstream computes, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.engine.engine import Engine
from orchestrator.errors import BudgetError, NativeError

from .conftest import DEVICES, greedy

pytestmark = pytest.mark.usefixtures("library_folder")

DEVICE = DEVICES[1]
SHAPES = (
    "qwen3moe",
    "qwen2moe",
    "olmoe",
    "mixtral",
    "deepseek",
    "deepseek2",
    "deepseek2-fused",
    "phimoe",
)
# Of the experts: all are critical, and slots for the low precision are set aside.
ALL = 0.999
PROMPT = [int(t) for t in np.random.default_rng(0).integers(0, 250, 40)]


def run(model: Path, n_decode: int, **options: object) -> np.ndarray:
    """Logits [1 + n_decode, n_vocab] of a prompt in two chunks and of greedy decoding."""
    config = Config.build(
        model=model, ctx=512, ubatch=32, threads=2, use_extra_bufts=False, **options
    )
    with Engine.open(config) as engine:
        rows = greedy(engine, PROMPT, n_decode)
        if engine.managed:
            engine.store.check()
            stats = engine.store.stats()
            assert stats.slot_bytes_peak <= stats.budget_bytes
    return rows


def resident_bytes(path: Path) -> int:
    """Bytes of a file's mappings in this process that are in memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def smallest_budget(model: Path, **options: object) -> int:
    with pytest.raises(BudgetError) as refused:
        run(model, 0, expert_ram=1, **options)
    return refused.value.needed_bytes


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_at_every_budget(shape: str, tiny_model: Callable[..., Path]) -> None:
    """Down to the smallest budget that is allowed: one slot a group, so every layer with two
    experts needs waves."""
    model = tiny_model(shape, "q4_k")
    reference = run(model, 12)
    assert np.isfinite(reference).all()
    with ExpertModel.open(model) as opened:
        whole = opened.tier_bytes[0]
    least = smallest_budget(model, policy="lru")
    assert least < whole // 4
    for budget in (2 * whole, whole // 2, least):
        found = run(model, 12, policy="lru", expert_ram=budget)
        np.testing.assert_array_equal(found, reference, err_msg=f"{budget} bytes")


@pytest.mark.parametrize("tier", ["f16", "q8_0", "q4_k", "q2_k"])
def test_equal_over_a_long_answer(tier: str, tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("qwen3moe", tier)
    reference = run(model, 220)
    budget = 3 * smallest_budget(model, policy="lru")
    np.testing.assert_array_equal(run(model, 220, policy="lru", expert_ram=budget), reference)


def test_quotas_are_lossless_too(tiny_model: Callable[..., Path]) -> None:
    """DyMoE with everything critical: per-layer slots, look-ahead and prefetch, same logits."""
    model = tiny_model("qwen3moe", "q4_k", "q2_k")
    reference = run(model, 40)
    options = {"policy": "dymoe", "high_tier": "q4_k", "low_tier": "q2_k", "retention": ALL}
    budget = smallest_budget(model, **options)
    for factor in (1, 2, 20):
        found = run(model, 40, expert_ram=factor * budget, **options)
        np.testing.assert_array_equal(found, reference)


@pytest.mark.parametrize("kinds", [1, 2, 3])
@pytest.mark.parametrize("shape", ["qwen3moe", "deepseek2-fused"])
def test_matrices_loaded_one_by_one_are_lossless(
    kinds: int, shape: str, tiny_model: Callable[..., Path]
) -> None:
    """FIRM with three layers that vote, while it tunes itself: another choice of experts to load
    ahead in every step, and the same logits."""
    model = tiny_model(shape, "q4_k")
    reference = run(model, 40)
    options = {"policy": "firm", "prefetch": "on", "prefetch_kinds": kinds, "agree": "mol"}
    options |= {"tune": "climb" if kinds == 2 else "all", "tune_steps": 1, "tune_tokens": 30}
    budget = smallest_budget(model, **options)
    for factor in (1, 3):
        found = run(model, 40, expert_ram=factor * budget, **options)
        np.testing.assert_array_equal(found, reference)


def test_the_default_is_lossless_with_one_tier(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("qwen3moe", "q4_k")
    budget = smallest_budget(model)
    assert budget > smallest_budget(model, policy="lru")  # it is dymoe, with slots per layer
    np.testing.assert_array_equal(run(model, 40, expert_ram=2 * budget), run(model, 40))


def test_all_low_equals_the_low_file(tiny_model: Callable[..., Path]) -> None:
    both = tiny_model("qwen3moe", "q4_k", "q2_k")
    low_alone = tiny_model("qwen3moe", "q2_k")
    reference = run(low_alone, 40)
    found = run(both, 40, policy="lru", high_tier="q2_k", expert_ram=1 << 20)
    np.testing.assert_array_equal(found, reference)


def test_two_ordinary_files_are_one_model(tiny_model: Callable[..., Path]) -> None:
    """--low OTHER.gguf gives what one packed file gives. Nothing is read ahead or evicted:
    which tier a low request finds would depend on the disk's timing."""
    options = {"policy": "dymoe", "retention": 0.5, "expert_ram": 64 << 20, "n_ahead": 0}
    packed = run(tiny_model("qwen3moe", "q4_k", "q2_k"), 40, low_tier="q2_k", **options)
    pair = run(tiny_model("qwen3moe", "q4_k"), 40, low=tiny_model("qwen3moe", "q2_k"), **options)
    np.testing.assert_array_equal(pair, packed)


def test_skipping_changes_the_answer_and_stays_finite(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("qwen3moe", "q4_k")
    found = run(model, 40, policy="dymoe", low_tier="skip", retention=0.5, expert_ram=1 << 20)
    assert np.isfinite(found).all()
    assert not np.array_equal(found, run(model, 40))


@pytest.mark.parametrize("shape", ["qwen3moe", "deepseek2-fused", "mixtral"])
def test_equal_on_a_device(shape: str, tiny_model: Callable[..., Path]) -> None:
    """Slots on a device whose copies are late and poison where they go: the same logits, at every
    budget, with room behind it for all experts or for reads alone."""
    model = tiny_model(shape, "q4_k")
    reference = run(model, 12)
    least = smallest_budget(model, policy="lru", device=DEVICE)
    for budget in (100 * least, 3 * least, least):
        found = run(model, 12, policy="lru", expert_ram=budget, device=DEVICE)
        np.testing.assert_array_equal(found, reference, err_msg=f"{budget} bytes")


def test_tiers_on_a_device_are_those_in_memory(tiny_model: Callable[..., Path]) -> None:
    """DyMoE with two precisions, look-ahead and prefetch: with everything critical the logits of
    the high tier; and a low request that finds no high copy computes the low file's."""
    model = tiny_model("qwen3moe", "q4_k", "q2_k")
    options = {"policy": "dymoe", "high_tier": "q4_k", "low_tier": "q2_k", "device": DEVICE}
    budget = 2 * smallest_budget(model, retention=ALL, **options)
    found = run(model, 40, expert_ram=budget, retention=ALL, **options)
    np.testing.assert_array_equal(found, run(model, 40))
    exact = {"exact_tiers": True, "retention": 0.5, "expert_ram": budget, "n_ahead": 0}
    np.testing.assert_array_equal(
        run(model, 40, **options | exact), run(model, 40, **options | exact | {"device": "cpu"})
    )


def test_a_file_cut_short_while_decoding(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """An error that names the file, never other text; the engine works again afterwards."""
    model = tmp_path / "cut.gguf"
    model.write_bytes(tiny_model("qwen3moe", "q4_k").read_bytes())
    whole = model.read_bytes()
    budget = smallest_budget(model, policy="lru")
    config = Config.build(model=model, policy="lru", expert_ram=budget, ctx=256, threads=2)
    with Engine.open(config) as engine:
        reference = engine.eval(PROMPT, 0)
        os.truncate(model, len(whole) // 4)
        with pytest.raises(NativeError, match=r"cut\.gguf.*truncated"):
            engine.eval(PROMPT, 0)
        model.write_bytes(whole)
        np.testing.assert_array_equal(engine.eval(PROMPT, 0), reference)


def test_memory_stays_within_the_promise(tiny_model: Callable[..., Path]) -> None:
    """Placeholders take nothing: the slots are all that the experts cost."""
    model = tiny_model("olmoe", "q8_0")
    config = Config.build(model=model, policy="lru", expert_ram=1 << 20, ctx=256, threads=2)
    with Engine.open(config) as engine:
        engine.eval(PROMPT, 0)
        stats = engine.store.stats()
        assert 0 < stats.slot_bytes_in_use <= stats.slot_bytes_peak <= 1 << 20
        # the reader maps the file for its header; of the experts no page is mapped in
        assert resident_bytes(model) < model.stat().st_size // 4
