"""GPTQ on correlated inputs: its gain over rounding, and its behaviour with little or no data."""

import sys

import numpy as np
import pytest

from gguf_tools.errors import QuantizeError
from gguf_tools.file.layout import BLOCK, GGMLType, row_bytes
from gguf_tools.quantize import gptq
from gguf_tools.quantize.codes import CODINGS
from gguf_tools.quantize.ggml import load_ggml

ROWS = 24


@pytest.fixture(scope="module", autouse=True)
def torch():
    """Skips all tests of this file if torch is not installed, and uses one thread."""
    module = pytest.importorskip("torch", reason="torch is not installed (extra: convert)")
    before = module.get_num_threads()
    module.set_num_threads(1)
    yield module
    module.set_num_threads(before)


@pytest.fixture(scope="module")
def ggml():
    return load_ggml()


def inputs(n, tokens=2000, seed=3):
    """Activations [tokens, n] similar to a model's: correlated, with a few large columns."""
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((tokens, n // 4))
    x = hidden @ rng.standard_normal((n // 4, n)) / np.sqrt(n / 4)
    x += 0.3 * rng.standard_normal((tokens, n))
    return (x * rng.lognormal(0, 0.7, n)).astype(np.float32)


def weights(n, seed=4):
    return np.random.default_rng(seed).standard_normal((ROWS, n)).astype(np.float32)


def hessian(x):
    return x.T.astype(np.float64) @ x


def loss(ggml, ggml_type, w, blocks, x):
    """Squared error of the outputs, relative to their power."""
    q = ggml.dequantize(ggml_type, blocks, w.shape[1])
    return float(np.square(x @ (w - q).T).sum() / np.square(x @ w.T).sum())


def made(ggml, ggml_type, w, h):
    factor = gptq.factorize(h, "cpu")
    assert factor is not None
    blocks = gptq.quantize(ggml, ggml_type, w, factor)
    assert blocks.nbytes == ROWS * row_bytes(ggml_type, w.shape[1])
    assert ggml.is_valid(ggml_type, blocks)
    return blocks


# Upper limit of the loss relative to ggml's with the same importance: measured values plus a
# margin.
CLEARLY = {GGMLType.Q2_K: 0.6, GGMLType.Q3_K: 0.55, GGMLType.Q4_K: 0.55}


@pytest.mark.parametrize("ggml_type", CODINGS, ids=lambda each: each.tier_name)
def test_beats_rounding_and_importance(ggml, ggml_type):
    """On inputs that were not used for calibration, the loss is below 0.8 times that of rounding
    and of importance."""
    n = 512
    x, w = inputs(n), weights(n)
    seen, unseen = x[:1500], x[1500:]
    h = hessian(seen)
    rtn = loss(ggml, ggml_type, w, ggml.quantize(ggml_type, w), unseen)
    importance = h.diagonal().astype(np.float32)
    imatrix = loss(ggml, ggml_type, w, ggml.quantize(ggml_type, w, importance), unseen)
    found = loss(ggml, ggml_type, w, made(ggml, ggml_type, w, h), unseen)
    assert found < 0.8 * min(rtn, imatrix)
    if ggml_type in CLEARLY:
        assert found < CLEARLY[ggml_type] * min(rtn, imatrix)


def test_a_codebook_type_compensates_its_error_by_spans(ggml):
    ggml_type = GGMLType.IQ3_XXS
    n = 1024
    x, w = inputs(n), weights(n)
    h = hessian(x)
    importance = h.diagonal().astype(np.float32)
    imatrix = loss(ggml, ggml_type, w, ggml.quantize(ggml_type, w, importance), x)
    assert loss(ggml, ggml_type, w, made(ggml, ggml_type, w, h), x) < 0.95 * imatrix


def test_no_single_code_can_be_improved(ggml):
    """After the sweeps, almost no change of a single code reduces the loss."""
    x, w = inputs(256), weights(256)
    h = hessian(x)
    h += gptq.DAMPING * np.mean(h.diagonal()) * np.eye(256)
    blocks = made(ggml, GGMLType.Q4_0, w, hessian(x))
    q = ggml.dequantize(GGMLType.Q4_0, blocks, 256)
    pull = (w - q) @ h
    scale = np.abs(
        blocks.reshape(ROWS, 8, 18)[:, :, :2].copy().view(np.float16).astype(np.float32)
    ).repeat(32, axis=1)[:, :, 0]
    q_steps = np.rint(q / scale)
    # Change of the loss if one code is raised or lowered by one, for codes within the range.
    for sign in (1, -1):
        possible = np.abs(q_steps + sign) <= 7
        change = h.diagonal() * scale**2 - 2 * sign * scale * pull
        assert (change[possible] < 0).mean() < 0.02


def test_without_correlation_it_is_rounding(ggml):
    """With a diagonal Hessian there is no error to compensate. The only difference from ggml's
    codes is that all codes are nearest to the weights."""
    w = weights(256)
    own = ggml.dequantize(
        GGMLType.Q4_K, ggml.quantize(GGMLType.Q4_K, w, np.ones(256, np.float32)), 256
    )
    found = ggml.dequantize(GGMLType.Q4_K, made(ggml, GGMLType.Q4_K, w, np.eye(256)), 256)
    assert (own == found).mean() > 0.9
    assert np.square(found - w).sum() <= np.square(own - w).sum() * 1.0001


def test_rows_do_not_depend_on_each_other(ggml):
    """Quantizing a matrix in groups of rows gives nearly the same values."""
    x, w = inputs(512), weights(512)
    factor = gptq.factorize(hessian(x), "cpu")
    assert factor is not None
    whole = gptq.quantize(ggml, GGMLType.Q2_K, w, factor)
    parts = [gptq.quantize(ggml, GGMLType.Q2_K, w[a : a + 8], factor) for a in range(0, ROWS, 8)]
    a = ggml.dequantize(GGMLType.Q2_K, whole, 512)
    b = ggml.dequantize(GGMLType.Q2_K, np.concatenate(parts), 512)
    assert (a == b).mean() > 0.99


def test_equal_arguments_give_equal_bytes(ggml):
    x, w = inputs(512), weights(512)
    once = made(ggml, GGMLType.Q3_K, w, hessian(x))
    np.testing.assert_array_equal(once, made(ggml, GGMLType.Q3_K, w, hessian(x)))


def test_rows_that_are_no_multiple_of_256(ggml):
    n = 256 + 128
    x, w = inputs(n), weights(n)
    rtn = loss(ggml, GGMLType.Q2_0, w, ggml.quantize(GGMLType.Q2_0, w), x)
    assert loss(ggml, GGMLType.Q2_0, w, made(ggml, GGMLType.Q2_0, w, hessian(x)), x) < 0.7 * rtn


def test_fewer_tokens_than_columns(ggml):
    """A singular Hessian is damped, and unused columns are rounded."""
    x, w = inputs(256, tokens=40), weights(256)
    x[:, 100:140] = 0
    blocks = made(ggml, GGMLType.Q4_K, w, hessian(x))
    q = ggml.dequantize(GGMLType.Q4_K, blocks, 256)
    rtn = ggml.dequantize(GGMLType.Q4_K, ggml.quantize(GGMLType.Q4_K, w), 256)
    assert np.abs(q - w)[:, 100:140].mean() < 1.5 * np.abs(rtn - w)[:, 100:140].mean()
    imatrix = ggml.quantize(GGMLType.Q4_K, w, hessian(x).diagonal().astype(np.float32))
    assert loss(ggml, GGMLType.Q4_K, w, blocks, x) < 0.5 * loss(ggml, GGMLType.Q4_K, w, imatrix, x)


def test_no_tokens():
    assert gptq.factorize(np.zeros((64, 64)), "cpu") is None
    assert not gptq.smoothed(np.zeros((64, 64)), 0).any()
    shared = np.eye(64) * 2
    np.testing.assert_array_equal(gptq.smoothed(np.zeros((64, 64)), 0, shared), shared * 64)


def test_few_tokens_are_helped_by_those_of_the_layer(ggml):
    """With 30 tokens, the layer's Hessian gives a smaller loss on other inputs than the tokens'
    own."""
    n = 256
    x, w = inputs(n), weights(n)
    few, layer, unseen = x[:30], x[30:1000], x[1000:]
    shared = hessian(layer) / len(layer)
    alone = loss(ggml, GGMLType.Q2_K, w, made(ggml, GGMLType.Q2_K, w, hessian(few)), unseen)
    better = gptq.smoothed(hessian(few), len(few), shared)
    helped = loss(ggml, GGMLType.Q2_K, w, made(ggml, GGMLType.Q2_K, w, better), unseen)
    rtn = loss(ggml, GGMLType.Q2_K, w, ggml.quantize(GGMLType.Q2_K, w), unseen)
    assert helped < 0.7 * rtn and helped < 0.8 * alone


def test_many_tokens_outweigh_the_added_hessian():
    own = hessian(inputs(64, tokens=64 * 200))
    added = gptq.smoothed(own, 64 * 200, np.eye(64)) - own
    assert np.linalg.norm(added) < 0.02 * np.linalg.norm(own)


def test_a_hessian_that_is_not_finite():
    h = np.eye(64)
    h[3, 4] = np.nan
    with pytest.raises(QuantizeError, match="not finite"):
        gptq.factorize(h, "cpu")


def test_floats_are_not_touched(ggml):
    x, w = inputs(256), weights(256)
    np.testing.assert_array_equal(
        made(ggml, GGMLType.F16, w, hessian(x)), ggml.quantize(GGMLType.F16, w)
    )


def test_without_torch(monkeypatch):
    gptq.torch_module.cache_clear()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(QuantizeError, match=r"gptq needs torch.*moe-edge\[convert\]"):
        gptq.default_device()
    gptq.torch_module.cache_clear()
    assert BLOCK[GGMLType.Q2_K].weights == gptq.SPAN
