"""Dense weights in the CPU's own layout beside managed experts: still upstream's bits."""

import platform
from dataclasses import replace

import numpy as np
import pytest

from gguf_tools import synthetic
from gguf_tools.file.layout import GGMLType
from orchestrator.config import Config
from orchestrator.engine.engine import Engine
from orchestrator.lab.bench.plain import PlainModel

PROMPT = [7, 300, 12, 99, 41, 250, 3, 17, 64, 128, 5, 201]
ANSWER = [11, 222, 33]


def read(evaluate):
    """Logits behind a prompt, of fewer tokens than go by tiles, and behind each of some tokens."""
    prompt = PROMPT[:7]
    found = [evaluate(prompt, 0)]
    found += [evaluate([token], len(prompt) + i) for i, token in enumerate(ANSWER)]
    return np.concatenate(found)


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="Q8_0 experts stay as they are on x86 alone"
)
def test_managed_beside_repacked_dense_weights_is_upstream_bit_for_bit(library, tmp_path):
    # upstream repacks Q4_K for this CPU, and has no such form of Q8_0
    shape = replace(synthetic.preset("tiny-qwen3moe"), dense_type=GGMLType.Q4_K)
    path = synthetic.write(tmp_path / "m.gguf", shape, tiers=("q8_0",))
    of_upstream = {}
    for repack in (True, False):
        with PlainModel(
            path, n_ctx=256, n_ubatch=32, threads=2, mmap=False, extra_bufts=repack
        ) as model:
            of_upstream[repack] = read(model.eval)
    settings = {"model": path, "ctx": 256, "ubatch": 32, "threads": 2, "policy": "lru"}
    for repack, expected in of_upstream.items():
        config = Config.build(force_managed=True, use_extra_bufts=repack, **settings)
        with Engine.open(config) as engine:
            assert engine.managed
            assert np.array_equal(read(engine.eval), expected)


def has_tiles() -> bool:
    """Whether prompts are faster by tiles on this CPU: moe-edge-layout.cpp says when."""
    with open("/proc/cpuinfo") as lines:
        return "avx512_vnni" in lines.read()


@pytest.mark.skipif(not has_tiles(), reason="on this CPU prompts stay in its own layout")
@pytest.mark.parametrize("dense, least", [(GGMLType.Q4_K, 8), (GGMLType.Q2_K, 10)])
def test_prompts_over_repacked_dense_weights_are_those_over_plain_ones(
    library, tmp_path, dense, least
):
    """From so many activations on, in windows that are not full: tiles are those of plain rows."""
    if not library.interleaves(dense, 256, 256):
        pytest.skip(f"this CPU has no layout of its own for {dense.name}")
    shape = replace(synthetic.preset("tiny-qwen3moe"), dense_type=dense)
    path = synthetic.write(tmp_path / "m.gguf", shape, tiers=("q8_0",))
    tokens = PROMPT * 10
    for n, is_plain in ((least - 1, False), (least, True), (120, True)):
        of_upstream = {}
        for repack in (True, False):
            with PlainModel(
                path, n_ctx=256, n_ubatch=128, threads=2, mmap=False, extra_bufts=repack
            ) as model:
                of_upstream[repack] = model.eval(tokens[:n], 0)
        config = Config.build(
            model=path,
            ctx=256,
            ubatch=128,
            threads=2,
            policy="lru",
            force_managed=True,
            use_extra_bufts=True,
        )
        with Engine.open(config) as engine:
            assert np.array_equal(engine.eval(tokens[:n], 0), of_upstream[not is_plain])
