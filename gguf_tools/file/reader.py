"""Strict, memory-mapped reader of GGUF files.

Files are treated as untrusted. Every count is compared with the number of remaining bytes before
memory is allocated. Every malformation raises one of the errors of `gguf_tools.errors`, whose
message names the file, the key or tensor, and the offset.
"""

import mmap
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools import errors
from gguf_tools.closing import Closing
from gguf_tools.file.layout import (
    DEFAULT_ALIGNMENT,
    KEY_ALIGNMENT,
    KEY_ARCHITECTURE,
    KEY_SPLIT_COUNT,
    MAGIC,
    READABLE_VERSIONS,
    ValueType,
    pad,
)
from gguf_tools.file.opening import open_file
from gguf_tools.file.parse import (
    MIN_KV_BYTES,
    MIN_TENSOR_BYTES,
    Cursor,
    TensorInfo,
    read_name,
    read_tensor,
    read_value,
    read_value_type,
)

MAX_KEY_BYTES = 65535

LFS_POINTER = b"version https://git-lfs."


class GGUFFile(Closing):
    """An open GGUF file whose header, metadata and tensor list have been parsed and checked.

    metadata, tensors: contents by name, in the order of the file.
    value_spans: start and end offset of each encoded metadata value, including its type tag, so
        that metadata can be copied exactly.
    size: size of the whole file, even if the buffer contains only its beginning.
    status: result of `os.fstat` when the file was opened, or None for a buffer.
    """

    status: os.stat_result | None = None

    def __init__(self, path: Path, buffer: mmap.mmap | bytes, size: int | None = None) -> None:
        self.path = path
        self.size = len(buffer) if size is None else size
        self.metadata: dict[str, Any] = {}
        self.value_types: dict[str, ValueType] = {}
        self.value_spans: dict[str, tuple[int, int]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.alignment = DEFAULT_ALIGNMENT
        self._buffer: mmap.mmap | bytes | None = buffer
        cursor = Cursor(path, buffer)
        n_tensors, n_kv = self._header(cursor)
        for index in range(n_kv):
            cursor.where = f"metadata entry {index}"
            self._read_kv(cursor)
        self._set_alignment(cursor)
        infos = []
        for index in range(n_tensors):
            cursor.where = f"tensor {index}"
            infos.append(read_tensor(cursor))
        self.data_offset = pad(cursor.at, self.alignment)
        self._place(infos)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "GGUFFile":
        """Map a GGUF file into memory, and parse and check its header, metadata and tensor list.

        Raises a GGUFError subclass if the file cannot be read or is malformed.
        """
        path = Path(path)
        try:
            with open_file(path) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise errors.FileAccessError(f"{path}: not a regular file")
                if status.st_size == 0:
                    raise errors.TruncatedError(f"{path}: header: the file is empty (at offset 0)")
                buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise errors.FileAccessError(f"{path}: {reason}") from error
        made = cls(path, buffer)
        made.status = status
        return made

    def _header(self, cursor: Cursor) -> tuple[int, int]:
        magic = bytes(cursor.buffer[:4])
        if cursor.buffer[: len(LFS_POINTER)] == LFS_POINTER:
            raise cursor.fail(
                errors.MagicError,
                "this is a Git LFS pointer, not the model: run `git lfs pull` to fetch the model",
            )
        if magic != MAGIC[: len(magic)]:
            raise cursor.fail(errors.MagicError, f"not a GGUF file: it starts with {magic!r}")
        cursor.take(4)
        version = cursor.scalar("I")
        if version not in READABLE_VERSIONS:
            big_endian = version and version & 0xFFFF == 0
            kind = "a big-endian file" if big_endian else f"GGUF version {version}"
            raise cursor.fail(
                errors.VersionError,
                f"this is {kind}, but only little-endian versions 2 and 3 are supported",
                4,
            )
        n_tensors = cursor.scalar("Q")
        n_kv = cursor.scalar("Q")
        left = cursor.size - cursor.at
        for n, least, what in (
            (n_tensors, MIN_TENSOR_BYTES, "tensors"),
            (n_kv, MIN_KV_BYTES, "metadata entries"),
        ):
            if n * least > left:
                raise cursor.fail(
                    errors.CountError, f"{n} {what} cannot fit in the {left} bytes left", 8
                )
        return n_tensors, n_kv

    def _read_kv(self, cursor: Cursor) -> None:
        start = cursor.at
        key = read_name(cursor, "key", MAX_KEY_BYTES)
        cursor.where = f"key {key}"
        if key in self.metadata:
            raise cursor.fail(errors.DuplicateError, "the key occurs twice", start)
        start = cursor.at
        kind = read_value_type(cursor)
        self.metadata[key] = read_value(cursor, kind)
        self.value_types[key] = kind
        self.value_spans[key] = (start, cursor.at)

    def _set_alignment(self, cursor: Cursor) -> None:
        if KEY_ALIGNMENT not in self.metadata:
            return
        value = self.metadata[KEY_ALIGNMENT]
        cursor.where = f"key {KEY_ALIGNMENT}"
        start = self.value_spans[KEY_ALIGNMENT][0]
        if self.value_types[KEY_ALIGNMENT] is not ValueType.UINT32:
            raise cursor.fail(errors.MetadataError, "the alignment must be a uint32", start)
        if value == 0 or value & (value - 1):
            raise cursor.fail(errors.MetadataError, f"{value} is not a power of two", start)
        self.alignment = value

    def _place(self, infos: list[TensorInfo]) -> None:
        """Store the tensors, after converting their offsets to offsets from the start of the file.

        The given offsets count from the start of the data section. Raises GGUFError if a tensor is
        misaligned, extends past the end of the file, overlaps another tensor, or has the same name.
        """
        for info in infos:
            offset = self.data_offset + info.offset
            tensor = f"{self.path}: tensor {info.name}: offset {offset}"
            if info.name in self.tensors:
                raise errors.DuplicateError(f"{tensor}: the name occurs twice")
            if info.offset % self.alignment:
                # gguf-split copies the key of the alignment, but always aligns to 32 bytes.
                hint = (
                    "; llama.cpp's gguf-split damages packed models in this way: split the model"
                    " first, then pack it"
                )
                raise errors.TensorOffsetError(
                    f"{tensor} ({info.offset} in the data section) is not a multiple of the"
                    f" alignment {self.alignment}{hint if KEY_SPLIT_COUNT in self.metadata else ''}"
                )
            if offset + info.nbytes > self.size:
                raise errors.TensorBoundsError(
                    f"{tensor}: {info.nbytes} bytes extend past the end of the file at {self.size}"
                )
            self.tensors[info.name] = info._replace(offset=offset)
        last: TensorInfo | None = None
        for info in sorted(self.tensors.values(), key=lambda each: each.offset):
            if last is not None and info.offset < last.offset + last.nbytes:
                raise errors.TensorOverlapError(
                    f"{self.path}: tensor {info.name}: offset {info.offset} overlaps tensor"
                    f" {last.name}, which ends at {last.offset + last.nbytes}"
                )
            last = info

    def array(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a tensor's data as a read-only view of bytes, uint8 [nbytes].

        The view stays valid after `close`. Raises MissingTensorError for an unknown name.
        """
        info = self.tensors.get(name)
        if info is None:
            raise errors.MissingTensorError(f"{self.path}: tensor {name} is missing")
        return self.bytes_at(info.offset, info.nbytes)

    def bytes_at(self, offset: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the bytes from a file offset on as a read-only view, uint8 [nbytes].

        Raises TensorBoundsError if the range extends past the end of the file.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise errors.TensorBoundsError(
                f"{self.path}: {nbytes} bytes at offset {offset} extend past the end of the file"
                f" at {self.size}"
            )
        if self._buffer is None:
            raise errors.FileAccessError(f"{self.path}: the file is already closed")
        return np.frombuffer(self._buffer, np.uint8, nbytes, offset)

    def encoded_value(self, key: str) -> bytes:
        """Return the bytes of a metadata value as stored in the file, including its type tag."""
        start, end = self.value_spans[key]
        return self.bytes_at(start, end - start).tobytes()

    def close(self) -> None:
        """Release the memory mapping. The file stays mapped as long as a view of it exists."""
        self._buffer = None


def metadata_value(file: GGUFFile, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
    """Return a metadata value, or the default if the key is missing.

    Raises MetadataError if the value is not an instance of `kind`.
    """
    if key not in file.metadata:
        return default
    value = file.metadata[key]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise errors.MetadataError(
            f"{file.path}: key {key}: unexpected value of type"
            f" {file.value_types[key].name.lower()} (at offset {file.value_spans[key][0]})"
        )
    return value


def architecture(file: GGUFFile) -> str:
    """Return the model's architecture name, the metadata value `general.architecture`.

    Other metadata keys begin with this name. Raises MissingKeyError if the name is missing or
    empty, and MetadataError if it has control characters.
    """
    arch = str(metadata_value(file, KEY_ARCHITECTURE, str, ""))
    if not arch:
        raise errors.MissingKeyError(f"{file.path}: key {KEY_ARCHITECTURE} is missing")
    if not arch.isprintable():
        raise errors.MetadataError(
            f"{file.path}: key {KEY_ARCHITECTURE}: {arch!r:.100} has control characters"
            f" (at offset {file.value_spans[KEY_ARCHITECTURE][0]})"
        )
    return arch


def one_line(text: str) -> str:
    """Return a text as a single line, without control characters and repeated spaces."""
    return " ".join("".join(each for each in text if each.isprintable() or each.isspace()).split())
