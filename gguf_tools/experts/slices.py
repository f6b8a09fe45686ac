"""The bytes of the experts: a slice for each layer, matrix kind and tier."""

from typing import NamedTuple

from gguf_tools.file.layout import GGMLType


class Tier(NamedTuple):
    """One stored precision: bits per weight over all its matrices, and the mean bytes of
    an expert (all matrices of one layer and index)."""

    name: str
    bpw: float
    bytes_per_expert: int


class Slice(NamedTuple):
    """The experts of one (layer, kind, tier): expert e is the ``expert_bytes`` bytes at
    ``offset + e * expert_bytes`` of ``files[file_index]``."""

    file_index: int
    offset: int
    expert_bytes: int
    type: GGMLType


# The slices of one layer, by [kind][tier]: None stands where the layer has no such matrix.
LayerSlices = tuple[tuple[Slice | None, ...], ...]

# The matrices of one expert in a layer, by [kind], each as (row length, rows).
LayerShapes = tuple[tuple[int, int] | None, ...]
