"""Read and write importance matrices in llama.cpp's format.

An importance matrix contains the mean squared input of each column of each matrix. In a GGUF file,
`NAME.in_sum2` [row length, experts] has the sums of squared inputs and `NAME.counts` [1, experts]
the numbers of tokens. The metadata keys are `imatrix.datasets`, `imatrix.chunk_count` and
`imatrix.chunk_size`. The older format, a flat list of means, can be read too. Sources:
tools/imatrix/imatrix.cpp and common/imatrix-loader.cpp.
"""

import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gguf_tools import errors
from gguf_tools.experts import ExpertModel
from gguf_tools.file.chunks import sha256_of
from gguf_tools.file.layout import GATE, GATE_UP, MAGIC, UP, GGMLType, ValueType, expert_tensor_name
from gguf_tools.file.opening import open_file
from gguf_tools.file.reader import GGUFFile, metadata_value, one_line
from gguf_tools.file.writer import GGUFWriter
from gguf_tools.quantize.ggml import Floats

SUMS, COUNTS = ".in_sum2", ".counts"
KEY_TYPE = "general.type"
KEY_DATASETS = "imatrix.datasets"
KEY_CHUNK_COUNT = "imatrix.chunk_count"
KEY_CHUNK_SIZE = "imatrix.chunk_size"

# An expert's own mean is used if at least this number of tokens was routed to it.
LEAST_TOKENS = 32
_SHOWN = 8
_LEGACY_NAME_BYTES = 4096


class Entry(NamedTuple):
    """The importance of the columns of one matrix, or of the same matrix in all experts.

    sums: float32, the sum of the squared inputs of each column. The columns of all experts follow
        each other.
    counts: float32, the number of tokens that were added, as one value, or as one value per expert.
    """

    sums: Floats
    counts: Floats


@dataclass
class Imatrix:
    """The contents of an importance matrix file of llama.cpp.

    name: name for messages and metadata.
    entries: maps the name of each tensor to the sums of its squared inputs, and to the counts of
        these inputs.
    datasets, chunk_count, chunk_size: description of the calibration data.
    has_counts: whether the counts in `entries` are numbers of tokens. In files of the older format,
        they are numbers of matrix products.
    path, sha256: the file from which it was read, and the SHA-256 of the file.
    """

    name: str
    entries: dict[str, Entry]
    datasets: list[str] = field(default_factory=list)
    chunk_count: int = 0
    chunk_size: int = 0
    has_counts: bool = True
    path: Path | None = None
    sha256: str | None = None

    def summary(self) -> str:
        """Return a one-line description of the importance matrix, to record in a packed file."""
        text = f"imatrix {self.name}"
        if self.datasets:
            text += f" of {', '.join(self.datasets)}"
        if self.chunk_count and self.chunk_size:
            text += f", {self.chunk_count} chunks of {self.chunk_size} tokens"
        return text + (f", sha256 {self.sha256}" if self.sha256 else "")


