"""Determine the tensors of a packed file and their types."""

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

# Quantizing from a source with fewer bits per weight than this gets a warning: the source has lost
# precision already.
LOSSY_BPW = 8.0

# Dense matrices that llama.cpp's quantizer does not quantize, because they are small or sensitive.
_DENSE_KEEP = (
    "_norm.",
    "ffn_gate_inp",
    layout.ROUTING_TABLE,
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
    """A tensor to be written, with one kind of matrix (such as up) of all experts of a layer.

    type: the ggml type (precision) of the tensor.
    copy_from: where the source file has the same matrices in this type, so that they can be copied.
        None if they must be quantized.
    """

    name: str
    type: GGMLType
    copy_from: Slice | None


class Matrix(NamedTuple):
    """One kind of matrix (such as up) of all experts of a layer, and the tensors to write from it.

    layer: index of the MoE layer.
    kind: kind of the matrix, an index into KINDS.
    source: where the source file stores these matrices in its best precision.
    shape: (row length, rows) of one expert's matrix.
    targets: the tensors to be written, one for each precision (tier), the best first.
    """

    layer: int
    kind: int
    source: Slice
    shape: tuple[int, int]
    targets: list[Target]


class Dense(NamedTuple):
    """A tensor that is not an expert, and the type that it gets in the file to be written."""

    file: GGUFFile
    info: TensorInfo
    type: GGMLType


def refuse_same_file(model: ExpertModel, dst: Path) -> None:
    """Raise WriteError if the file to be written is one of the model's own files."""
    if any(dst.exists() and dst.samefile(part) for part in model.files):
        raise WriteError(f"{dst}: is also the input: choose another output file")


def expert_targets(
    model: ExpertModel, dst: Path, types: list[GGMLType], reuse_lower: bool
) -> tuple[list[Matrix], PackReport]:
    """Return the expert tensors of the file to be written, and a report with notes and warnings.

    types: the requested types of the tiers (precisions), the best first.
    reuse_lower: whether lower tiers of the source can be copied instead of quantized anew.

    Raises QuantizeError if a tier would not be smaller than the tier before it.
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
            for index, requested in enumerate(types):
                ggml_type = layout.fitting_type(requested, shape[0])
                fallbacks |= dict.fromkeys(layout.fallback_notes(kind, requested, shape[0]))
                reusable = stored if reuse_lower else stored[:1]
                copy_from = next(
                    (each for each in reusable if each and each.type == ggml_type), None
                )
                requantized |= copy_from is None
                name = expert_tensor_name(il, kind, requested.tier_name if index else None)
                targets.append(Target(name, ggml_type, copy_from))
                nbytes[index] += row_bytes(ggml_type, shape[0]) * shape[1]
            matrices.append(Matrix(layer, kind, source, shape, targets))
    found = model.tiers[0]
    report = PackReport(
        dst,
        0,
        [
            (requested.tier_name, 8 * size / weights, size * model.n_expert)
            for requested, size in zip(types, nbytes, strict=True)
        ],
        list(fallbacks),
    )
    best_bpw = report.tiers[0][1]
    if found.bpw < best_bpw - 0.01:
        report.warnings.append(
            f"{model.path} has {found.name} ({found.bpw:.2f} bits per weight), less than the"
            f" requested {types[0].tier_name} ({best_bpw:.2f}): this makes the file larger, but not"
            " better"
        )
    elif found.bpw < LOSSY_BPW and requantized:
        report.warnings.append(
            f"{model.path} has {found.name} ({found.bpw:.2f} bits per weight): the quality loss is"
            " smaller if the source has 8 bits or more"
        )
    for high, low in pairwise(report.tiers):
        if low[1] >= high[1]:
            raise QuantizeError(
                f"{model.path}: with this model's row lengths, tier {low[0]} takes {low[1]:.2f}"
                f" bits per weight, not below the {high[1]:.2f} of {high[0]}: leave one of them out"
            )
    return matrices, report


def dense_target_type(info: TensorInfo, requested: GGMLType | None) -> GGMLType:
    """Return the type that a tensor other than an expert gets in the file to be written.

    Only two-dimensional float matrices get the requested type. Routers and other small or sensitive
    matrices, and matrices whose row length the type does not support, keep their type.
    """
    keep = (
        requested is None
        or len(info.shape) != 2
        or info.type not in FLOAT_TYPES
        or not info.name.endswith(".weight")
        or parse_expert_name(info.name) is not None
        or any(part in info.name for part in _DENSE_KEEP)
    )
    if keep or requested is None or info.shape[0] % layout.BLOCK[requested].weights:
        return info.type
    return requested
