"""Parse GGUF values, arrays and entries of the tensor list, with bounds checks.

Every count is compared with the number of remaining bytes before memory is allocated. A malicious
file therefore cannot use more time or memory than its own length justifies.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from gguf_tools import errors
from gguf_tools.file.layout import (
    BLOCK,
    MAX_DIMS,
    MAX_NAME_BYTES,
    VALUE_FORMAT,
    GGMLType,
    ValueType,
    row_bytes,
)

MAX_ARRAY_DEPTH = 4
MAX_ARRAY_ELEMENTS = 1 << 24

# Minimum size of a metadata entry: an empty name, a type tag and a one-byte value.
MIN_KV_BYTES = 8 + 4 + 1
# Minimum size of a tensor entry: an empty name, one dimension, a type and an offset.
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


class TensorInfo(NamedTuple):
    """Name, shape, type and position of a tensor in a GGUF file.

    The shape starts with the row length (ggml order). The offset is in bytes from the start of the
    file.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int


class Cursor:
    """Reads little-endian values from a buffer, one after another, with bounds checks.

    where: the item being read, for error messages.
    """

    def __init__(self, path: Path, buffer: mmap.mmap | bytes) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.at = 0
        self.where = "header"

    def fail(
        self, kind: type[errors.GGUFError], text: str, at: int | None = None
    ) -> errors.GGUFError:
        """Return an error of class `kind` that names the file, the item being read and the offset.

        text: the problem.
        at: the offset. Default: the current position.
        """
        offset = self.at if at is None else at
        return kind(f"{self.path}: {self.where}: {text} (at offset {offset})")

    def take(self, n: int) -> int:
        """Advance the position by n bytes, and return the position before that.

        Raises TruncatedError if fewer than n bytes are left.
        """
        start = self.at
        if n > self.size - start:
            raise self.fail(
                errors.TruncatedError,
                f"the file ends here: {n} bytes needed, {self.size - start} left",
            )
        self.at = start + n
        return start

    def scalar(self, fmt: str) -> Any:
        """Read one value of fixed size.

        fmt: format character of the value in Python's module struct.
        """
        start = self.take(struct.calcsize("<" + fmt))
        return struct.unpack_from("<" + fmt, self.buffer, start)[0]

    def text(self, limit: int | None = None) -> str:
        """Read a UTF-8 string, which is stored after its length.

        limit: maximum length in bytes. A longer string raises TextError.
        """
        start = self.at
        n = self.scalar("Q")
        if n > self.size - self.at:
            raise self.fail(
                errors.CountError,
                f"a string of {n} bytes cannot fit in the {self.size - self.at} bytes left",
                start,
            )
        if limit is not None and n > limit:
            raise self.fail(
                errors.TextError, f"the name has {n} bytes, but the maximum is {limit}", start
            )
        data = self.buffer[self.take(n) : self.at]
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(
                errors.TextError, f"not valid UTF-8 ({error.reason})", start + 8 + error.start
            ) from None


def read_name(cursor: Cursor, what: str, limit: int) -> str:
    """Read the name of a metadata key or a tensor.

    Raises TextError if the name is empty, longer than `limit` bytes, or has control characters such
    as line feeds, which would garble messages.

    what: the name's kind for error messages, such as "tensor name".
    """
    start = cursor.at
    name = cursor.text(limit)
    if not name:
        raise cursor.fail(errors.TextError, f"empty {what}", start)
    if not name.isprintable():
        raise cursor.fail(errors.TextError, f"{what} {name!r:.100} has control characters", start)
    return name


def read_value_type(cursor: Cursor) -> ValueType:
    """Read the type tag of a metadata value. Raises MetadataError for an unknown type."""
    start = cursor.at
    tag = cursor.scalar("I")
    try:
        return ValueType(tag)
    except ValueError:
        raise cursor.fail(
            errors.MetadataError, f"unknown metadata value type {tag}", start
        ) from None


def _bools(cursor: Cursor, start: int, n: int) -> list[bool]:
    data = bytes(cursor.buffer[start : start + n])
    if n and max(data) > 1:
        bad = next(i for i, byte in enumerate(data) if byte > 1)
        raise cursor.fail(errors.MetadataError, f"boolean value {data[bad]}", start + bad)
    return [byte == 1 for byte in data]


def _array(cursor: Cursor, depth: int) -> list[Any]:
    start = cursor.at
    if depth > MAX_ARRAY_DEPTH:
        raise cursor.fail(
            errors.NestingError, f"arrays are nested more than {MAX_ARRAY_DEPTH} levels deep", start
        )
    kind = read_value_type(cursor)
    n = cursor.scalar("Q")
    left = cursor.size - cursor.at
    least = 12 if kind is ValueType.ARRAY else 8 if kind is ValueType.STRING else 0
    width = least or struct.calcsize("<" + VALUE_FORMAT[kind])
    if n > left // width:
        raise cursor.fail(
            errors.CountError, f"an array of {n} values cannot fit in the {left} bytes left", start
        )
    if n > MAX_ARRAY_ELEMENTS:
        raise cursor.fail(
            errors.CountError,
            f"the array has {n} values, but the maximum is {MAX_ARRAY_ELEMENTS}",
            start,
        )
    if kind is ValueType.ARRAY:
        return [_array(cursor, depth + 1) for _ in range(n)]
    if kind is ValueType.STRING:
        return [cursor.text() for _ in range(n)]
    data = cursor.take(n * width)
    if kind is ValueType.BOOL:
        return _bools(cursor, data, n)
    return list(struct.unpack_from(f"<{n}{VALUE_FORMAT[kind]}", cursor.buffer, data))


def read_value(cursor: Cursor, kind: ValueType) -> Any:
    """Read a metadata value of the given type, without its type tag."""
    if kind is ValueType.ARRAY:
        return _array(cursor, 1)
    if kind is ValueType.STRING:
        return cursor.text()
    if kind is ValueType.BOOL:
        return _bools(cursor, cursor.take(1), 1)[0]
    return cursor.scalar(VALUE_FORMAT[kind])


def read_tensor(cursor: Cursor) -> TensorInfo:
    """Read one entry of the tensor list of a GGUF file.

    The returned offset is relative to the start of the data section. Raises a GGUFError subclass
    for an invalid name, shape or type.
    """
    name = read_name(cursor, "tensor name", MAX_NAME_BYTES)
    cursor.where = f"tensor {name}"
    start = cursor.at
    n_dims = cursor.scalar("I")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.fail(
            errors.TensorShapeError,
            f"the tensor has {n_dims} dimensions, expected 1 to {MAX_DIMS}",
            start,
        )
    start = cursor.at
    shape = tuple(cursor.scalar("Q") for _ in range(n_dims))
    weights = 1
    for dim in shape:
        weights *= dim
    if weights == 0 or weights >= 1 << 63:
        raise cursor.fail(errors.TensorShapeError, f"impossible shape {list(shape)}", start)
    start = cursor.at
    tag = cursor.scalar("I")
    try:
        ggml_type = GGMLType(tag)
    except ValueError:
        raise cursor.fail(errors.TensorTypeError, f"unknown ggml type {tag}", start) from None
    block = BLOCK[ggml_type].weights
    if shape[0] % block:
        raise cursor.fail(
            errors.TensorShapeError,
            f"the row length {shape[0]} is not a multiple of {block}, the block size of"
            f" {ggml_type.tier_name}",
            start,
        )
    nbytes = row_bytes(ggml_type, shape[0]) * (weights // shape[0])
    return TensorInfo(name, shape, ggml_type, cursor.scalar("Q"), nbytes)