class ExpertImportance:
    """The importance of each expert's columns, from an importance matrix of the model.

    If fewer than LEAST_TOKENS tokens were routed to an expert, the mean over all tokens of its
    layer is used. llama.cpp would use the expert's own mean, or equal weights if no token was
    routed to the expert. Raises MismatchError if the importance matrix belongs to another model.

    weak: layer number, expert and number of tokens of each expert with too few tokens.
    """

    def __init__(self, imatrix: Imatrix, model: ExpertModel) -> None:
        self.imatrix = imatrix
        self._entries: list[dict[int, tuple[Floats, Floats]]] = []
        self._means: list[dict[int, Floats]] = []
        self.weak: list[tuple[int, int, int]] = []
        for layer, il in enumerate(model.layer_ids):
            found = {}
            for kind in model.kinds(layer):
                shape = model.shapes[layer][kind]
                if shape is not None:
                    found[kind] = _fitting(imatrix, model, il, kind, shape[0])
            self._entries.append(found)
            self._means.append(
                {
                    kind: (sums.sum(axis=0, dtype=np.float64) / max(counts.sum(), 1)).astype(
                        np.float32
                    )
                    for kind, (sums, counts) in found.items()
                }
            )
            if imatrix.has_counts:
                fewest = np.min([counts for _, counts in found.values()], axis=0)
                self.weak += (
                    (il, int(e), int(fewest[e])) for e in np.flatnonzero(fewest < LEAST_TOKENS)
                )

    def of(self, layer: int, kind: int, expert: int) -> Floats:
        """Return the mean squared input of each column of an expert's matrix, float32 [row length].

        layer: index of the MoE layer.
        kind: kind of the matrix, an index into KINDS.
        """
        sums, counts = self._entries[layer][kind]
        least = LEAST_TOKENS if self.imatrix.has_counts else 1
        if counts[expert] < least:
            return self._means[layer][kind]
        mean: Floats = sums[expert] / counts[expert]
        return mean

    def counts(self, layer: int) -> Floats:
        """Return how many calibration tokens were routed to each expert of a layer, [n_expert]."""
        return next(iter(self._entries[layer].values()))[1]

    def note(self) -> str | None:
        """Return a note for the user on experts with too few calibration tokens.

        Return None if no expert has too few.
        """
        if not self.weak:
            return None
        shown = ", ".join(f"{e} of layer {il} ({n})" for il, e, n in self.weak[:_SHOWN])
        more = f" and {len(self.weak) - _SHOWN} more" if len(self.weak) > _SHOWN else ""
        many = "s" if len(self.weak) > 1 else ""
        return (
            f"{len(self.weak)} expert{many} saw fewer than {LEAST_TOKENS} calibration tokens:"
            f" {shown}{more}. The mean of the layer is used instead"
        )


def _fitting(
    imatrix: Imatrix, model: ExpertModel, il: int, kind: int, width: int
) -> tuple[Floats, Floats]:
    """Return the importance sums [n_expert, width] and counts [n_expert] of an expert matrix.

    Raises MismatchError if the importance matrix has no such entry, or if its shape is wrong.

    il: layer number.
    kind: kind of the matrix, an index into KINDS.
    width: row length of the matrix.
    """
    # Up, gate and fused gate-up matrices have the same inputs, so any of their entries will do.
    kinds = (kind, *({UP, GATE, GATE_UP} - {kind} if kind in (UP, GATE, GATE_UP) else ()))
    names = [expert_tensor_name(il, each) for each in kinds]
    entry = next((imatrix.entries[name] for name in names if name in imatrix.entries), None)
    source = imatrix.path or imatrix.name
    if entry is None:
        raise errors.MismatchError(
            f"{source}: no entry for {names[0]}: the file was made with another model than"
            f" {model.path}, or without its experts"
        )
    n = model.n_expert
    if entry.sums.size != n * width or entry.counts.size not in (1, n):
        raise errors.MismatchError(
            f"{source}: {names[0]}: {entry.sums.size} values and {entry.counts.size} counts,"
            f" but {model.path} has {n} experts with rows of {width}: the file was made with"
            " another model"
        )
    return entry.sums.reshape(n, width), np.broadcast_to(entry.counts, n)


def read_imatrix(path: str | os.PathLike[str]) -> Imatrix:
    """Read an importance matrix from a file of llama.cpp, in the GGUF or the older format.

    Raises GGUFError if the file is not an importance matrix, or if a value is negative or not
    finite.
    """
    path = Path(path)
    try:
        with open_file(path) as file:
            found = None
            magic = file.read(len(MAGIC))
            if not magic:  # An empty file cannot be mapped.
                found = _read_legacy(path, magic)
            elif magic != MAGIC:
                # Map the file: a wrong file can be larger than memory.
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    found = _read_legacy(path, data)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise errors.FileAccessError(f"{path}: {reason}") from error
    if found is None:
        found = _read_gguf(path)
    found.path, found.sha256 = path, sha256_of(path)
    for name, entry in found.entries.items():
        for values in entry:
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise errors.MetadataError(
                    f"{path}: {name}: a value is negative or not finite: the file is damaged"
                )
    return found


