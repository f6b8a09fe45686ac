"""Valid files of every kind that we read, which the targets damage."""

import json

import damage
import gguf_craft
import numpy as np
from gguf_split import split
from traces import random_trace

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import GGMLType, expert_tensor_name
from gguf_tools.pack import export
from gguf_tools.quantize.imatrix import Entry, Imatrix, write_imatrix
from orchestrator.cache import profile
from orchestrator.cost import losses
from orchestrator.cost.losses import LossTable, TablePrecision
from orchestrator.lab.replay.file import write_trace

TIERS = {"q8_0": GGMLType.Q8_0, "q4_0": GGMLType.Q4_0}
SMALL = {"n_embd": 32, "n_ff": 32, "n_expert": 2}
NUMBERS = {"embedding_length": 32, "expert_count": 2, "expert_used_count": 1}


class Bench:
    """The valid files, written once into a folder."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        tensors = gguf_craft.model_tensors(
            **SMALL, tiers=tuple(TIERS), tier_types=tuple(TIERS.values())
        )
        metadata = gguf_craft.packed_metadata(**NUMBERS)
        metadata["moe_edge.fallbacks"] = ["down: q4_k -> q4_0"]
        packed = gguf_craft.write_model(folder / "packed.gguf", tensors, metadata, alignment=4096)
        plain = gguf_craft.write_model(
            folder / "plain.gguf",
            gguf_craft.model_tensors(**SMALL),
            gguf_craft.model_metadata(**NUMBERS),
        )
        fused = gguf_craft.write_model(
            folder / "fused.gguf",
            gguf_craft.model_tensors(**SMALL, fused=True, layers=[1]),
            gguf_craft.model_metadata(arch="deepseek2", nextn_predict_layers=0, **NUMBERS),
        )
        self.high = export(packed, folder / "high.gguf", "q8_0").path
        self.low = export(packed, folder / "low.gguf", "q4_0").path
        self.parts = split(packed, folder / "parts", 3)
        self.models = [damage.Model.read(each) for each in (packed, packed, plain, fused)]
        self.part_models = [damage.Model.read(each) for each in self.parts]
        self.pair_models = [damage.Model.read(each) for each in (self.high, self.low)]
        self.opened = ExpertModel.open(packed)
        profile.save(folder / "hot.json", self.opened, np.ones((2, 2)))
        self.profile = json.loads((folder / "hot.json").read_text())
        self.losses = _losses(self.opened, folder / "losses.json")
        self.checkpoint = folder / "checkpoint"
        self.weights = _checkpoint(self.checkpoint)
        self.imatrix = damage.Model.read(_imatrix(self.opened, folder / "imatrix.gguf"))
        self.trace = random_trace(np.random.default_rng(0))
        write_trace(folder / "t.npz", self.trace)
        self.trace_bytes = (folder / "t.npz").read_bytes()


def _checkpoint(folder):
    """Write a checkpoint folder with all files that are read. Return the header of its weights."""
    folder.mkdir()
    entries = {
        f"w{i}": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [64 * i, 64 * i + 64]}
        for i in range(3)
    }
    name = "model-00001-of-00001.safetensors"
    rules = [
        {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated"},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    ]
    splits = {"type": "Sequence", "pretokenizers": rules}
    files = {
        "config.json": {"architectures": ["MixtralForCausalLM"], "hidden_size": 8},
        "model.safetensors.index.json": {"weight_map": dict.fromkeys(entries, name)},
        "tokenizer_config.json": {"model_max_length": 8},
        "tokenizer.json": {"model": {"type": "BPE"}, "pre_tokenizer": splits},
    }
    for file, value in files.items():
        (folder / file).write_text(json.dumps(value))
    head = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    (folder / name).write_bytes(damage.number(len(head)) + head + bytes(192))
    return entries


def _imatrix(model, path):
    """Write an importance matrix of the model, as after a calibration."""
    counts = np.full(model.n_expert, 40, np.float32)
    entries = {
        expert_tensor_name(il, kind): Entry(np.ones(shape[0] * model.n_expert, np.float32), counts)
        for il, shapes in zip(model.layer_ids, model.shapes, strict=True)
        for kind, shape in enumerate(shapes)
        if shape is not None
    }
    write_imatrix(path, Imatrix("i", entries, ["text"], 2, 20))
    return path


def _losses(model, path):
    """Write a loss table in which one expert saw no token."""
    counts = np.array([[3, 0], [40, 7]])
    loss = np.where(counts[..., None] > 0, np.array([0.0, 0.25]), np.nan)
    candidates = [TablePrecision("q8_0", 8.5, True), TablePrecision("q4_0", 4.5, True)]
    table = LossTable(candidates, loss, loss[..., 1], counts, "r", "rtn", "text", 9)
    losses.save(path, model, table)
    return json.loads(path.read_text())
