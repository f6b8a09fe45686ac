"""Divide the work of `pack` into jobs, each for a run of rows of one expert's matrix.

A thread holds one run in float32 and its quantized forms at a time, so memory use does not depend
on the model size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby

from gguf_tools.errors import QuantizeError
from gguf_tools.experts import ExpertModel, Slice
from gguf_tools.file.chunks import chunks
from gguf_tools.file.layout import row_bytes
from gguf_tools.file.reader import GGUFFile
from gguf_tools.file.writer import GGUFWriter
from gguf_tools.pack.targets import Dense, Matrix, Target
from gguf_tools.quantize.ggml import Ggml
from gguf_tools.quantize.methods import ExpertQuantizer, Rtn
from gguf_tools.workers import Job

RUN_WEIGHTS = 1 << 22


def pack_jobs(
    model: ExpertModel,
    writer: GGUFWriter,
    matrices: list[Matrix],
    others: list[Dense],
    ggml: Ggml | None,
    quantizer: ExpertQuantizer | None,
) -> Iterator[Job | None]:
    """Yield functions (jobs) that together write all tensor data of a packed file.

    The tensors that are not experts come first, then the experts layer by layer. A value of None
    means that all earlier jobs must end before the next job starts. It is yielded after each layer
    if a quantizer is given.

    matrices: the expert tensors to write.
    others: the tensors that are not experts.
    ggml: the ggml library. None if all tensors are copied unchanged.
    quantizer: quantization method for experts. None for rounding to nearest.
    """
    for other in others:
        yield partial(_write_dense, writer, other, ggml)
    for _, group in groupby(matrices, key=lambda matrix: matrix.layer):
        layer = list(group)
        for matrix in layer:
            for target in matrix.targets:
                if target.copy_from is not None:
                    yield partial(_copy_tier, model, writer, target.name, target.copy_from)
        if ggml is not None:
            by = quantizer or Rtn(ggml)
            for expert in range(model.n_expert):
                for matrix in layer:
                    yield from _expert_jobs(model, writer, matrix, expert, ggml, by)
        # ExpertQuantizer requires that all calls for a layer end before the next layer begins.
        if quantizer is not None:
            yield None


def _expert_jobs(
    model: ExpertModel,
    writer: GGUFWriter,
    matrix: Matrix,
    expert: int,
    ggml: Ggml,
    by: ExpertQuantizer,
) -> Iterator[Job]:
    """Yield the jobs that quantize one expert's matrix to the tiers that cannot be copied.

    by: the quantization method.
    """
    made = [target for target in matrix.targets if target.copy_from is None]
    if not made:
        return
    n, rows = matrix.shape
    step = max(1, min(rows, RUN_WEIGHTS // n))
    file = model.parts[matrix.source.file_index]
    for row in range(0, rows, step):
        run = (expert, row, min(step, rows - row))
        yield partial(_quantize_run, file, writer, matrix, made, run, ggml, by)


def _write_dense(writer: GGUFWriter, other: Dense, ggml: Ggml | None) -> int:
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
    matrix: Matrix,
    made: list[Target],
    run: tuple[int, int, int],
    ggml: Ggml,
    by: ExpertQuantizer,
) -> int:
    """Quantize consecutive rows of an expert's matrix to several types, and write the results.

    Return the number of bytes written.

    made: the tensors to which the rows are written.
    run: expert, first row, number of rows.
    by: the quantization method.
    """
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
    """Add the names of the file and the tensor to a QuantizeError of the `with` block."""
    try:
        yield
    except QuantizeError as error:
        raise QuantizeError(f"{file.path}: tensor {name}: {error}") from None
