"""Every family, from transformers' checkpoint to our engine's logits."""

import numpy as np
import pytest

from gguf_tools.pack import export
from gguf_tools.verify import verify

from .families import FAMILIES
from .running import managed_logits, our_logits

# Limits of the largest error, in standard deviations of the logits. Everything is float32, so only
# the order of sums differs (3e-5 measured). Upstream computes linear attention in another way
# (6e-4), and rounding before GELU may differ (1.5e-3).
EXACT = 2e-4
OTHERWISE = {"qwen3-next": 2e-3, "qwen3.5-moe": 2e-3, "gemma4": 5e-3}
# Limit of the root mean square error with default settings. ggml rounds activations to half
# precision before it multiplies F16 weights, and stores keys and values in half precision.
# Sometimes this changes a close choice of experts, so the largest error says little.
HALF = 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_the_original_tokenizers(name, case):
    made = case(name)
    assert made.tokens == made.their_tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(name, case, float32_attention):
    """The logits of the prompt and of 16 decoded tokens agree, with some of the experts
    resident."""
    made = case(name)
    assert 0.3 < made.logits.std() < 30
    float32_attention()
    found = managed_logits(made.packed, made.tokens, made.answer, "f32")
    most = OTHERWISE.get(name, EXACT)
    assert np.abs(found - made.logits).max() < most * made.logits.std()


@pytest.mark.parametrize("name", FAMILIES)
def test_f16_tier_is_near_and_exports(name, case, tmp_path):
    """With default settings, the logits are close to transformers'. The exported tier gives the
    same bits on llama.cpp's own path."""
    made = case(name)
    found = managed_logits(made.packed, made.tokens, made.answer, "f16")
    assert np.sqrt(np.mean((found - made.logits) ** 2)) < HALF * made.logits.std()
    plain = export(made.packed, tmp_path / "f16.gguf", "f16").path
    np.testing.assert_array_equal(our_logits(plain, made.tokens, made.answer), found)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_converted_file_passes_verify(name, case):
    report = verify(case(name).packed, threads=1)
    assert report.problems == []
    assert report.tiers == ["f32", "f16"]
