"""Checkpoints in bf16 with tied embeddings and odd sizes, compared with transformers.

In float32 only the order of sums may differ. In bf16 activations are rounded before products. The
limit is the distance of transformers' own bf16 from float32.
"""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra `convert`")
pytest.importorskip("transformers", reason="needs the extra `convert`")

import torch

from gguf_tools.convert import convert

from . import checkpoints
from .families import FAMILIES
from .running import managed_logits, our_logits

ODD = {"hidden_size": 72, "intermediate_size": 88, "vocab_size": 391, "tie_word_embeddings": True}
ODD |= {"num_attention_heads": 3, "num_key_value_heads": 3}
MORE = {
    "qwen3-moe": {"moe_intermediate_size": 88, "head_dim": 24, "num_key_value_heads": 1},
    "mixtral": {"head_dim": 24, "num_key_value_heads": 1},
    "olmoe": {},
    "deepseek-v2": {"moe_intermediate_size": 88},
}
# llama.cpp loads these only with a separate output matrix.
COPIED = ("qwen2-moe", "olmoe", "dots1", "minimax-m2", "gpt-oss", "phi-moe")
TOKENS, ANSWER = list(range(7, 39)), list(range(200, 216))


def write(name, folder, **config):
    """Write a bf16 checkpoint to folder/hf and the same weights as float32 to folder/hf32. Returns
    the model in float32. The converter makes a pure float32 model of the second one."""
    family = replace(FAMILIES[name], config={**FAMILIES[name].config, **config})
    model = family.build()
    for kind, dtype in (("hf", torch.bfloat16), ("hf32", torch.float32)):
        with_parameters(model, dtype)
        model.save_pretrained(folder / kind)
        checkpoints.save_tokenizer(family.tokenizer, folder / kind)
    if family.adapt is not None:
        family.adapt(model)
    return model


def with_parameters(model, dtype):
    """Convert only the weights. Rope frequencies are a buffer and stay in float32, as in a loaded
    checkpoint."""
    for values in model.parameters():
        values.data = values.data.to(dtype)


def rms(found, expected):
    """Root mean square difference in standard deviations of the logits."""
    return float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())


@pytest.mark.parametrize("name", MORE)
def test_odd_sizes_and_tied_embeddings(name, tmp_path, float32_attention):
    model = write(name, tmp_path, **(ODD | MORE[name]))
    exact = checkpoints.reference_logits(model, TOKENS + ANSWER)
    with_parameters(model, torch.bfloat16)
    theirs = checkpoints.reference_logits(model, TOKENS + ANSWER)
    assert exact.shape[1] == 391
    convert(tmp_path / "hf", tmp_path / "bf16.gguf", ["bf16"], threads=1)
    ours = managed_logits(tmp_path / "bf16.gguf", TOKENS, ANSWER)
    assert rms(ours, exact) < 1.5 * rms(theirs, exact)

    convert(tmp_path / "hf32", tmp_path / "f32.gguf", ["f32"], threads=1)
    float32_attention()
    found = managed_logits(tmp_path / "f32.gguf", TOKENS, ANSWER)
    assert np.abs(found - exact).max() < 2e-4 * exact.std()


@pytest.mark.parametrize("name", COPIED)
def test_tied_embeddings_for_architectures_with_an_output_matrix(name, tmp_path):
    model = write(name, tmp_path, tie_word_embeddings=True)
    exact = checkpoints.reference_logits(model, TOKENS + ANSWER)
    convert(tmp_path / "hf", tmp_path / "f16.gguf", ["f16"], threads=1)
    assert rms(our_logits(tmp_path / "f16.gguf", TOKENS, ANSWER), exact) < 0.2
