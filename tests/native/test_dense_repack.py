"""Dense weights in the CPU's own layout beside managed experts: still upstream's bits."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gguf_tools import synthetic
from gguf_tools.file.layout import GGMLType
from orchestrator.native import Library

from .test_own_layout import Evaluate, managed, upstream

PROMPT = [7, 300, 12, 99, 41, 250, 3, 17, 64, 128, 5, 201]


def written(folder: Path, dense: GGMLType) -> Path:
    shape = replace(synthetic.preset("tiny-qwen3moe"), dense_type=dense)
    return synthetic.write(folder / "m.gguf", shape, tiers=("q8_0",))


def few(evaluate: Evaluate) -> np.ndarray:
    """Logits behind a prompt of fewer tokens than go by tiles, and behind each of some tokens."""
    found = [evaluate(PROMPT[:7], 0)]
    found += [evaluate([token], 7 + i) for i, token in enumerate((11, 222, 33))]
    return np.concatenate(found)


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="Q8_0 experts stay as they are on x86 alone"
)
@pytest.mark.parametrize("repack", [True, False])
def test_managed_beside_repacked_dense_weights_is_upstream_bit_for_bit(
    tmp_path: Path, repack: bool
) -> None:
    # upstream repacks Q4_K for this CPU, and has no such form of Q8_0
    path = written(tmp_path, GGMLType.Q4_K)
    found, _ = managed(path, few, use_extra_bufts=repack)
    np.testing.assert_array_equal(found, upstream(path, repack, few))


def has_tiles() -> bool:
    """Whether prompts are faster by tiles on this CPU: moe-edge-layout.cpp says when."""
    return "avx512_vnni" in Path("/proc/cpuinfo").read_text()


@pytest.mark.skipif(not has_tiles(), reason="on this CPU prompts stay in its own layout")
@pytest.mark.parametrize("dense, least", [(GGMLType.Q4_K, 8), (GGMLType.Q2_K, 10)])
def test_prompts_over_repacked_dense_weights_are_those_over_plain_ones(
    library: Library, tmp_path: Path, dense: GGMLType, least: int
) -> None:
    """From so many activations on, in windows that are not full: tiles are those of plain rows."""
    if not library.interleaves(dense, 256, 256):
        pytest.skip(f"this CPU has no layout of its own for {dense.name}")
    path = written(tmp_path, dense)
    for n, is_plain in ((least - 1, False), (least, True), (120, True)):

        def prompt(evaluate: Evaluate, n: int = n) -> np.ndarray:
            return evaluate((PROMPT * 10)[:n], 0)

        found, _ = managed(path, prompt, use_extra_bufts=True, ubatch=128)
        np.testing.assert_array_equal(found, upstream(path, not is_plain, prompt, 128))
