"""A checkpoint whose experts are already in MXFP4, as gpt-oss is published."""

import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra `convert`")
pytest.importorskip("transformers", reason="needs the extra `convert`")

import torch
from safetensors.torch import load_file, save_file

from gguf_tools.convert import convert
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN, GATE, UP
from gguf_tools.quantize.ggml import load_ggml
from gguf_tools.verify import verify

from . import checkpoints

# Values of the sixteen codes: one sign bit, two exponent bits and one fraction bit.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([FP4, -FP4])
BIAS = 127


def published(folder):
    """Rewrite a checkpoint's experts as blocks and scales. Returns their values by name, [experts,
    rows, row length]."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    rng = np.random.default_rng(5)
    values = {}
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        n_expert, n, rows = tensors.pop(name).shape  # stored with the rows last
        codes = rng.integers(0, 16, (n_expert, rows, n // 32, 32), np.uint8)
        scales = rng.integers(BIAS - 5, BIAS - 2, (n_expert, rows, n // 32), np.uint8)
        packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
        tensors[name + "_blocks"] = torch.tensor(packed)
        tensors[name + "_scales"] = torch.tensor(scales)
        found = FP4[codes] * np.exp2(scales.astype(np.float32) - BIAS)[..., None]
        values[name] = found.reshape(n_expert, rows, n)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def test_experts_keep_their_bits(tmp_path):
    """The best tier has exactly the checkpoint's values, and lower tiers are made from them."""
    checkpoints.write_checkpoint("gpt-oss", tmp_path / "hf")
    values = published(tmp_path / "hf")
    out = tmp_path / "out.gguf"
    report = convert(tmp_path / "hf", out, ["mxfp4", "q2_0"], threads=1)
    assert report.fallbacks == ["down: q2_0 -> iq4_nl (rows of 96 are not a multiple of 64)"]
    assert verify(out, threads=1).problems == []
    ggml = load_ggml()
    with ExpertModel.open(out) as model:
        for layer, il in enumerate(model.layer_ids):
            both = values[f"model.layers.{il}.mlp.experts.gate_up_proj"]
            down = values[f"model.layers.{il}.mlp.experts.down_proj"]
            for kind, wanted in ((GATE, both[:, 0::2]), (UP, both[:, 1::2]), (DOWN, down)):
                for tier, most in ((0, 0.0), (1, 0.5)):
                    each = model.slices[layer][kind][tier]
                    data = model.parts[0].bytes_at(each.offset, each.expert_bytes * model.n_expert)
                    found = ggml.dequantize(each.type, data, wanted.shape[2])
                    error = np.square(found.reshape(wanted.shape) - wanted).mean()
                    assert error <= most * np.square(wanted).mean()
