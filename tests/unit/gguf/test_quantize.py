"""ggml through ctypes, compared with the gguf package, and its quantization errors."""

import ctypes

import numpy as np
import pytest
from tables import cases

from gguf_tools import built
from gguf_tools.errors import QuantizeError
from gguf_tools.file.layout import (
    BLOCK,
    TIER_TYPES,
    GGMLType,
    bits_per_weight,
    fitting_type,
)
from gguf_tools.quantize.ggml import library_path, load_ggml
from gguf_tools.quantize.tiers import parse_tiers

gguf = pytest.importorskip("gguf")
# Limit of the root mean square error on a standard normal: 10 % above the measured one.
MOST_ERROR = {
    **{"F32": 0.0, "F16": 0.00023, "BF16": 0.0019, "Q8_0": 0.0059, "Q6_K": 0.0194},
    **{"Q5_K": 0.0395, "Q5_1": 0.0415, "Q5_0": 0.0468, "Q4_K": 0.0782, "Q4_1": 0.0857},
    **{"Q4_0": 0.0942, "IQ4_NL": 0.0832, "IQ4_XS": 0.0839, "MXFP4": 0.126, "Q3_K": 0.166},
    **{"IQ3_S": 0.182, "IQ3_XXS": 0.234, "IQ2_S": 0.291, "Q2_K": 0.326, "Q2_0": 0.387},
    "Q1_0": 0.658,
}


def normal(rows=8, n=512, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, n), np.float32)


def error_of(ggml, ggml_type, values):
    again = ggml.dequantize(ggml_type, ggml.quantize(ggml_type, values), values.shape[1])
    return float(np.sqrt(np.mean((again - values) ** 2)))


@pytest.mark.parametrize("ggml_type", TIER_TYPES, ids=lambda each: each.tier_name)
def test_every_tier_type_round_trips_with_a_small_error(ggml, ggml_type):
    assert error_of(ggml, ggml_type, normal()) <= MOST_ERROR[ggml_type.name]


