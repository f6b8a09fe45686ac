"""Write GGUF v3 files completely or not at all.

All tensors are declared first, so that the header and every offset are known before any data is
written. The data then follows in any order, also from several threads. The file has a temporary
name until it is complete and synced. On an exception, including Ctrl-C, it is removed. If the
writer is killed, the next writer removes it. Several processes can write the same file at once:
each uses its own temporary file.
"""

import os
import shutil
import struct
import threading
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from gguf_tools import errors
from gguf_tools.file.checksums import VALUE_BYTES, SliceChecksums, n_slices
from gguf_tools.file.layout import (
    BLOCK,
    DEFAULT_ALIGNMENT,
    KEY_ALIGNMENT,
    KEY_CHECKSUMS,
    MAGIC,
    MAX_DIMS,
    MAX_NAME_BYTES,
    VALUE_FORMAT,
    VERSION,
    GGMLType,
    ValueType,
    pad,
    row_bytes,
)
from gguf_tools.file.unfinished import UnfinishedFile, remove_abandoned

Bytes = bytes | bytearray | memoryview | np.ndarray[Any, np.dtype[Any]]

WRITE_CHUNK_BYTES = 8 << 20

# Size of the magic, the version, and the numbers of tensors and metadata entries.
_HEAD_BYTES = 24


