"""Convert a Hugging Face checkpoint to a packed model, without an intermediate file.

llama.cpp's converter describes the tensors, and `pack` reads them as if they were in a GGUF file,
one run of rows of one expert at a time.
"""

import os
import tempfile
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from gguf_tools.convert import lazy
from gguf_tools.convert.checkpoint import Checkpoint, open_checkpoint
from gguf_tools.convert.upstream import Description, one_torch_thread, run_converter
from gguf_tools.errors import ConvertError, NotMoEError, QuantizeError, WriteError
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import (
    FLOAT_TYPES,
    GGMLType,
    parse_expert_name,
    row_bytes,
)
from gguf_tools.file.parse import TensorInfo
from gguf_tools.file.reader import GGUFFile
from gguf_tools.file.writer import GGUFWriter
from gguf_tools.pack import PackReport, pack
from gguf_tools.progress import Progress
from gguf_tools.quantize.ggml import Ggml, load_ggml
from gguf_tools.quantize.methods import ByImportance
from gguf_tools.quantize.tiers import parse_tiers

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Number of whole tensors to keep in memory if their parts cannot be computed separately: the one
# that most threads read, and the next one, with which a faster thread has already started.
_KEPT_WHOLE = 2


def check_arguments(
    dst: str | os.PathLike[str], tiers: Sequence[str], has_importance: bool = False
) -> None:
    """Check the arguments of `convert` before the checkpoint is opened.

    Raises QuantizeError for invalid precisions (tiers), and WriteError for a target that cannot be
    written.

    dst: path of the file to write.
    has_importance: whether an importance matrix is given, which some precisions need.
    """
    parse_tiers(tiers, has_importance)
    path = Path(dst)
    if path.is_dir():
        raise WriteError(f"{path}: is a folder: choose a file name")
    if not path.parent.is_dir():
        raise WriteError(f"{path}: the folder {path.parent} does not exist: create it")
    if not os.access(path.parent, os.W_OK):
        raise WriteError(f"{path}: no permission to write to the folder {path.parent}")


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    tiers: Sequence[str],
    *,
    title: str | None = None,
    dense: str | None = None,
    imatrix: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    on_header: Callable[[Path], None] | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
) -> PackReport:
    """Convert a checkpoint folder to a packed model, a GGUF file with experts in several tiers.

    A tier is a precision of all experts. Tiers are quantized directly from the checkpoint's values.
    Other tensors get the type that llama.cpp's converter chooses. On an exception, including
    Ctrl-C, `dst` is not created.

    Raises CheckpointError for an unusable checkpoint, ConvertError if llama.cpp's converter fails,
    and GGUFError for invalid tiers or a target that cannot be written.

    src: the checkpoint folder.
    dst: path of the packed model.
    tiers: type names of the tiers, such as `q4_k`, the best first.
    title: name of the model. Default: the name in the README or the folder name.
    dense: type for the two-dimensional float matrices that are not experts.
    imatrix: file with an importance matrix of llama.cpp.
    trust_remote_code: run Python code that the checkpoint contains for its tokenizer.
    on_header: function that is called before anything is computed. Its argument is the path of a
        temporary file with the header of `dst` and without data. An exception in the function ends
        the conversion.
    progress: called with the finished share, 0 to 1.
    threads: number of compute threads. Default: the usable cores.
    """
    started = time.monotonic()
    check_arguments(dst, tiers, imatrix is not None)
    checkpoint = open_checkpoint(Path(src))
    ggml = load_ggml()
    # pack() runs one thread per core, so torch must not start more threads in each of them.
    with one_torch_thread():
        description = run_converter(checkpoint, title=title, trust_remote_code=trust_remote_code)
        source = CheckpointFile(checkpoint, description, ggml)
        with source as file:
            model = _opened(file, checkpoint)
            if on_header is not None:
                with source.header_alone() as path:
                    on_header(path)
            by = None if imatrix is None else ByImportance.of_file(imatrix, model, ggml)
            report = pack(
                model,
                dst,
                tiers,
                dense=dense,
                quantizer=by,
                progress=progress,
                threads=threads,
                ggml=ggml,
            )
    weak = by.note() if by else None
    report.warnings += description.notes + ([weak] if weak else [])
    report.seconds = time.monotonic() - started
    return report


def _opened(file: GGUFFile, checkpoint: Checkpoint) -> ExpertModel:
    try:
        return ExpertModel.of_parts([file])
    except NotMoEError:
        raise NotMoEError(
            f"{checkpoint.folder}: not a Mixture-of-Experts model: {checkpoint.architecture} has no"
            " experts"
        ) from None


