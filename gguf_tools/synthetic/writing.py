"""Write a synthetic model to a GGUF file."""

import math
from collections.abc import Callable
from pathlib import Path

from gguf_tools.errors import QuantizeError
from gguf_tools.file.layout import (
    DEFAULT_ALIGNMENT,
    EXPERT_ALIGNMENT,
    GGMLType,
    ValueType,
    row_bytes,
    type_by_name,
)
from gguf_tools.file.writer import GGUFWriter
from gguf_tools.synthetic import weights as sw
from gguf_tools.synthetic.drawn import DRAWN_TYPES
from gguf_tools.synthetic.metadata import synthetic_metadata
from gguf_tools.synthetic.shapes import Shape, preset
from gguf_tools.synthetic.tensors import ModelBuilder
from gguf_tools.synthetic.vocab import TOKEN_TYPE

ROUTINGS = ("uniform", "zipf")


def write(
    path: Path | str,
    shape: Shape | str,
    *,
    tiers: tuple[str, ...] = ("q4_k",),
    routing: str = "uniform",
    zipf_s: float = 1.0,
    seed: int = 0,
    alignment: int | None = None,
    same_layers: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Path:
    """Write a synthetic model, which has random weights, to a GGUF file and return the path.

    shape: the sizes of the model, or the name of a preset.
    tiers: type of the experts. Several types, the best first, make a packed file with several
        precisions. With the same seed, files with q8_0, q4_k and q2_k are different precisions of
        the same model. Other types have independent weights and cannot be combined.
    routing: how often experts are used: "uniform", or "zipf" for a Zipf law with exponent zipf_s.
    alignment: alignment of tensor data in bytes. Default: 32, or 4096 for a packed file.
    same_layers: give all layers the experts of the first one, so that a large file is written as
        fast as the disk allows. Routers and all other weights still differ.
    progress: called with the finished share, 0 to 1.
    Raises TensorShapeError, QuantizeError or WriteError, which are all GGUFError.
    """
    if isinstance(shape, str):
        shape = preset(shape)
    types = _checked(shape, tiers, routing)
    alignment = alignment or (DEFAULT_ALIGNMENT if len(types) == 1 else EXPERT_ALIGNMENT)
    tensors = list(ModelBuilder(shape, types, routing, zipf_s, seed, same_layers).tensors())
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with GGUFWriter(path, alignment) as writer:
        for key, value in synthetic_metadata(shape, types).items():
            writer.meta(key, value, element=ValueType.INT32 if key == TOKEN_TYPE else None)
        for tensor in tensors:
            writer.declare(tensor.name, tensor.shape, tensor.type)
        writer.begin()
        for tensor in tensors:
            writer.write_tensor(tensor.name, tensor.chunks())
            if progress:
                declared = writer.tensors[tensor.name]
                progress((declared.offset + declared.nbytes) / writer.data_bytes)
    return path


def file_bytes(shape: Shape, tier: str) -> int:
    """Return the size in bytes of all tensors of a synthetic model with experts of one type.

    tier: name of the type.
    Raises QuantizeError if random weights cannot have the type.
    """
    types = _checked(shape, (tier,), ROUTINGS[0])
    tensors = ModelBuilder(shape, types, ROUTINGS[0], 1.0, 0).tensors()
    return sum(
        row_bytes(tensor.type, tensor.shape[0]) * math.prod(tensor.shape[1:]) for tensor in tensors
    )


def _checked(shape: Shape, tiers: tuple[str, ...], routing: str) -> list[GGMLType]:
    types = []
    for name in tiers:
        kind = type_by_name(name)
        every = (*sw.GAUSSIAN_TYPES, *sw.BLOCK_TYPES, *DRAWN_TYPES)
        if kind is None or kind not in every:
            known = ", ".join(each.tier_name for each in every)
            raise QuantizeError(
                f"random weights cannot have the type '{name}': known types are {known}"
            )
        types.append(kind)
    if len(types) > 1 and not set(types) <= set(sw.BLOCK_TYPES):
        raise QuantizeError(
            "only q8_0, q4_k and q2_k can be combined: to get other tiers, write an f16 file and "
            "pack it"
        )
    if routing not in ROUTINGS:
        raise QuantizeError(f"unknown routing '{routing}': known are {', '.join(ROUTINGS)}")
    return types