@pytest.mark.parametrize("ggml_type", [GGMLType.Q8_0, GGMLType.Q4_0, GGMLType.BF16, GGMLType.F16])
def test_same_bytes_as_the_gguf_package(ggml, ggml_type):
    values = normal(seed=1)
    theirs = gguf.quants.quantize(values, gguf.GGMLQuantizationType(int(ggml_type)))
    assert ggml.quantize(ggml_type, values).tobytes() == theirs.tobytes()


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "Q3_K", "Q2_K", "IQ4_NL"])
def test_dequantizes_like_the_gguf_package(ggml, name):
    blocks = ggml.quantize(GGMLType[name], normal(seed=2))
    ours = ggml.dequantize(GGMLType[name], blocks, 512)
    theirs = gguf.quants.dequantize(blocks.reshape(8, -1), gguf.GGMLQuantizationType[name])
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def by_ggml(ggml, ggml_type, values):
    """Bytes of one call of ggml's encoder."""
    library = ctypes.CDLL(str(ggml.path))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    blocks = np.zeros(values.size // BLOCK[ggml_type].weights * BLOCK[ggml_type].bytes, np.uint8)
    library.ggml_quantize_chunk(
        ctypes.c_int(ggml_type),
        ctypes.c_void_p(values.ctypes.data),
        ctypes.c_void_p(blocks.ctypes.data),
        ctypes.c_int64(0),
        *map(ctypes.c_int64, values.shape),
        ctypes.c_void_p(None),
    )
    return blocks


@cases("ggml_type", GGMLType.Q4_K, GGMLType.Q2_K, GGMLType.IQ3_XXS, GGMLType.IQ4_NL)
def test_rows_are_quantized_one_by_one(ggml, ggml_type):
    """Rows may be quantized in groups: the bytes equal those of one call of ggml."""
    values = normal(rows=6, seed=3)
    pieces = [ggml.quantize(ggml_type, values[at : at + 2]).tobytes() for at in (0, 2, 4)]
    assert b"".join(pieces) == by_ggml(ggml, ggml_type, values).tobytes()


def test_fallbacks_keep_the_size_and_choose_the_smaller_error(ggml):
    values = normal(rows=32, n=1408, seed=4)
    assert fitting_type(GGMLType.Q4_K, 1408) is GGMLType.IQ4_NL
    assert fitting_type(GGMLType.Q2_K, 1408) is GGMLType.Q2_0
    assert fitting_type(GGMLType.Q2_K, 1440) is GGMLType.IQ4_NL
    assert fitting_type(GGMLType.Q4_K, 1536) is GGMLType.Q4_K
    assert fitting_type(GGMLType.Q4_K, 1400) is GGMLType.F16
    assert bits_per_weight(GGMLType.IQ4_NL) == bits_per_weight(GGMLType.Q4_0)
    assert error_of(ggml, GGMLType.IQ4_NL, values) < error_of(ggml, GGMLType.Q4_0, values)


def test_q2_0_is_half_the_error_of_ggmls_encoder(ggml):
    values = normal(rows=32, n=1408, seed=5)
    theirs = ggml.dequantize(GGMLType.Q2_0, by_ggml(ggml, GGMLType.Q2_0, values), 1408)
    error = float(np.sqrt(np.mean((theirs - values) ** 2)))
    assert error_of(ggml, GGMLType.Q2_0, values) < 0.55 * error


def test_q2_0_is_exact_for_values_that_it_can_represent(ggml):
    codes = np.random.default_rng(6).integers(-1, 3, (5, 128)).astype(np.float32)
    for scale in (0.5, -0.25, 0.0):
        values = codes * np.float32(scale)
        blocks = ggml.quantize(GGMLType.Q2_0, values)
        again = ggml.dequantize(GGMLType.Q2_0, blocks, 128)
        np.testing.assert_array_equal(again, values)


def test_values_that_cannot_be_quantized_are_refused(ggml):
    with pytest.raises(QuantizeError, match="importance matrix"):
        ggml.quantize(GGMLType.IQ2_XXS, normal())
    with pytest.raises(QuantizeError, match="not a multiple of 256"):
        ggml.quantize(GGMLType.Q4_K, normal(n=128))
    for bad in (np.nan, np.inf, -np.inf):
        values = normal()
        values[3, 7] = bad
        with pytest.raises(QuantizeError, match="not finite"):
            ggml.quantize(GGMLType.Q4_K, values)
    values = np.full((1, 256), 7e4, np.float32)
    with pytest.raises(QuantizeError, match="magnitude 70000 exceeds 65504"):
        ggml.quantize(GGMLType.Q2_0, values)
    assert (ggml.dequantize(GGMLType.F32, ggml.quantize(GGMLType.F32, values), 256) == values).all()
    with pytest.raises(QuantizeError, match="i32"):
        ggml.dequantize(GGMLType.I32, np.zeros(256, np.uint8), 64)
    with pytest.raises(QuantizeError, match="a whole number of rows"):
        ggml.dequantize(GGMLType.F16, np.zeros(130, np.uint8), 64)


def test_tier_names():
    assert parse_tiers(["q8_0", "Q4_K", " q2_k"]) == [GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.Q2_K]
    for names, says in {
        ("q9",): "unknown tier q9: known tiers are f32, f16",
        ("iq2_xs",): "importance matrix",
        ("i32",): "known tiers",
        (): "0 tiers",
        ("f16", "q8_0", "q6_k", "q4_k", "q3_k", "q2_k"): "6 tiers",
        ("q2_k", "q4_k"): "list the best tier first",
        ("q4_k", "q4_k"): "not below",
    }.items():
        with pytest.raises(QuantizeError, match=says):
            parse_tiers(names)


def test_a_missing_library_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    with pytest.raises(QuantizeError, match=f"no libggml-base in this folder: {built.advice()}"):
        library_path()
    (tmp_path / "libggml-base.so").write_bytes(b"not a library")
    with pytest.raises(QuantizeError, match="not a usable libggml-base"):
        load_ggml()
