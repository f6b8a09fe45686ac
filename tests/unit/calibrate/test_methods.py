"""Quantization by importance, from a text or a file, with `moe-edge pack`."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from gguf_tools import errors, synthetic
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN, IMPORTANCE_TYPES, TIER_TYPES, UP, GGMLType
from gguf_tools.pack import pack
from gguf_tools.quantize.imatrix import write_imatrix
from gguf_tools.quantize.tiers import parse_tiers
from orchestrator.cli.main import cli
from orchestrator.lab.calibrate.capture import Capture, read_calibration
from orchestrator.lab.calibrate.measure import stored
from orchestrator.lab.calibrate.methods import gather

# Types whose quantization ignores importance, and iq2_s, whose tables ggml takes long to build.
LEFT_OUT = {"f32", "f16", "bf16", "q8_0", "mxfp4", "q1_0", "iq2_s"}
WEIGHTED = [each for each in TIER_TYPES if each.tier_name not in LEFT_OUT]


def matrix(rows=4, width=512):
    """(weights, importance that differs a hundredfold between columns)."""
    rng = np.random.default_rng(3)
    importance = rng.lognormal(0, 1.5, width).astype(np.float32)
    return rng.standard_normal((rows, width), np.float32) * 0.05, importance


def weighted_error(ggml, kind, values, blocks, by):
    found = ggml.dequantize(kind, blocks, values.shape[1])
    return float((by * (found - values) ** 2.0).sum())


@pytest.mark.parametrize("kind", WEIGHTED, ids=lambda kind: kind.tier_name)
def test_importance_lowers_the_weighted_error(kind, ggml):
    values, importance = matrix()
    plain = weighted_error(ggml, kind, values, ggml.quantize(kind, values), importance)
    ours = ggml.quantize(kind, values, importance)
    assert weighted_error(ggml, kind, values, ours, importance) < plain
    assert ggml.is_valid(kind, ours)
    # At any scale, even if upstream's sums would overflow float32.
    assert np.array_equal(ggml.quantize(kind, values, importance * np.float32(2**-90)), ours)


@pytest.mark.parametrize("kind", IMPORTANCE_TYPES, ids=lambda kind: kind.tier_name)
def test_types_that_need_importance_are_refused_without(kind, ggml):
    with pytest.raises(errors.QuantizeError, match="needs an importance matrix"):
        ggml.quantize(kind, matrix()[0])
    with pytest.raises(
        errors.QuantizeError, match=r"importance matrix: let .moe-edge pack. make one \(--method"
    ):
        parse_tiers([kind.tier_name])
    assert parse_tiers([kind.tier_name], importance=True) == [kind]


def test_a_type_that_needs_importance(ggml):
    kind = GGMLType.IQ2_XXS
    values, importance = matrix()
    blocks = ggml.quantize(kind, values, importance)
    nothing = float((importance * values**2).sum())
    assert weighted_error(ggml, kind, values, blocks, importance) < 0.5 * nothing
    assert ggml.is_valid(kind, blocks)


@pytest.mark.parametrize("kind", [GGMLType.Q2_K, GGMLType.Q6_K, GGMLType.IQ2_XXS, GGMLType.Q2_0])
def test_columns_without_importance_keep_their_weights(kind, ggml):
    values, importance = matrix()
    importance[32:160] = 0
    for given in (importance, np.zeros_like(importance)):
        found = ggml.dequantize(kind, ggml.quantize(kind, values, given), values.shape[1])
        part = slice(32, 160)
        left = np.square(found[:, part] - values[:, part]).sum()
        assert left < 0.5 * np.square(values[:, part]).sum()


@pytest.mark.parametrize(("n", "value"), [(256, 1), (512, -1), (512, np.nan), (512, np.inf)])
def test_impossible_importance_is_refused(n, value, ggml):
    importance = np.full(n, value, np.float32)
    with pytest.raises(errors.QuantizeError, match="must be 512 finite, non-negative values"):
        ggml.quantize(GGMLType.Q4_K, matrix()[0], importance)


@pytest.fixture(scope="module")
def small(ggml, tmp_path_factory):
    """One layer with four experts, because some types take long."""
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    shape = replace(synthetic.preset("tiny-qwen3moe"), n_layer=1, n_expert=4)
    return synthetic.write(path, shape, tiers=("f16",), routing="zipf", zipf_s=8.0, seed=1)


def run(*args):
    return CliRunner().invoke(cli, ["pack", *map(str, args), "--threads", "1"])


def test_pack_by_a_text_and_by_a_file_made_from_it(small, text, ggml, tmp_path):
    tiers = ("--tiers", "q8_0,q2_k,iq2_xxs")
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    result = run(small, first, *tiers, "--method", "imatrix", "--calib", text)
    assert result.exit_code == 0, result.output
    assert "experts saw fewer than 32 calibration tokens" in result.output
    assert "3 of layer 0 (0)" in result.output
    with Capture(small, threads=1) as capture, ExpertModel.open(small) as facts:
        calibration = read_calibration(capture.tokenize, text)
        imatrix = gather(capture, facts, calibration)
    write_imatrix(tmp_path / "m.gguf", imatrix)
    assert run(small, second, *tiers, "--imatrix", tmp_path / "m.gguf").exit_code == 0

    with ExpertModel.open(first) as a, ExpertModel.open(second) as b:
        assert a.metadata["moe_edge.quantization"] == "imatrix"
        assert a.metadata["moe_edge.calibration"] == calibration.summary()
        assert f"{calibration.n_tokens} tokens, sha256 " in calibration.summary()
        said = (
            f"imatrix m.gguf of calib.txt, {len(calibration.windows)} chunks of 512 tokens, sha256 "
        )
        assert b.metadata["moe_edge.calibration"].startswith(said)
        for one, other in zip(a.parts[0].tensors, b.parts[0].tensors, strict=True):
            assert np.array_equal(a.parts[0].array(one), b.parts[0].array(other)), one
        shown = CliRunner().invoke(cli, ["inspect", str(first)]).output
        assert "quantized by imatrix; calibration: calib.txt" in shown
        facts_of = json.loads(CliRunner().invoke(cli, ["inspect", str(first), "--json"]).output)
        assert facts_of["quantization"] == "imatrix"
        assert facts_of["calibration"] == calibration.summary()
        # The bytes are those of ggml with this expert's importance.
        entry = imatrix.entries["blk.0.ffn_down_exps.weight"]
        expert = int(np.argmax(entry.counts))
        with ExpertModel.open(small) as source:
            values = stored(source, 0, DOWN, expert, ggml)
        where = a.slices[0][DOWN][1]
        assert where is not None
        blocks = a.parts[0].bytes_at(where.offset + expert * where.expert_bytes, where.expert_bytes)
        mean = entry.sums[expert] / entry.counts[expert]
        assert np.array_equal(blocks, ggml.quantize(GGMLType.Q2_K, values, mean))
    assert CliRunner().invoke(cli, ["verify", str(first)]).exit_code == 0


def test_lower_tiers_are_quantized_again_and_the_metadata_says_how(small, text, ggml, tmp_path):
    plain, weighted, less = (tmp_path / f"{name}.gguf" for name in ("a", "b", "c"))
    pack(small, plain, ["q8_0", "q2_k"], ggml=ggml)
    options = ("--method", "imatrix", "--calib", text)
    assert run(plain, weighted, "--tiers", "q8_0,q2_k", *options).exit_code == 0
    pack(weighted, less, ["q8_0", "q4_k", "q2_k"], ggml=ggml)
    with (
        ExpertModel.open(plain) as a,
        ExpertModel.open(weighted) as b,
        ExpertModel.open(less) as c,
    ):
        name = "blk.0.ffn_up_exps.weight.moe_edge.q2_k"
        best = name.removesuffix(".moe_edge.q2_k")
        assert np.array_equal(a.parts[0].array(best), b.parts[0].array(best))
        assert not np.array_equal(a.parts[0].array(name), b.parts[0].array(name))
        assert np.array_equal(b.parts[0].array(name), c.parts[0].array(name))
        assert c.metadata["moe_edge.quantization"] == "imatrix and rtn"
        assert c.metadata["moe_edge.calibration"] == b.metadata["moe_edge.calibration"]
        assert a.slices[0][UP][1] is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "magic"), "--method magic is unknown: choose one of rtn, imatrix"),
        (("--calib", "TEXT"), "--calib has no effect with --method rtn"),
        (("--method", "rtn", "--imatrix", "TEXT"), "--imatrix has no effect with --method rtn"),
        (("--method", "imatrix"), "needs either --calib TEXT or --imatrix FILE"),
        (("--calib", "TEXT", "--imatrix", "TEXT"), "needs either --calib TEXT or --imatrix FILE"),
        (("--imatrix", "TEXT"), "neither a GGUF nor an importance matrix"),
        (("--method", "imatrix", "--calib", "none.txt"), "none.txt: No such file"),
        (("--method", "gptq"), "gptq needs --calib TEXT and cannot be used with --imatrix"),
        (
            ("--method", "gptq", "--imatrix", "TEXT"),
            "gptq needs --calib TEXT and cannot be used with --im",
        ),
    ],
)
def test_options_that_do_not_go_together(options, message, small, text, tmp_path):
    given = [str(text) if each == "TEXT" else each for each in options]
    result = run(small, tmp_path / "out.gguf", "--tiers", "q8_0,q2_k", *given)
    assert result.exit_code == 1, result.output
    assert message in result.output.replace("\n", " ")
    assert not list(tmp_path.glob("*out.gguf*"))
