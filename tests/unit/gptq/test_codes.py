"""Positions of codes in ggml's blocks: written by put_codes and read back by ggml."""

import numpy as np
import pytest

from gguf_tools.file.layout import BLOCK, TIER_TYPES, GGMLType
from gguf_tools.quantize.codes import CODINGS, code_values, put_codes
from gguf_tools.quantize.ggml import load_ggml

GROUPED = {GGMLType.IQ2_S, GGMLType.IQ3_S, GGMLType.IQ3_XXS}
FLOATS = {GGMLType.F32, GGMLType.F16, GGMLType.BF16}


@pytest.fixture(scope="module")
def ggml():
    return load_ggml()


def encoded(ggml, ggml_type):
    """Blocks [96, bytes] of weights with very different scales."""
    rng = np.random.default_rng(5)
    block = BLOCK[ggml_type]
    values = rng.standard_normal((96, block.weights)) * rng.lognormal(0, 2, (96, 1))
    return ggml.quantize(ggml_type, values.astype(np.float32)).reshape(96, block.bytes)


def codes_of(ggml, ggml_type, blocks):
    """The codes in blocks, found by trying every code."""
    coding = CODINGS[ggml_type]
    target = ggml.dequantize(ggml_type, blocks.reshape(-1), BLOCK[ggml_type].weights)
    found = np.full(target.shape, -1)
    trial = blocks.copy()
    for code in range(coding.first, coding.last + 1):
        put_codes(ggml_type, trial, np.full(target.shape, code, np.uint8))
        values = ggml.dequantize(ggml_type, trial.reshape(-1), target.shape[1])
        found[values == target] = code
    assert found.min() >= 0
    return found.astype(np.uint8)


def test_every_tier_has_its_codes_known_or_a_reason_not_to():
    assert set(CODINGS) | GROUPED | FLOATS == set(TIER_TYPES)


@pytest.mark.parametrize("ggml_type", CODINGS, ids=lambda each: each.tier_name)
def test_the_same_codes_give_the_same_values(ggml, ggml_type):
    blocks = encoded(ggml, ggml_type)
    again = blocks.copy()
    put_codes(ggml_type, again, codes_of(ggml, ggml_type, blocks))
    width = BLOCK[ggml_type].weights
    np.testing.assert_array_equal(
        ggml.dequantize(ggml_type, again.reshape(-1), width),
        ggml.dequantize(ggml_type, blocks.reshape(-1), width),
    )


@pytest.mark.parametrize("ggml_type", CODINGS, ids=lambda each: each.tier_name)
def test_codes_are_read_back_by_ggml_as_foretold(ggml, ggml_type):
    """ggml decodes random codes to the predicted values. A code at the position of another weight
    would change them."""
    coding, block = CODINGS[ggml_type], BLOCK[ggml_type]
    blocks = encoded(ggml, ggml_type)

    def decode(data):
        return ggml.dequantize(ggml_type, data, block.weights)

    values = code_values(ggml_type, blocks, decode)
    assert len(values) <= 2  # GPTQ keeps these values in memory for every weight
    codes = np.random.default_rng(6).integers(
        coding.first, coding.last + 1, (len(blocks), block.weights), dtype=np.uint8
    )
    put_codes(ggml_type, blocks, codes)
    found = decode(blocks.reshape(-1))
    at = codes.astype(np.int64) - coding.first
    if not coding.scales:
        expected = values[0] + at * (values[1] - values[0]) / (coding.last - coding.first)
        tolerance = 1e-5 * np.abs(values).max()
    else:
        expected, tolerance = np.array(coding.scales, np.float32)[at] * values[0], 0.0
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
    assert ggml.is_valid(ggml_type, blocks.reshape(-1))
    assert codes.min() == coding.first and codes.max() == coding.last
