"""CRC-32 checksums that detect damage anywhere in a packed file.

A packed file has one checksum for its header, one for each tensor without experts, and one for each
expert of a tensor with experts. The metadata key `moe_edge.crc32` stores them as an array of
uint32: first the header's, then those of the tensors in file order. The header's checksum covers
the header without the values of this array.
"""

import threading
import zlib
from collections.abc import Sequence

from gguf_tools import errors
from gguf_tools.file.layout import KEY_CHECKSUMS, ValueType
from gguf_tools.file.reader import GGUFFile

VALUE_BYTES = 4
# Bytes of an encoded array before its values: type tag, element type and number of values.
_ARRAY_HEAD_BYTES = 16

# The polynomial of CRC-32 (IEEE 802.3) without x^32, with the coefficient of x^0 in the top bit.
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def n_slices(shape: Sequence[int]) -> int:
    """Return the number of checksums that a file stores for a tensor of this shape.

    A tensor with three dimensions contains experts, and has one checksum for each expert. The last
    dimension is the number of experts. Any other tensor has one checksum.
    """
    return shape[2] if len(shape) == 3 else 1


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two consecutive pieces of data, given the CRC-32 of each piece.

    second_bytes: length of the second piece.
    """
    return _product(_power_of_x(8 * second_bytes), first) ^ second


class SliceChecksums:
    """Computes the CRC-32 checksums of one tensor from pieces of its data.

    The tensor has one checksum for each expert. Pieces can be added in any order and from several
    threads.

    nbytes: size of the tensor.
    slices: number of experts, or 1 for other tensors.
    """

    def __init__(self, nbytes: int, slices: int) -> None:
        self._slice_bytes = nbytes // slices
        self._slices = slices
        self._pieces: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def add(self, start: int, data: memoryview) -> None:
        """Include a piece of the tensor's data in the checksums.

        start: position of the piece, in bytes from the start of the tensor.
        """
        at = 0
        while at < data.nbytes:
            left = self._slice_bytes - (start + at) % self._slice_bytes
            piece = data[at : at + left]
            crc = zlib.crc32(piece)
            with self._lock:
                self._pieces[start + at] = (piece.nbytes, crc)
            at += piece.nbytes

    def values(self) -> list[int]:
        """Return the checksum of each expert's part of the tensor.

        All data of the tensor must have been added before.
        """
        found = [0] * self._slices
        for start in sorted(self._pieces):
            nbytes, crc = self._pieces[start]
            index, inside = divmod(start, self._slice_bytes)
            found[index] = combine(found[index], crc, nbytes) if inside else crc
        return found


def stored(file: GGUFFile) -> dict[str, list[int]] | None:
    """Return the checksums that a file stores for each tensor, by tensor name.

    The checksum of the file's header has the name "". Return None if the file has no checksums.
    Raises MetadataError if their type or number does not match the file's tensors.
    """
    values = file.metadata.get(KEY_CHECKSUMS)
    if values is None:
        return None
    counts = {name: n_slices(info.shape) for name, info in file.tensors.items()}
    expected = 1 + sum(counts.values())
    head = file.encoded_value(KEY_CHECKSUMS)[4:8]
    is_fitting = isinstance(values, list) and len(values) == expected
    if not is_fitting or int.from_bytes(head, "little") != ValueType.UINT32:
        raise errors.MetadataError(
            f"{file.path}: key {KEY_CHECKSUMS}: expected {expected} values of type uint32, one for "
            f"the header and {expected - 1} for the tensors"
        )
    found, at = {"": values[:1]}, 1
    for name, count in counts.items():
        found[name] = values[at : at + count]
        at += count
    return found


def header_checksum(file: GGUFFile) -> int:
    """Compute the CRC-32 of everything before the tensor data, without the stored checksums."""
    start, end = file.value_spans[KEY_CHECKSUMS]
    before = file.bytes_at(0, start + _ARRAY_HEAD_BYTES)
    after = file.bytes_at(end, file.data_offset - end)
    return zlib.crc32(after.data, zlib.crc32(before.data))


def _product(a: int, b: int) -> int:
    """Multiply two polynomials over GF(2), modulo the polynomial of CRC-32.

    Bit 31 of a number is the coefficient of x^0.
    """
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _power_of_x(exponent: int) -> int:
    """Return the polynomial x**exponent over GF(2), modulo the polynomial of CRC-32."""
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = _product(power, square)
        square = _product(square, square)
        exponent >>= 1
    return power
