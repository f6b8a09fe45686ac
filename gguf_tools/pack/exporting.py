"""``export``: one tier of a packed model back as a stock GGUF."""

import os
import time

from gguf_tools.experts import ExpertModel
from gguf_tools.file import layout
from gguf_tools.file.chunks import chunks
from gguf_tools.file.layout import GGMLType, expert_tensor_name
from gguf_tools.file.reader import GGUFFile
from gguf_tools.file.writer import GGUFWriter
from gguf_tools.pack.metadata import copy_metadata, write_quantization
from gguf_tools.pack.report import PackReport
from gguf_tools.pack.targets import refuse_same_file
from gguf_tools.progress import Progress, ProgressMeter


def export(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    tier: str | None = None,
    *,
    progress: Progress | None = None,
    alignment: int = layout.DEFAULT_ALIGNMENT,
) -> PackReport:
    """Write one tier (None: the best) of a packed model as a stock GGUF.

    Bytes are copied; other tiers and all ``moe_edge.*`` metadata are left out. Raises
    GGUFError (MissingTierError for an unknown tier); nothing is left behind on an exception.
    """
    started = time.monotonic()
    with ExpertModel.open(src) as model:
        index = 0 if tier is None else model.tier_index(tier)
        writer = GGUFWriter(dst, alignment)
        refuse_same_file(model, writer.path)
        copy_metadata(model, writer)
        chosen = {
            expert_tensor_name(il, kind): (slices[index], model.shapes[layer][kind])
            for layer, il in enumerate(model.layer_ids)
            for kind, slices in enumerate(model.slices[layer])
        }
        copies: list[tuple[str, GGUFFile, int, int]] = []
        for part in model.parts:
            for info in part.tensors.values():
                each, shape = chosen.get(info.name, (None, None))
                if each is not None and shape is not None:
                    file = model.parts[each.file_index]
                    nbytes = each.expert_bytes * model.n_expert
                    writer.declare(info.name, (*shape, model.n_expert), each.type)
                    copies.append((info.name, file, each.offset, nbytes))
                elif layout.TIER_MARK not in info.name:
                    writer.declare(info.name, info.shape, info.type)
                    copies.append((info.name, part, info.offset, info.nbytes))
        if layout.KEY_TIERS in model.metadata:
            write_quantization(writer, _dominant(model, index))
        with writer:
            writer.begin()
            meter = ProgressMeter(progress, sum(nbytes for *_, nbytes in copies))
            for name, file, offset, nbytes in copies:
                for start, run in chunks(file, offset, nbytes):
                    writer.write_at(name, start, run)
                    meter.add(run.nbytes)
        found = model.tiers[index]
        tiers = [(found.name, found.bpw, model.tier_bytes[index])]
    nbytes = writer.path.stat().st_size
    return PackReport(writer.path, nbytes, tiers, seconds=time.monotonic() - started)


def _dominant(model: ExpertModel, index: int) -> GGMLType:
    """The type that most bytes of a tier have."""
    sizes: dict[GGMLType, int] = {}
    for layer in model.slices:
        for kind in layer:
            each = kind[index]
            if each is not None:
                sizes[each.type] = sizes.get(each.type, 0) + each.expert_bytes
    return max(sizes, key=lambda ggml_type: sizes[ggml_type])
