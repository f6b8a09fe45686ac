"""Pack a model: write one file that contains every expert in several precisions (tiers)."""

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext

from gguf_tools.experts import ExpertModel
from gguf_tools.file import layout
from gguf_tools.file.writer import GGUFWriter
from gguf_tools.pack.jobs import pack_jobs
from gguf_tools.pack.metadata import copy_metadata, method_and_calibration, write_tiers
from gguf_tools.pack.report import PackReport
from gguf_tools.pack.targets import (
    Dense,
    Matrix,
    dense_target_type,
    expert_targets,
    refuse_same_file,
)
from gguf_tools.process import compute_threads
from gguf_tools.progress import Progress, ProgressMeter
from gguf_tools.quantize.ggml import Ggml, load_ggml
from gguf_tools.quantize.methods import ExpertQuantizer
from gguf_tools.quantize.tiers import parse_tiers
from gguf_tools.workers import run_all


def pack(
    src: str | os.PathLike[str] | ExpertModel,
    dst: str | os.PathLike[str],
    tiers: Sequence[str],
    *,
    dense: str | None = None,
    quantizer: ExpertQuantizer | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
    alignment: int = layout.EXPERT_ALIGNMENT,
    ggml: Ggml | None = None,
) -> PackReport:
    """Write a model to a new file that contains all experts in several precisions (tiers).

    Tensors that already have a tier's type are copied unchanged. On an exception, including Ctrl-C,
    `dst` is not created. Raises GGUFError if the model cannot be read, a type is not suitable, or
    the new file cannot be written.

    src: path of a model, or an open model, which stays open.
    dst: path of the new file.
    tiers: type names of the tiers, such as `q4_k`, the best first.
    dense: type for the two-dimensional float matrices that are not experts. Default: unchanged.
    quantizer: quantization method. It quantizes all lower tiers anew, even if the source has a tier
        of the same type. Default: round to nearest.
    progress: called with the finished share, 0 to 1.
    threads: number of compute threads. Default: the usable cores.
    alignment: alignment of tensor data in bytes.
    ggml: the ggml library. Default: loaded if needed.
    """
    started = time.monotonic()
    types = parse_tiers(tiers, quantizer is not None and quantizer.has_importance)
    dense_type = None if dense is None else parse_tiers([dense])[0]
    with nullcontext(src) if isinstance(src, ExpertModel) else ExpertModel.open(src) as model:
        writer = GGUFWriter(dst, alignment, checksums=True)
        refuse_same_file(model, writer.path)
        matrices, report = expert_targets(model, writer.path, types, quantizer is None)
        best = {(m.targets[0].name): m for m in matrices}
        others: list[Dense] = []
        copy_metadata(model, writer)
        for part in model.parts:
            for info in part.tensors.values():
                if info.name in best:
                    matrix = best[info.name]
                    for target in matrix.targets:
                        writer.declare(target.name, (*matrix.shape, model.n_expert), target.type)
                elif layout.TIER_MARK not in info.name:
                    other = Dense(part, info, dense_target_type(info, dense_type))
                    writer.declare(info.name, info.shape, other.type)
                    others.append(other)
        write_tiers(writer, report, types, method_and_calibration(model, matrices, quantizer))
        tools = _tools(ggml, matrices, others)
        with writer:
            writer.begin()
            meter = ProgressMeter(progress, sum(each.nbytes for each in writer.tensors.values()))
            jobs = pack_jobs(model, writer, matrices, others, tools, quantizer)
            run_all(jobs, compute_threads(threads), meter)
    report.nbytes = writer.path.stat().st_size
    report.seconds = time.monotonic() - started
    return report


def _tools(ggml: Ggml | None, matrices: list[Matrix], others: list[Dense]) -> Ggml | None:
    """Return the ggml library, or None if all tensors can be copied without quantizing them."""
    needed = any(target.copy_from is None for matrix in matrices for target in matrix.targets)
    needed |= any(other.type != other.info.type for other in others)
    return (ggml or load_ggml()) if needed else None
