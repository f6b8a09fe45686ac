"""``pack``: one model file with every expert in several precisions; ``export``: one of
them back as a stock GGUF.

Work is cut into runs of rows of one expert, so that memory stays small whatever the model:
each thread holds one run in float32 and its encodings, and writes them to their places.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

from . import layout
from .errors import QuantizeError, WriteError
from .experts import ExpertModel, Slice
from .layout import (
    FLOAT_TYPES,
    GGMLType,
    ValueType,
    expert_tensor_name,
    parse_expert_name,
    row_bytes,
)
from .methods import ExpertQuantizer, Rtn
from .process import default_threads
from .quantize import Ggml, load, parse_tiers
from .reader import GGUFFile, TensorInfo
from .streaming import Job, Meter, Progress, chunks, run_all
from .writer import GGUFWriter

RUN_WEIGHTS = 1 << 22
# Below this many bits a source has lost what finer tiers could have kept.
LOSSY_BPW = 8.0

# Dense matrices that upstream's own quantizer leaves alone: small, or sensitive.
_DENSE_KEEP = (
    "_norm.",
    "ffn_gate_inp",
    "ffn_gate_tid2eid",
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


@dataclass(slots=True)
class PackReport:
    """What was written. ``tiers``: (name, bits per weight, bytes of all experts), best
    first. ``fallbacks`` and ``warnings`` are sentences for the user."""

    path: Path
    nbytes: int
    tiers: list[tuple[str, float, int]]
    fallbacks: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0


class _Target(NamedTuple):
    """One tier of one matrix to be written, and where its bytes come from: a slice that
    has the type already, or None to quantize from the best tier."""

    name: str
    type: GGMLType
    same: Slice | None


class _Matrix(NamedTuple):
    """All experts of one (layer, kind)."""

    layer: int
    kind: int
    source: Slice
    shape: tuple[int, int]
    targets: list[_Target]


class _Dense(NamedTuple):
    """A tensor that is no expert, and the type it shall have."""

    file: GGUFFile
    info: TensorInfo
    type: GGMLType


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
    """Write ``dst`` with the experts of ``src`` in ``tiers`` (type names, best first).

    A model that is open already stays open.
    Tensors that have a tier's type already keep their bytes; with a ``quantizer`` (None: each
    block to the nearest), only those of the best tier do. ``dense`` names a type for the
    other two-dimensional float matrices. ``progress`` gets the finished share, 0 to 1.
    Raises GGUFError; on any exception, Ctrl-C included, nothing is left behind.
    """
    started = time.monotonic()
    types = parse_tiers(tiers, quantizer is not None and quantizer.has_importance)
    dense_type = None if dense is None else parse_tiers([dense])[0]
    with nullcontext(src) if isinstance(src, ExpertModel) else ExpertModel.open(src) as model:
        writer = GGUFWriter(dst, alignment)
        _refuse_same_file(model, writer.path)
        matrices, report = _plan_experts(model, writer.path, types, quantizer is None)
        best = {(m.targets[0].name): m for m in matrices}
        others: list[_Dense] = []
        _copy_metadata(model, writer)
        for part in model.parts:
            for info in part.tensors.values():
                if info.name in best:
                    matrix = best[info.name]
                    for target in matrix.targets:
                        writer.declare(target.name, (*matrix.shape, model.n_expert), target.type)
                elif layout.TIER_MARK not in info.name:
                    other = _Dense(part, info, _dense_type(info, dense_type))
                    writer.declare(info.name, info.shape, other.type)
                    others.append(other)
        _tier_metadata(writer, report, types, _how(model, matrices, quantizer))
        tools = _tools(ggml, matrices, others)
        with writer:
            writer.begin()
            meter = Meter(progress, sum(each.nbytes for each in writer.tensors.values()))
            jobs = _jobs(model, writer, matrices, others, tools, quantizer)
            run_all(jobs, threads or default_threads(), meter)
    report.nbytes = writer.path.stat().st_size
    report.seconds = time.monotonic() - started
    return report


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
        _refuse_same_file(model, writer.path)
        _copy_metadata(model, writer)
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
            _quantization_metadata(writer, _dominant(model, index))
        with writer:
            writer.begin()
            meter = Meter(progress, sum(nbytes for *_, nbytes in copies))
            for name, file, offset, nbytes in copies:
                for start, run in chunks(file, offset, nbytes):
                    writer.write_at(name, start, run)
                    meter.add(run.nbytes)
        found = model.tiers[index]
        tiers = [(found.name, found.bpw, model.tier_bytes[index])]
    nbytes = writer.path.stat().st_size
    return PackReport(writer.path, nbytes, tiers, seconds=time.monotonic() - started)


def _refuse_same_file(model: ExpertModel, dst: Path) -> None:
    if any(dst.exists() and dst.samefile(part) for part in model.files):
        raise WriteError(f"{dst}: is also the input; write to another file")


def _plan_experts(
    model: ExpertModel, dst: Path, types: list[GGMLType], reuse_lower: bool
) -> tuple[list[_Matrix], PackReport]:
    """What each expert tensor becomes, with the fallbacks and warnings on the way; reuse_lower:
    the source's lower tiers are as good as new ones."""
    matrices: list[_Matrix] = []
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
                targets.append(_Target(name, ggml_type, same))
                nbytes[index] += row_bytes(ggml_type, shape[0]) * shape[1]
            matrices.append(_Matrix(layer, kind, source, shape, targets))
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


