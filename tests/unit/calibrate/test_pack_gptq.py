"""GPTQ with `moe-edge pack`: the packed values, and experts without tokens."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from gguf_tools import synthetic
from gguf_tools.errors import QuantizeError
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN, GATE, UP, GGMLType
from gguf_tools.pack import pack
from gguf_tools.quantize import gptq
from gguf_tools.quantize.ggml import load_ggml
from orchestrator.cli.main import cli
from orchestrator.lab.calibrate.capture import Capture, read_calibration
from orchestrator.lab.calibrate.gptq import Gptq, computing
from orchestrator.lab.calibrate.measure import stored

TIERS = ("q8_0", "q4_k", "q2_k")
TEXT = (
    "The fox sat by the river and looked at the stars. It was late, and nobody came. "
    "In the morning a boat went by with three old men, who sang. "
)
NOTHING = np.zeros((0, 0), np.float32)
FACTOR = gptq.Factor(np.arange(256), NOTHING, NOTHING, NOTHING)


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed (extra: convert)")


@pytest.fixture(scope="module")
def small(ggml, tmp_path_factory):
    """Two layers with four experts. Some experts get no token of the text."""
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    shape = replace(synthetic.preset("tiny-qwen3moe"), n_layer=2, n_expert=4)
    return synthetic.write(path, shape, tiers=("f16",), routing="zipf", zipf_s=8.0, seed=1)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "calib.txt"
    path.write_text(TEXT * 6)
    return path


def run(*args):
    return CliRunner().invoke(cli, ["pack", *map(str, args), "--threads", "1"])


@pytest.fixture(scope="module")
def packed(small, words, tmp_path_factory):
    """(packed file, output of the command)."""
    pytest.importorskip("torch", reason="torch is not installed (extra: convert)")
    out = tmp_path_factory.mktemp("packed") / "out.gguf"
    result = run(small, out, "--tiers", ",".join(TIERS), "--method", "gptq", "--calib", words)
    assert result.exit_code == 0, result.output
    return out, result.output


def expert_bytes(model, layer, kind, tier, expert):
    where = model.slices[layer][kind][tier]
    assert where is not None
    return model.parts[0].bytes_at(where.offset + expert * where.expert_bytes, where.expert_bytes)


def test_pack_by_a_text(packed, small, words, ggml, tmp_path):
    """For every expert with enough tokens, the output error of each matrix is below 0.7 times
    ggml's."""
    (out, said), plain = packed, tmp_path / "plain.gguf"
    assert "experts got too few tokens of the text" in said
    pack(small, plain, TIERS, ggml=ggml)
    ratios = []
    with (
        ExpertModel.open(small) as source,
        ExpertModel.open(out) as ours,
        ExpertModel.open(plain) as theirs,
        Capture(small, threads=1) as capture,
    ):
        calibration = read_calibration(capture.tokenize, words)
        assert ours.metadata["moe_edge.quantization"] == "gptq"
        assert ours.metadata["moe_edge.calibration"] == calibration.summary()
        for seen in capture.layers(calibration.windows):
            for expert in np.flatnonzero(seen.counts() > 256):
                for kind in (UP, GATE, DOWN):
                    x = seen.inputs(kind, int(expert))
                    full = stored(source, seen.layer, kind, int(expert), ggml)
                    for tier, ggml_type in ((1, GGMLType.Q4_K), (2, GGMLType.Q2_K)):
                        loss = [
                            np.square(
                                x @ (full - ggml.dequantize(ggml_type, blocks, full.shape[1])).T
                            ).sum()
                            for blocks in (
                                expert_bytes(ours, seen.layer, kind, tier, int(expert)),
                                expert_bytes(theirs, seen.layer, kind, tier, int(expert)),
                            )
                        ]
                        ratios.append(loss[0] / loss[1])
    assert len(ratios) >= 12 and max(ratios) < 0.7
    assert CliRunner().invoke(cli, ["verify", str(out)]).exit_code == 0
    shown = CliRunner().invoke(cli, ["inspect", str(out)]).output
    assert "quantized by gptq; calibration: calib.txt" in shown


