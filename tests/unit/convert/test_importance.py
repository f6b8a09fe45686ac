"""A checkpoint converted with an importance matrix of llama.cpp."""

import numpy as np
import pytest

from gguf_tools.convert import convert
from gguf_tools.errors import MismatchError, QuantizeError
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import expert_tensor_name
from gguf_tools.pack import pack
from gguf_tools.quantize.ggml import load_ggml
from gguf_tools.quantize.imatrix import Entry, Imatrix, write_imatrix
from gguf_tools.quantize.methods import ByImportance

from . import checkpoints

NAME = "qwen3-moe"


def imatrix_of(model):
    """Random importance. Expert 0 has too few tokens."""
    rng = np.random.default_rng(4)
    entries = {}
    for layer, il in enumerate(model.layer_ids):
        for kind in model.kinds(layer):
            shape = model.shapes[layer][kind]
            sums = rng.lognormal(5, 2, (model.n_expert, shape[0])).astype(np.float32)
            counts = np.full(model.n_expert, 500, np.float32)
            counts[0] = 3
            entries[expert_tensor_name(il, kind)] = Entry(sums, counts)
    return Imatrix("made", entries)


def test_tiers_are_those_of_pack(tmp_path):
    checkpoints.write_checkpoint(NAME, tmp_path / "hf")
    full, ours, packed = (tmp_path / f"{name}.gguf" for name in ("full", "ours", "packed"))
    convert(tmp_path / "hf", full, ["f32"], threads=1)
    tiers = ["q8_0", "q2_k"]
    with ExpertModel.open(full) as model:
        write_imatrix(tmp_path / "m.gguf", imatrix_of(model))
        report = convert(tmp_path / "hf", ours, tiers, imatrix=tmp_path / "m.gguf", threads=1)
        by = ByImportance.of_file(tmp_path / "m.gguf", model, load_ggml())
        pack(model, packed, tiers, quantizer=by, threads=1)
    assert any("0 of layer 0 (3)" in each for each in report.warnings)
    with ExpertModel.open(ours) as a, ExpertModel.open(packed) as b:
        assert a.metadata["moe_edge.quantization"].startswith("imatrix")
        assert a.metadata["moe_edge.calibration"].startswith("imatrix m.gguf, sha256 ")
        names = [name for name in a.parts[0].tensors if "_exps" in name]
        assert len(names) == 2 * 3 * a.n_layers
        for name in names:
            assert np.array_equal(a.parts[0].array(name), b.parts[0].array(name)), name


def test_another_models_imatrix_leaves_nothing_behind(tmp_path):
    checkpoints.write_checkpoint(NAME, tmp_path / "hf")
    ones = Entry(np.ones(8, np.float32), np.ones(1, np.float32))
    write_imatrix(tmp_path / "m.gguf", Imatrix("m", {"blk.0.ffn_up_exps.weight": ones}))
    out = tmp_path / "out.gguf"
    with pytest.raises(MismatchError, match="made with another model"):
        convert(tmp_path / "hf", out, ["q8_0", "q2_k"], imatrix=tmp_path / "m.gguf")
    with pytest.raises(QuantizeError, match="needs an importance matrix"):
        convert(tmp_path / "hf", out, ["q8_0", "iq2_xxs"])
    assert not list(tmp_path.glob("*out.gguf*"))