def _read_gguf(path: Path) -> Imatrix:
    with GGUFFile.open(path) as file:
        entries = {}
        for name in [name for name in file.tensors if name.endswith(SUMS)]:
            base = name.removesuffix(SUMS)
            if base + COUNTS not in file.tensors:
                raise errors.MissingTensorError(f"{path}: tensor {base + COUNTS} is missing")
            entries[base] = Entry(_floats(file, name), _floats(file, base + COUNTS))
        if not entries:
            raise errors.MissingTensorError(
                f"{path}: not an importance matrix: no tensor is named *{SUMS}"
            )
        datasets = metadata_value(file, KEY_DATASETS, list, [])
        return Imatrix(
            path.name,
            entries,
            [one_line(str(each)) for each in datasets],
            metadata_value(file, KEY_CHUNK_COUNT, int, 0),
            metadata_value(file, KEY_CHUNK_SIZE, int, 0),
        )


def _floats(file: GGUFFile, name: str) -> Floats:
    info = file.tensors[name]
    if info.type is not GGMLType.F32:
        raise errors.TensorTypeError(
            f"{file.path}: tensor {name}: type {info.type.tier_name}, expected f32"
        )
    return file.array(name).view(np.float32)


def _read_legacy(path: Path, data: mmap.mmap | bytes) -> Imatrix:
    """Read an importance matrix in the format that llama.cpp used before GGUF.

    The file has for each matrix a name, a number of calls, and the mean squared inputs multiplied
    by that number. Raises GGUFError if the file has another format.
    """
    at = 0

    def take(n: int) -> bytes:
        nonlocal at
        if not 0 <= n <= len(data) - at:
            raise errors.MagicError(
                f"{path}: neither a GGUF nor an importance matrix of the older format"
                f" (at offset {at})"
            )
        at += n
        return data[at - n : at]

    def number() -> int:
        return int(struct.unpack("<i", take(4))[0])

    entries: dict[str, Entry] = {}
    for _ in range(number()):
        length = number()
        name = take(length if length <= _LEGACY_NAME_BYTES else -1).decode("utf-8", "replace")
        calls = number()
        values: npt.NDArray[np.float32] = np.frombuffer(take(4 * number()), np.float32)
        # If the number of calls is 0, the values are the means themselves.
        entries[name] = Entry(values, np.array([max(calls, 1)], np.float32))
    if not entries:
        take(-1)
    chunks, datasets = 0, []
    if len(data) - at >= 8:
        chunks, length = number(), number()
        datasets = [take(length).decode("utf-8", "replace")] if length > 0 else []
    return Imatrix(path.name, entries, datasets, chunks, 0, has_counts=False)


def write_imatrix(path: str | os.PathLike[str], imatrix: Imatrix) -> None:
    """Write an importance matrix to a file in llama.cpp's GGUF format."""
    writer = GGUFWriter(path)
    writer.meta(KEY_TYPE, "imatrix")
    writer.meta(KEY_DATASETS, imatrix.datasets, ValueType.ARRAY, ValueType.STRING)
    writer.meta(KEY_CHUNK_COUNT, imatrix.chunk_count, ValueType.UINT32)
    writer.meta(KEY_CHUNK_SIZE, imatrix.chunk_size, ValueType.UINT32)
    data = {}
    for name, entry in sorted(imatrix.entries.items()):
        n = entry.counts.size
        writer.declare(name + SUMS, (entry.sums.size // n, n), GGMLType.F32)
        writer.declare(name + COUNTS, (1, n), GGMLType.F32)
        data[name + SUMS], data[name + COUNTS] = entry
    with writer:
        writer.begin()
        for name, values in data.items():
            writer.write_tensor(name, np.asarray(values, np.float32))
