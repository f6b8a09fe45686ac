"""An exported tier is a stock GGUF: llama.cpp loads it and computes with it."""

import numpy as np
import pytest

from gguf_tools import synthetic
from gguf_tools.pack import export, pack
from orchestrator.config import Config
from orchestrator.engine.engine import Engine

pytestmark = pytest.mark.usefixtures("library")
# Each token alone is a prompt: behind several, a tie at the router may fall either way.
TOKENS = [1, 5, 9, 2]
TIERS = ("q8_0", "q4_k", "q2_k")


def logits(path):
    """Logits [len(TOKENS), n_vocab] behind each token, on upstream's own path."""
    config = Config.build(model=path, ctx=64, threads=1, use_mmap=False, use_extra_bufts=False)
    with Engine.open(config) as engine:
        assert not engine.managed
        return np.stack([engine.eval([token], 0)[-1] for token in TOKENS])


@pytest.mark.parametrize("shape", ["tiny-qwen3moe", "tiny-deepseek2-fused"])
def test_exported_tiers_compute_like_the_source(shape, tmp_path, ggml):
    src = synthetic.write(tmp_path / "src.gguf", shape, tiers=("f16",))
    path = pack(src, tmp_path / "packed.gguf", TIERS, ggml=ggml).path
    reference = logits(src)
    errors = []
    for tier in TIERS:
        found = logits(export(path, tmp_path / f"{tier}.gguf", tier).path)
        assert np.isfinite(found).all()
        errors.append(float(np.sqrt(np.mean((found - reference) ** 2))))
    assert errors[0] < 0.05 * reference.std()
    assert errors == sorted(errors)