class Declared(NamedTuple):
    """A tensor of a GGUF file that is being written.

    offset: position of the data, in bytes from the start of the data section.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int


def value_type_of(value: Any) -> ValueType:
    """Return the GGUF metadata type in which a Python value is stored.

    An int becomes uint32, or int32 if it is negative. A 64-bit type is used if 32 bits are too few.
    Raises WriteError if no metadata type fits.
    """
    if isinstance(value, (bool, np.bool_)):
        return ValueType.BOOL
    if isinstance(value, (int, np.integer)):
        if value < 0:
            return ValueType.INT32 if value >= -(1 << 31) else ValueType.INT64
        return ValueType.UINT32 if value < 1 << 32 else ValueType.UINT64
    if isinstance(value, (float, np.floating)):
        return ValueType.FLOAT32
    if isinstance(value, str):
        return ValueType.STRING
    if isinstance(value, (list, tuple, np.ndarray)):
        return ValueType.ARRAY
    raise errors.WriteError(f"no metadata type can store a {type(value).__name__}")


def _encode_text(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _element_type(values: list[Any]) -> ValueType:
    kinds = {value_type_of(value) for value in values}
    if len(kinds) == 1:
        return kinds.pop()
    if not kinds:
        return ValueType.INT32
    if kinds <= {ValueType.INT32, ValueType.UINT32}:
        return ValueType.INT32 if max(values) < 1 << 31 else ValueType.INT64
    if kinds <= {ValueType.INT32, ValueType.UINT32, ValueType.INT64}:
        return ValueType.INT64
    raise errors.WriteError("the values of a metadata array have different types")


def encode_value(
    value: Any, kind: ValueType | None = None, element: ValueType | None = None
) -> bytes:
    """Return the encoded bytes of a metadata value, preceded by its type tag.

    Raises WriteError if the value does not fit the type.

    kind: metadata type of the value. Default: the type that fits the Python value.
    element: metadata type of the values of an array. Default: the type that fits them.
    """
    kind = value_type_of(value) if kind is None else kind
    tag = struct.pack("<I", kind)
    try:
        if kind is ValueType.STRING:
            return tag + _encode_text(value)
        if kind is not ValueType.ARRAY:
            return tag + struct.pack("<" + VALUE_FORMAT[kind], value)
        values = list(value)
        element = _element_type(values) if element is None else element
        head = tag + struct.pack("<IQ", element, len(values))
        if element is ValueType.STRING:
            return head + b"".join(_encode_text(each) for each in values)
        if element is ValueType.ARRAY:
            return head + b"".join(encode_value(each, ValueType.ARRAY)[4:] for each in values)
        return head + struct.pack(f"<{len(values)}{VALUE_FORMAT[element]}", *values)
    except (struct.error, AttributeError, TypeError, OverflowError) as error:
        raise errors.WriteError(
            f"a metadata value does not fit type {kind.name.lower()}: {error}"
        ) from None


class GGUFWriter:
    """Writes a GGUF file in a `with` statement.

    First call `meta`, `meta_encoded` and `declare` in any order, then `begin`, then `write_tensor`
    or `write_at` for the data. At the end of the block, the data of every declared tensor must have
    been written, and the file gets its final name. An exception in the block removes the file.

    alignment: alignment of tensor data in bytes, a power of two.
    checksums: whether to store a checksum of each expert and of each other tensor.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        alignment: int = DEFAULT_ALIGNMENT,
        *,
        checksums: bool = False,
    ) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise errors.WriteError(f"alignment {alignment} is not a power of two")
        self.path = Path(path)
        self.alignment = alignment
        self.tensors: dict[str, Declared] = {}
        self.data_bytes = 0
        self._meta: dict[str, bytes] = {}
        self._file: UnfinishedFile | None = None
        self._data_offset = 0
        self._written: dict[str, int] = {}
        self._lock = threading.Lock()
        self._checksums: dict[str, SliceChecksums] | None = {} if checksums else None
        if alignment != DEFAULT_ALIGNMENT:
            self.meta(KEY_ALIGNMENT, alignment, ValueType.UINT32)

    def meta(
        self,
        key: str,
        value: Any,
        kind: ValueType | None = None,
        element: ValueType | None = None,
    ) -> None:
        """Set a metadata value. An earlier value of the same key is replaced.

        kind: metadata type of the value. Default: the type that fits the Python value.
        element: metadata type of the values of an array. Default: the type that fits them.
        """
        self.meta_encoded(key, encode_value(value, kind, element))

    def meta_encoded(self, key: str, encoded: bytes) -> None:
        """Set a metadata value from its encoded bytes, which start with the type tag."""
        if self._file is not None:
            raise errors.WriteError(
                f"{self.path}: key {key}: too late, because the header is already written"
            )
        if not key:
            raise errors.WriteError(f"{self.path}: a metadata key is empty")
        if not key.isprintable():
            raise errors.WriteError(f"{self.path}: key {key!r:.100} has control characters")
        if key == KEY_ALIGNMENT and encoded != encode_value(self.alignment, ValueType.UINT32):
            raise errors.WriteError(
                f"{self.path}: key {key}: the value must be the file's alignment, {self.alignment}"
            )
        self._meta[key] = encoded

    def declare(self, name: str, shape: Iterable[int], ggml_type: GGMLType) -> Declared:
        """Add a tensor to the list of the file's tensors. Its data must be written after `begin`.

        shape: dimensions in ggml order, the row length first.
        Raises a GGUFError subclass for an invalid or repeated name and for an invalid shape.
        """
        shape = tuple(int(dim) for dim in shape)
        tensor = f"{self.path}: tensor {name}"
        if self._file is not None:
            raise errors.WriteError(f"{tensor}: too late, because the header is already written")
        if name in self.tensors:
            raise errors.DuplicateError(f"{tensor}: declared twice")
        if not name or len(name.encode("utf-8")) > MAX_NAME_BYTES:
            raise errors.TextError(f"{tensor}: the name must have 1 to {MAX_NAME_BYTES} bytes")
        if not name.isprintable():
            raise errors.TextError(f"{self.path}: tensor name {name!r} has control characters")
        if not 1 <= len(shape) <= MAX_DIMS or min(shape) < 1:
            raise errors.TensorShapeError(f"{tensor}: impossible shape {list(shape)}")
        if shape[0] % BLOCK[ggml_type].weights:
            raise errors.TensorShapeError(
                f"{tensor}: the row length {shape[0]} is not a multiple of"
                f" {BLOCK[ggml_type].weights}, the block size of {ggml_type.tier_name}"
            )
        nbytes = row_bytes(ggml_type, shape[0])
        for dim in shape[1:]:
            nbytes *= dim
        declared = Declared(name, shape, ggml_type, self.data_bytes, nbytes)
        self.tensors[name] = declared
        self.data_bytes += pad(nbytes, self.alignment)
        if self._checksums is not None:
            self._checksums[name] = SliceChecksums(nbytes, n_slices(shape))
        return declared

    def begin(self) -> None:
        """Create the temporary file and write the header. No tensor can be declared after that.

        Also remove temporary files of killed processes. Raises DiskSpaceError if the disk has too
        little free space, and WriteError if the file cannot be written.
        """
        if self._checksums is not None:
            slices = sum(n_slices(each.shape) for each in self.tensors.values())
            self.meta(KEY_CHECKSUMS, [0] * (1 + slices), element=ValueType.UINT32)
        header = self.header()
        self._data_offset = pad(len(header), self.alignment)
        total = self._data_offset + self.data_bytes
        remove_abandoned(self.path)
        try:
            free = shutil.disk_usage(self.path.parent).free
            if total > free:
                raise errors.DiskSpaceError(
                    f"{self.path}: the file needs {_gib(total)}, but its disk has only {_gib(free)}"
                    " free"
                )
            if self.path.is_dir():
                raise errors.WriteError(f"{self.path}: is a folder: choose a file name")
            self._file = UnfinishedFile(self.path)
            self._pwrite(header, 0)
            os.ftruncate(self._file.fd, total)
        except OSError as error:
            raise self._failed(error) from error

    def header(self) -> bytes:
        """Return the encoded header of the file: version, metadata and list of tensors."""
        parts = [MAGIC, struct.pack("<IQQ", VERSION, len(self.tensors), len(self._meta))]
        parts += (_encode_text(key) + encoded for key, encoded in self._meta.items())
        for each in self.tensors.values():
            parts.append(_encode_text(each.name))
            parts.append(struct.pack(f"<I{len(each.shape)}Q", len(each.shape), *each.shape))
            parts.append(struct.pack("<IQ", each.type, each.offset))
        return b"".join(parts)

    def write_at(self, name: str, start: int, data: Bytes) -> None:
        """Write a piece of a tensor's data, beginning at byte `start` of the tensor.

        Can be called from several threads. Pieces must not overlap.
        """
        declared = self.tensors.get(name)
        if declared is None or self._file is None:
            raise errors.WriteError(
                f"{self.path}: tensor {name}: call declare and begin before writing data"
            )
        view = _flat(data)
        if start < 0 or start + view.nbytes > declared.nbytes:
            raise errors.WriteError(
                f"{self.path}: tensor {name}: {view.nbytes} bytes at position {start} do not"
                f" fit in its {declared.nbytes} bytes"
            )
        if self._checksums is not None:
            self._checksums[name].add(start, view)
        try:
            self._pwrite(view, self._data_offset + declared.offset + start)
        except OSError as error:
            raise self._failed(error) from error
        with self._lock:
            self._written[name] = self._written.get(name, 0) + view.nbytes

    def write_tensor(self, name: str, data: Bytes | Iterable[Bytes]) -> None:
        """Write all data of a tensor, given as one buffer or as consecutive pieces."""
        whole = isinstance(data, (bytes, bytearray, memoryview, np.ndarray))
        pieces: Iterable[Bytes] = (data,) if whole else data  # type: ignore[assignment]
        start = 0
        for piece in pieces:
            view = _flat(piece)
            for at in range(0, view.nbytes, WRITE_CHUNK_BYTES):
                chunk = view[at : at + WRITE_CHUNK_BYTES]
                self.write_at(name, start, chunk)
                start += chunk.nbytes

    def finish(self) -> None:
        """Wait until the file is on disk, and rename it to its final name.

        Raises WriteError if the data of a tensor is incomplete or the file cannot be written.
        """
        if self._file is None:
            raise errors.WriteError(f"{self.path}: call begin before finish")
        for each in self.tensors.values():
            written = self._written.get(each.name, 0)
            if written != each.nbytes:
                raise errors.WriteError(
                    f"{self.path}: tensor {each.name}: only {written} of {each.nbytes} bytes were"
                    " written"
                )
        try:
            if self._checksums is not None:
                self._pwrite(self._header_with_checksums(self._checksums), 0)
            self._file.complete(synced=True)
            self._file = None
        except OSError as error:
            raise self._failed(error) from error

    def _header_with_checksums(self, checksums: dict[str, SliceChecksums]) -> bytes:
        """Return the header with the data's checksums, instead of the zeros that `begin` wrote."""
        header = self.header()
        # begin() adds the checksums last, so they are the last metadata value.
        end = _HEAD_BYTES + sum(
            len(_encode_text(key)) + len(encoded) for key, encoded in self._meta.items()
        )
        values = [value for name in self.tensors for value in checksums[name].values()]
        start = end - VALUE_BYTES * (1 + len(values))
        padding = bytes(self._data_offset - len(header))
        own = zlib.crc32(header[end:] + padding, zlib.crc32(header[:start]))
        return header[:start] + struct.pack(f"<{1 + len(values)}I", own, *values) + header[end:]

    def abort(self) -> None:
        """Remove the temporary file. Does nothing if the file is complete or was never created."""
        if self._file is not None:
            self._file.discard()
            self._file = None

    def __enter__(self) -> "GGUFWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abort()
            return
        try:
            self.finish()
        except BaseException:
            self.abort()
            raise

    def _pwrite(self, data: bytes | memoryview, offset: int) -> None:
        if self._file is None:
            raise errors.WriteError(f"{self.path}: the file is already closed")
        view = memoryview(data)
        while view.nbytes:
            n = os.pwrite(self._file.fd, view, offset)
            view = view[n:]
            offset += n

    def _failed(self, error: OSError) -> errors.GGUFError:
        return errors.WriteError(f"{self.path}: {error.strerror or error}")


def _flat(data: Bytes) -> memoryview:
    if isinstance(data, np.ndarray):
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return memoryview(data).cast("B")  # type: ignore[arg-type]


def _gib(n: int) -> str:
    return f"{n / (1 << 30):.2f} GiB" if n >= 1 << 27 else f"{n / (1 << 20):.1f} MiB"