def test_threads_and_kept_factors_do_not_change_the_file(
    packed, small, words, tmp_path, monkeypatch
):
    """The file is the same with three threads and two passes over the text. Gate and up of an
    expert and all its tiers share a factor, even if only one factor is kept."""
    asked: list[int] = []
    factorize = gptq.factorize

    def counted(hessian, device):
        asked.append(len(hessian))
        return factorize(hessian, device)

    monkeypatch.setattr(gptq, "factorize", counted)
    monkeypatch.setattr("orchestrator.lab.calibrate.capture.SPILL_BYTES", 1)
    out = tmp_path / "out.gguf"
    with computing(), Capture(small, threads=1) as capture:
        calibration = read_calibration(capture.tokenize, words)
        layers = capture.layers(calibration.windows)
        pack(
            small,
            out,
            TIERS,
            quantizer=Gptq(load_ggml(), layers, calibration.summary(), "cpu", 3, 3),
            threads=3,
        )
    assert len(asked) == 2 * 4 * 2
    assert out.read_bytes() == packed[0].read_bytes()


def test_factors_beyond_the_limit_are_computed_again(torch, small, words, ggml, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(gptq, "factorize", lambda *args: asked.append(1) or FACTOR)
    with computing(), Capture(small, threads=1) as capture:
        windows = read_calibration(capture.tokenize, words).windows
        quantizer = Gptq(ggml, capture.layers(windows), "", "cpu", 1, 1)
        values = np.zeros((1, 256), np.float32)

        def quantize(*pairs):
            """Quantize these pairs (kind, expert). Returns the number of factorizations so far."""
            for kind, expert in pairs:
                quantizer.quantize(0, kind, expert, values, GGMLType.F16)
            return len(asked)

        assert quantize((UP, 0), (GATE, 0), (DOWN, 0), (GATE, 0)) == 2
        assert quantize((UP, 1), (GATE, 1), (GATE, 0), (GATE, 1)) == 3
        assert quantize((DOWN, 0)) == 4


def test_an_expert_without_tokens(packed, small, words, ggml):
    """The gate matrix of an expert without tokens uses the Hessian of the layer's tokens. Its down
    matrix has no inputs, so ggml rounds it."""
    with Capture(small, threads=1) as capture:
        windows = read_calibration(capture.tokenize, words).windows
        unseen = [
            (seen.layer, int(expert))
            for seen in capture.layers(windows)
            for expert in np.flatnonzero(seen.counts() == 0)
        ]
    assert unseen and f"{len(unseen)} of them got no token" in packed[1].replace("\n", " ")
    with ExpertModel.open(small) as source, ExpertModel.open(packed[0]) as out:
        for layer, expert in unseen:
            for kind in (DOWN, GATE):
                plain = ggml.quantize(GGMLType.Q2_K, stored(source, layer, kind, expert, ggml))
                found = expert_bytes(out, layer, kind, 2, expert)
                assert np.array_equal(found, plain) == (kind == DOWN)


def test_layers_must_be_requested_in_order(torch, small, text, ggml):
    with computing(), Capture(small, threads=1) as capture:
        windows = read_calibration(capture.tokenize, text).windows
        quantizer = Gptq(ggml, capture.layers(windows), "", "cpu", 1, 1)
        values = np.zeros((4, 256), np.float32)
        quantizer.quantize(1, GATE, 0, values, GGMLType.Q2_K)
        for layer in (0, 2):
            with pytest.raises(QuantizeError, match=f"layer {layer} was requested out of order"):
                quantizer.quantize(layer, GATE, 0, values, GGMLType.Q2_K)


@pytest.fixture
def no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    gptq.torch_module.cache_clear()
    yield
    gptq.torch_module.cache_clear()


def test_without_torch(no_torch, small, text, tmp_path):
    result = run(
        small, tmp_path / "out.gguf", "--tiers", "q8_0,q2_k", "--method", "gptq", "--calib", text
    )
    assert result.exit_code == 1
    assert "gptq needs torch: run `pip install 'moe-edge[convert]'`" in result.output
    assert not list(tmp_path.glob("*out.gguf*"))
