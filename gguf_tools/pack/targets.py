"""What each tensor of a model becomes in a packed file."""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from gguf_tools.errors import QuantizeError, WriteError
from gguf_tools.experts import ExpertModel, Slice
from gguf_tools.file import layout
from gguf_tools.file.layout import (
    FLOAT_TYPES,
    GGMLType,
    expert_tensor_name,
    parse_expert_name,
    row_bytes,
)
from gguf_tools.file.parse import TensorInfo
from gguf_tools.file.reader import GGUFFile
from gguf_tools.pack.report import PackReport

# Below this many bits a source has lost what finer tiers could have kept.
LOSSY_BPW = 8.0

# Upstream's own quantizer leaves these dense matrices alone, which are small or sensitive.
_DENSE_KEEP = (
    "_norm.",
    "ffn_gate_inp",
    layout.CHOICES,
    "altup",
    "laurel",
    "per_layer_model_proj",
    "position_embd",
    "token_types",
    "ssm_conv1d",
    "shortconv",
    "indexer",
    "time_mix_",
    "attn_rel_b",
)


class Target(NamedTuple):
    """One tier of one matrix to be written. Its bytes come from a slice that has the type
    already; None quantizes them from the best tier."""

    name: str
    type: GGMLType
    same: Slice | None


class Matrix(NamedTuple):
    """All experts of one (layer, kind)."""

    layer: int
    kind: int
    source: Slice
    shape: tuple[int, int]
    targets: list[Target]


class Dense(NamedTuple):
    """A tensor that is no expert, and the type it shall have."""

    file: GGUFFile
    info: TensorInfo
    type: GGMLType


def refuse_same_file(model: ExpertModel, dst: Path) -> None:
    """Raises WriteError where the target is one of the model's files."""
    if any(dst.exists() and dst.samefile(part) for part in model.files):
        raise WriteError(f"{dst}: is also the input; write to another file")


def expert_targets(
    model: ExpertModel, dst: Path, types: list[GGMLType], reuse_lower: bool
) -> tuple[list[Matrix], PackReport]:
    """What each expert tensor becomes, and a report with the fallbacks and warnings.

    reuse_lower: the source's lower tiers are as good as new ones. Raises QuantizeError where one
    tier would not be smaller than the one before it.
    """
    matrices: list[Matrix] = []
    fallbacks: dict[str, None] = {}
    nbytes = [0] * len(types)
    weights = 0
    requantized = False
    for layer, il in enumerate(model.layer_ids):
        for kind in model.kinds(layer):
            shape, stored = model.shapes[layer][kind], model.slices[layer][kind]
            source = stored[0]
            if shape is None or source is None:
                continue
            weights += shape[0] * shape[1]
            targets = []
            for index, asked in enumerate(types):
                ggml_type = layout.fitting_type(asked, shape[0])
                fallbacks |= dict.fromkeys(layout.fallback(kind, asked, shape[0]))
                reusable = stored if reuse_lower else stored[:1]
                same = next((each for each in reusable if each and each.type == ggml_type), None)
                requantized |= same is None
                name = expert_tensor_name(il, kind, asked.tier_name if index else None)
                targets.append(Target(name, ggml_type, same))
                nbytes[index] += row_bytes(ggml_type, shape[0]) * shape[1]
            matrices.append(Matrix(layer, kind, source, shape, targets))
    found = model.tiers[0]
    report = PackReport(
        dst,
        0,
        [
            (asked.tier_name, 8 * size / weights, size * model.n_expert)
            for asked, size in zip(types, nbytes, strict=True)
        ],
        list(fallbacks),
    )
    best_bpw = report.tiers[0][1]
    if found.bpw < best_bpw - 0.01:
        report.warnings.append(
            f"{model.path} holds {found.name} ({found.bpw:.2f} bits per weight), less precise"
            f" than the asked {types[0].tier_name} ({best_bpw:.2f}): the file grows, its quality"
            " does not"
        )
    elif found.bpw < LOSSY_BPW and requantized:
        report.warnings.append(
            f"{model.path} holds {found.name} ({found.bpw:.2f} bits per weight): tiers made"
            " from 8 bits or more lose less"
        )
    for high, low in pairwise(report.tiers):
        if low[1] >= high[1]:
            raise QuantizeError(
                f"{model.path}: with its row lengths, tier {low[0]} takes {low[1]:.2f} bits per"
                f" weight, not below the {high[1]:.2f} of {high[0]}; leave one out"
            )
    return matrices, report


def dense_target_type(info: TensorInfo, asked: GGMLType | None) -> GGMLType:
    keep = (
        asked is None
        or len(info.shape) != 2
        or info.type not in FLOAT_TYPES
        or not info.name.endswith(".weight")
        or parse_expert_name(info.name) is not None
        or any(part in info.name for part in _DENSE_KEEP)
    )
    if keep or asked is None or info.shape[0] % layout.BLOCK[asked].weights:
        return info.type
    return asked
