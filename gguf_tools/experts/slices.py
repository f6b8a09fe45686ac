"""File positions of expert weights, by layer, matrix kind and tier."""

from typing import NamedTuple

from gguf_tools.file.layout import GGMLType


class Tier(NamedTuple):
    """A precision in which a model file stores all experts.

    bpw: bits per weight, averaged over all matrices.
    bytes_per_expert: mean size of one expert (all its matrices in one layer).
    """

    name: str
    bpw: float
    bytes_per_expert: int


class Slice(NamedTuple):
    """The file position of all expert matrices with the same layer, kind and precision.

    A kind is, for example, up or down. The matrices of all experts are stored consecutively. The
    matrix of expert e starts at byte `offset + e * expert_bytes` of the model's file number
    `file_index`.

    expert_bytes: size of one expert's matrix.
    type: ggml type of the matrices.
    """

    file_index: int
    offset: int
    expert_bytes: int
    type: GGMLType


# The slices of one layer, as [kind][tier]. None if the layer has no matrix of this kind.
LayerSlices = tuple[tuple[Slice | None, ...], ...]

# Matrix shapes of one expert in a layer, as [kind]: (row length, rows), or None.
LayerShapes = tuple[tuple[int, int] | None, ...]