def _dense_type(info: TensorInfo, asked: GGMLType | None) -> GGMLType:
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


def _copy_metadata(model: ExpertModel, writer: GGUFWriter) -> None:
    first = model.parts[0]
    for key in first.metadata:
        own = key.startswith((layout.KEY_PREFIX, "split.")) or key == layout.KEY_ALIGNMENT
        if not own:
            writer.meta_encoded(key, first.encoded_value(key))


def _quantization_metadata(writer: GGUFWriter, best: GGMLType) -> None:
    writer.meta(layout.KEY_FILE_TYPE, layout.FILE_TYPE[best], ValueType.UINT32)
    writer.meta(layout.KEY_QUANTIZATION_VERSION, layout.QUANTIZATION_VERSION, ValueType.UINT32)


def _tier_metadata(
    writer: GGUFWriter,
    report: PackReport,
    types: list[GGMLType],
    how: tuple[str, str],
) -> None:
    """how: method and calibration."""
    _quantization_metadata(writer, types[0])
    writer.meta(layout.KEY_FORMAT_VERSION, layout.FORMAT_VERSION, ValueType.UINT32)
    writer.meta(layout.KEY_TIERS, [name for name, _, _ in report.tiers])
    bpw = [bits for _, bits, _ in report.tiers]
    writer.meta(layout.KEY_TIER_BPW, bpw, ValueType.ARRAY, ValueType.FLOAT32)
    method, calibration = how
    if any(each.type is GGMLType.Q2_0 for each in writer.tensors.values()):
        method += ", q2_0 by least squares"
    writer.meta(layout.KEY_QUANTIZATION, method)
    writer.meta(layout.KEY_CALIBRATION, calibration)
    if report.fallbacks:
        writer.meta(layout.KEY_FALLBACKS, report.fallbacks)


def _how(
    model: ExpertModel, matrices: list[_Matrix], quantizer: ExpertQuantizer | None
) -> tuple[str, str]:
    """Method and calibration of the file: what the kept lower tiers say of theirs stays true."""
    by = quantizer or Rtn
    lower = [each.same is None for matrix in matrices for each in matrix.targets[1:]]
    said = str(model.metadata.get(layout.KEY_QUANTIZATION, by.method)).split(",")[0]
    if quantizer is not None or all(lower) or said in (by.method, "ggml"):
        return by.method, by.calibration
    method = f"{said} and {by.method}" if any(lower) else said
    return method, str(model.metadata.get(layout.KEY_CALIBRATION, by.calibration))


def _dominant(model: ExpertModel, index: int) -> GGMLType:
    """The type that most bytes of a tier have."""
    sizes: dict[GGMLType, int] = {}
    for layer in model.slices:
        for kind in layer:
            each = kind[index]
            if each is not None:
                sizes[each.type] = sizes.get(each.type, 0) + each.expert_bytes
    return max(sizes, key=lambda ggml_type: sizes[ggml_type])


