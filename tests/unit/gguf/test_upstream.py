"""An exported tier is a stock GGUF: llama.cpp loads it and computes with it."""

import numpy as np
import pytest

from gguf_tools import synthetic
from gguf_tools.pack import export, pack

llama_cpp = pytest.importorskip("llama_cpp", reason="llama_cpp is not built: run `make build`")

# Each token alone is a prompt: behind several, a tie at the router may fall either way.
TOKENS = [1, 5, 9, 2]
TIERS = ("q8_0", "q4_k", "q2_k")


def logits(path):
    """Logits [len(TOKENS), n_vocab] behind each token, through the C API."""
    params = llama_cpp.llama_model_default_params()
    params.use_mmap = False
    params.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise ValueError(f"{path}: not loaded")
    try:
        context_params = llama_cpp.llama_context_default_params()
        context_params.n_ctx = 64
        context_params.n_threads = context_params.n_threads_batch = 1
        context = llama_cpp.llama_init_from_model(model, context_params)
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        found = np.empty((len(TOKENS), n_vocab), np.float32)
        for row, token in enumerate(TOKENS):
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
            batch = llama_cpp.llama_batch_get_one((llama_cpp.llama_token * 1)(token), 1)
            assert llama_cpp.llama_decode(context, batch) == 0
            logits_of_last = llama_cpp.llama_get_logits_ith(context, -1)
            found[row] = np.ctypeslib.as_array(logits_of_last, (n_vocab,))
        llama_cpp.llama_free(context)
        return found
    finally:
        llama_cpp.llama_model_free(model)


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
