import numpy as np
import pytest
from tables import cases

from gguf_tools import synthetic
from gguf_tools.errors import GGUFError
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import row_bytes
from gguf_tools.file.reader import GGUFFile
from gguf_tools.synthetic import weights as sw
from gguf_tools.synthetic.__main__ import main

gguf = pytest.importorskip("gguf")


def dequantize(kind, data):
    """Weights [n] of the blocks."""
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(int(kind))).ravel()


@pytest.mark.parametrize("kind", sw.BLOCK_TYPES)
def test_blocks_have_the_asked_deviation(kind):
    data = sw.random_matrix([1, 2], kind, 256 * 64, 0.05)
    assert len(data) == row_bytes(kind, 256 * 64)
    weights = dequantize(kind, data)
    assert abs(weights.mean()) < 0.002
    assert weights.std() == pytest.approx(0.05, rel=0.05)


@pytest.mark.parametrize(("n_expert", "n_used"), [(64, 8), (8, 2), (128, 8)])
def test_router_bias_gives_zipf_use(n_expert, n_used):
    use = sw.zipf_usage(n_expert, n_used, 1.0)
    assert use.sum() == pytest.approx(n_used)
    free = use < 0.98
    ranks = np.arange(1, n_expert + 1)[free]
    assert np.allclose(use[free] * ranks, use[free][0] * ranks[0])
    logits = sw.router_bias(use, n_used) + np.random.default_rng(9).standard_normal(
        (20000, n_expert)
    )
    top = np.argsort(-logits, axis=1)[:, :n_used]
    seen = np.bincount(top.ravel(), minlength=n_expert) / len(logits)
    assert np.abs(seen - use).max() < 0.03
    assert seen[-1] < seen[0] / 5


def test_same_arguments_same_bytes_and_experts_differ(tmp_path):
    first, again, other = (
        synthetic.write(tmp_path / f"{place}.gguf", "tiny-olmoe", seed=seed)
        for place, seed in enumerate((3, 3, 4))
    )
    assert first.read_bytes() == again.read_bytes()
    assert first.read_bytes() != other.read_bytes()
    up = GGUFFile.open(first).array("blk.1.ffn_up_exps.weight").reshape(8, -1)
    assert len({expert.tobytes() for expert in up}) == 8


def test_file_bytes_predicts_the_size_of_a_file(tmp_path, library):
    path = synthetic.write(tmp_path / "m.gguf", "tiny-olmoe", tiers=("q3_k",))
    assert ExpertModel.open(path).tiers[0].name == "q3_k"
    said = synthetic.file_bytes(synthetic.preset("tiny-olmoe"), "q3_k")
    assert said <= path.stat().st_size < 1.01 * said


def test_two_tier_file_holds_the_tiers_of_the_single_files(tmp_path):
    both, low, high = (
        synthetic.write(tmp_path / f"{'-'.join(tiers)}.gguf", "tiny-qwen3moe", tiers=tiers)
        for tiers in (("q4_k", "q2_k"), ("q2_k",), ("q4_k",))
    )
    for model in (ExpertModel.open(both), ExpertModel.open(high, low)):
        assert [tier.name for tier in model.tiers] == ["q4_k", "q2_k"]
    name = "blk.2.ffn_down_exps.weight"
    assert GGUFFile.open(both).tensors[name].offset % 4096 == 0
    assert np.array_equal(
        GGUFFile.open(both).array(name + ".moe_edge.q2_k"), GGUFFile.open(low).array(name)
    )


@cases(
    "arguments, message",
    ({"shape": "huge"}, "unknown shape 'huge'"),
    ({"tiers": ("i32",)}, "random weights cannot have the type 'i32'"),
    ({"tiers": ("f16", "q4_k")}, "can be combined"),
    ({"routing": "skewed"}, "unknown routing 'skewed'"),
)
def test_bad_arguments_are_named_errors(tmp_path, arguments, message):
    with pytest.raises(GGUFError, match=message):
        synthetic.write(tmp_path / "x.gguf", **{"shape": "tiny-olmoe", **arguments})
    assert not list(tmp_path.iterdir())


def test_command_line(tmp_path, capsys):
    path = tmp_path / "m.gguf"
    assert main([str(path), "--shape", "tiny-mixtral", "--tiers", "q3_k"]) == 0
    assert ExpertModel.open(path).tiers[0].name == "q3_k"
    assert main([str(path), "--tiers", "q9"]) == 1
    assert "q9" in capsys.readouterr().err