def _tools(ggml: Ggml | None, matrices: list[_Matrix], others: list[_Dense]) -> Ggml | None:
    """ggml, loaded only if something must be quantized."""
    needed = any(target.same is None for matrix in matrices for target in matrix.targets)
    needed |= any(other.type != other.info.type for other in others)
    return (ggml or load()) if needed else None


def _jobs(
    model: ExpertModel,
    writer: GGUFWriter,
    matrices: list[_Matrix],
    others: list[_Dense],
    ggml: Ggml | None,
    quantizer: ExpertQuantizer | None,
) -> Iterator[Job | None]:
    """Pieces of work, each returning the bytes it wrote: layer by layer, expert by expert. With a
    quantizer, a layer has ended before the next begins."""
    for other in others:
        yield partial(_write_dense, writer, other, ggml)
    for _, group in groupby(matrices, key=lambda matrix: matrix.layer):
        layer = list(group)
        for matrix in layer:
            for target in matrix.targets:
                if target.same is not None:
                    yield partial(_copy_tier, model, writer, target.name, target.same)
        if ggml is not None:
            by = quantizer or Rtn(ggml)
            for expert in range(model.n_expert):
                for matrix in layer:
                    yield from _expert_jobs(model, writer, matrix, expert, ggml, by)
        if quantizer is not None:
            yield None


def _expert_jobs(
    model: ExpertModel,
    writer: GGUFWriter,
    matrix: _Matrix,
    expert: int,
    ggml: Ggml,
    by: ExpertQuantizer,
) -> Iterator[Job]:
    """The runs of rows of one expert's matrix, for the tiers that have to be made."""
    made = [target for target in matrix.targets if target.same is None]
    if not made:
        return
    n, rows = matrix.shape
    step = max(1, min(rows, RUN_WEIGHTS // n))
    file = model.parts[matrix.source.file_index]
    for row in range(0, rows, step):
        run = (expert, row, min(step, rows - row))
        yield partial(_quantize_run, file, writer, matrix, made, run, ggml, by)


def _write_dense(writer: GGUFWriter, other: _Dense, ggml: Ggml | None) -> int:
    info = other.info
    if other.type == info.type or ggml is None:
        for start, run in chunks(other.file, info.offset, info.nbytes):
            writer.write_at(info.name, start, run)
        return info.nbytes
    n, rows = info.shape
    step = max(1, RUN_WEIGHTS // n)
    source_row, target_row = row_bytes(info.type, n), row_bytes(other.type, n)
    for row in range(0, rows, step):
        count = min(step, rows - row)
        data = other.file.bytes_at(info.offset + row * source_row, count * source_row)
        with _named(other.file, info.name):
            blocks = ggml.quantize(other.type, ggml.dequantize(info.type, data, n))
        writer.write_at(info.name, row * target_row, blocks)
    return rows * target_row


def _copy_tier(model: ExpertModel, writer: GGUFWriter, name: str, source: Slice) -> int:
    nbytes = source.expert_bytes * model.n_expert
    for start, run in chunks(model.parts[source.file_index], source.offset, nbytes):
        writer.write_at(name, start, run)
    return nbytes


def _quantize_run(
    file: GGUFFile,
    writer: GGUFWriter,
    matrix: _Matrix,
    made: list[_Target],
    run: tuple[int, int, int],
    ggml: Ggml,
    by: ExpertQuantizer,
) -> int:
    """Encode ``count`` rows of one expert in every tier that has to be made."""
    expert, row, count = run
    n, rows = matrix.shape
    source = matrix.source
    row_size = row_bytes(source.type, n)
    start = source.offset + expert * source.expert_bytes + row * row_size
    name = f"{matrix.targets[0].name}: expert {expert}"
    data = file.bytes_at(start, count * row_size)
    with _named(file, name):
        values = ggml.dequantize(source.type, data, n)
    written = 0
    for target in made:
        with _named(file, name):
            blocks = by.quantize(matrix.layer, matrix.kind, expert, values, target.type)
        writer.write_at(target.name, (expert * rows + row) * row_bytes(target.type, n), blocks)
        written += blocks.nbytes
    return written


@contextmanager
def _named(file: GGUFFile, name: str) -> Iterator[None]:
    """Puts the place before what ggml complains about."""
    try:
        yield
    except QuantizeError as error:
        raise QuantizeError(f"{file.path}: tensor {name}: {error}") from None
