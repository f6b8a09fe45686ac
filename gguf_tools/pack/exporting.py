"""Export one tier of a packed model as an ordinary GGUF file."""

import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from gguf_tools.experts import ExpertModel
from gguf_tools.file import layout
from gguf_tools.file.chunks import CHUNK_BYTES, chunks
from gguf_tools.file.layout import GGMLType, expert_tensor_name
from gguf_tools.file.reader import GGUFFile
from gguf_tools.file.writer import GGUFWriter
from gguf_tools.pack.metadata import copy_metadata, write_quantization
from gguf_tools.pack.report import PackReport
from gguf_tools.pack.targets import refuse_same_file
from gguf_tools.progress import Progress, ProgressMeter
from gguf_tools.quantize.older import OLDER, growth, q2_0_as_q4_0


class _Copy(NamedTuple):
    """A tensor to be exported, and the position of its data in the packed model.

    older: the type to which the data is converted, or None if the type is kept.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    file: GGUFFile
    offset: int
    nbytes: int
    older: GGMLType | None


def export(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    tier: str | None = None,
    *,
    older: bool = False,
    progress: Progress | None = None,
    alignment: int = layout.DEFAULT_ALIGNMENT,
) -> PackReport:
    """Write one precision (tier) of a packed model as an ordinary GGUF file.

    A packed model has its experts in several precisions. Tensor data is copied unchanged. Other
    tiers and all `moe_edge.*` metadata are left out. Raises GGUFError, such as MissingTierError for
    an unknown tier. On an exception, `dst` is not created.

    src: the packed model.
    dst: path of the new file.
    tier: name of the tier. Default: the best tier.
    older: convert types that released versions of llama.cpp cannot read to an older type. The
        values stay the same.
    progress: called with the finished share, 0 to 1.
    alignment: alignment of tensor data in bytes.
    """
    started = time.monotonic()
    with ExpertModel.open(src) as model:
        index = 0 if tier is None else model.tier_index(tier)
        writer = GGUFWriter(dst, alignment)
        refuse_same_file(model, writer.path)
        copy_metadata(model, writer)
        copies = list(_copies(model, index, older))
        for each in copies:
            writer.declare(each.name, each.shape, each.older or each.type)
        dominant = _dominant(model, index)
        if layout.KEY_TIERS in model.metadata:
            write_quantization(writer, OLDER.get(dominant, dominant) if older else dominant)
        with writer:
            writer.begin()
            meter = ProgressMeter(progress, sum(each.nbytes for each in copies))
            for each in copies:
                _copy(writer, each, meter)
        name = model.tiers[index].name
    # Read the sizes back: converting to an older type has changed them.
    with ExpertModel.open(writer.path) as written:
        tiers = [(name, written.tiers[0].bpw, written.tier_bytes[0])]
    report = PackReport(writer.path, writer.path.stat().st_size, tiers)
    for new in {each.type for each in copies if each.older}:
        report.fallbacks.append(
            f"{new.tier_name} is written as {OLDER[new].tier_name} because released versions of "
            f"llama.cpp cannot read {new.tier_name}. The values are the same and the size is "
            f"{growth(new)} times as large. To keep {new.tier_name}, use --keep-types"
        )
    for new in {each.type for each in copies if not each.older} & OLDER.keys():
        report.warnings.append(f"only recent builds of llama.cpp can read {new.tier_name}")
    report.seconds = time.monotonic() - started
    return report


def _copies(model: ExpertModel, index: int, older: bool) -> Iterator[_Copy]:
    """Yield the tensors of the exported file in the order of the packed model.

    index: index of the precision (tier) whose experts are exported.
    older: convert types that released versions of llama.cpp cannot read.
    """
    chosen = {
        expert_tensor_name(il, kind): (slices[index], model.shapes[layer][kind])
        for layer, il in enumerate(model.layer_ids)
        for kind, slices in enumerate(model.slices[layer])
    }
    for part in model.parts:
        for info in part.tensors.values():
            each, shape = chosen.get(info.name, (None, None))
            if each is not None and shape is not None:
                yield _Copy(
                    info.name,
                    (*shape, model.n_expert),
                    each.type,
                    model.parts[each.file_index],
                    each.offset,
                    each.expert_bytes * model.n_expert,
                    OLDER.get(each.type) if older else None,
                )
            elif layout.TIER_MARK not in info.name:
                new = OLDER.get(info.type) if older else None
                yield _Copy(info.name, info.shape, info.type, part, info.offset, info.nbytes, new)


def _copy(writer: GGUFWriter, each: _Copy, meter: ProgressMeter) -> None:
    if each.older is None:
        for start, run in chunks(each.file, each.offset, each.nbytes):
            writer.write_at(each.name, start, run)
            meter.add(run.nbytes)
        return
    step = CHUNK_BYTES - CHUNK_BYTES % layout.BLOCK[each.type].bytes
    for start in range(0, each.nbytes, step):
        run = each.file.bytes_at(each.offset + start, min(step, each.nbytes - start))
        writer.write_at(each.name, start * growth(each.type), q2_0_as_q4_0(run))
        meter.add(run.nbytes)


def _dominant(model: ExpertModel, index: int) -> GGMLType:
    """Return the ggml type of most bytes of the experts in a precision (tier)."""
    sizes: dict[GGMLType, int] = {}
    for layer in model.slices:
        for kind in layer:
            each = kind[index]
            if each is not None:
                sizes[each.type] = sizes.get(each.type, 0) + each.expert_bytes
    return max(sizes, key=lambda ggml_type: sizes[ggml_type])