class CheckpointFile(GGUFFile):
    """A checkpoint that can be read like a GGUF file. Its data is computed when it is read.

    Expert matrices have the type F32 regardless of the checkpoint's type. Their values are
    therefore rounded only once, when they are quantized. Several threads can read at the same time.
    """

    def __init__(self, checkpoint: Checkpoint, description: Description, ggml: Ggml) -> None:
        writer = GGUFWriter(checkpoint.folder / "model.gguf")
        for key, encoded in description.metadata.items():
            writer.meta_encoded(key, encoded)
        self._values: dict[str, Any] = {}
        for each in description.tensors:
            is_expert = parse_expert_name(each.name) is not None and each.type in FLOAT_TYPES
            writer.declare(each.name, each.shape, GGMLType.F32 if is_expert else each.type)
            self._values[each.name] = each.values
        header = writer.header()
        size = len(header) + writer.alignment + writer.data_bytes
        self._header_bytes, self._whole_bytes = header, size
        super().__init__(checkpoint.folder, header, size)
        self._ggml = ggml
        self._infos = sorted(self.tensors.values(), key=lambda info: info.offset)
        self._offsets = [info.offset for info in self._infos]
        self._whole: OrderedDict[str, Any] = OrderedDict()
        self._lock = Lock()

    @contextmanager
    def header_alone(self) -> Iterator[Path]:
        """Create a temporary file with this file's header and size, but without data.

        The file exists during the `with` block. It is sparse, so it takes almost no disk space.
        """
        with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
            file.write(self._header_bytes)
            file.flush()
            os.truncate(file.fileno(), self._whole_bytes)
            yield Path(file.name)

    def bytes_at(self, offset: int, nbytes: int) -> Bytes:
        """Return the bytes from a file offset on, as uint8 [nbytes].

        The range must be within one tensor or within the header.
        """
        if offset < self.data_offset:
            return super().bytes_at(offset, nbytes)
        info = self._infos[bisect_right(self._offsets, offset) - 1]
        start = offset - info.offset
        size = row_bytes(info.type, info.shape[0])
        first, last = start // size, -(-(start + nbytes) // size)
        rows = self._rows(info, first, last)
        skipped = start - first * size
        return rows[skipped : skipped + nbytes]

    def _rows(self, info: TensorInfo, first: int, last: int) -> Bytes:
        """Return the encoded bytes of the rows `first` to `last - 1` of a tensor.

        The rows of all matrices of a three-dimensional tensor are numbered consecutively.
        """
        values = self._values[info.name]
        if not lazy.divisible(values):
            values = self._computed(info.name, values)
        dims = tuple(reversed(info.shape[1:]))
        pieces = []
        while first < last:
            if len(dims) < 2:
                cuts: lazy.Cuts = (slice(first, last),) if dims else ()
                count = last - first
            else:
                outer, row = divmod(first, dims[-1])
                count = min(last - first, dims[-1] - row)
                index = np.unravel_index(outer, dims[:-1])
                cuts = tuple(slice(int(i), int(i) + 1) for i in index)
                cuts += (slice(row, row + count),)
            pieces.append(self._encoded(info, lazy.compute(values, cuts), count))
            first += count
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _computed(self, name: str, values: Any) -> Any:
        with self._lock:
            if name not in self._whole:
                while len(self._whole) >= _KEPT_WHOLE:
                    self._whole.popitem(last=False)
                self._whole[name] = lazy.compute(values)
            return self._whole[name]

    def _encoded(self, info: TensorInfo, values: Any, n_rows: int) -> Bytes:
        array = np.ascontiguousarray(values)
        if info.type not in FLOAT_TYPES:
            found = array.reshape(-1).view(np.uint8)
        else:
            array = array.reshape(n_rows, info.shape[0]).astype(np.float32, copy=False)
            if not np.isfinite(array).all():
                raise ConvertError(f"{self.path}: tensor {info.name}: a value is not finite")
            if info.type is GGMLType.F32:
                found = array.reshape(-1).view(np.uint8)
            else:
                found = self._rounded(info, array)
        expected = n_rows * row_bytes(info.type, info.shape[0])
        if found.nbytes != expected:
            raise ConvertError(
                f"{self.path}: tensor {info.name}: {found.nbytes} bytes computed, expected"
                f" {expected}"
            )
        return found

    def _rounded(self, info: TensorInfo, array: np.ndarray[Any, np.dtype[np.float32]]) -> Bytes:
        try:
            return self._ggml.quantize(info.type, array)
        except QuantizeError as error:
            raise QuantizeError(f"{self.path}: tensor {info.name}: {error}") from None
