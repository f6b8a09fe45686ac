"""CRC-32 of each slice of a file, so that any damage to it is found.

A packed file has one for its header, and for each tensor one or, where the tensor holds experts,
one for each expert. They stand in its metadata under ``moe_edge.crc32``, as one array of uint32:
that of the header, then those of the tensors in the order of the file. The header's own leaves the
values of the array out.
"""

import threading
import zlib
from collections.abc import Sequence

from gguf_tools import errors
from gguf_tools.file.layout import KEY_CHECKSUMS, ValueType
from gguf_tools.file.reader import GGUFFile

VALUE_BYTES = 4
# Of the encoded array: its type tag, the type of its values, and how many there are.
_ARRAY_HEAD_BYTES = 16

# The polynomial of CRC-32 (IEEE 802.3), the lowest power in the highest bit, without the 32nd.
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def n_slices(shape: Sequence[int]) -> int:
    """Checksums of a tensor: its last dimension where it has three, which are experts, else one."""
    return shape[2] if len(shape) == 3 else 1


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two pieces, one behind the other, of which the second has so many bytes."""
    return _product(_power_of_x(8 * second_bytes), first) ^ second


class SliceChecksums:
    """The checksums of one tensor, from pieces that come in any order and from any thread."""

    def __init__(self, nbytes: int, slices: int) -> None:
        self._slice_bytes = nbytes // slices
        self._slices = slices
        self._pieces: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def add(self, start: int, data: memoryview) -> None:
        """Counts bytes of the tensor from byte ``start`` on."""
        at = 0
        while at < data.nbytes:
            left = self._slice_bytes - (start + at) % self._slice_bytes
            piece = data[at : at + left]
            crc = zlib.crc32(piece)
            with self._lock:
                self._pieces[start + at] = (piece.nbytes, crc)
            at += piece.nbytes

    def values(self) -> list[int]:
        """One CRC-32 for each slice; every byte must have been added."""
        found = [0] * self._slices
        for start in sorted(self._pieces):
            nbytes, crc = self._pieces[start]
            index, inside = divmod(start, self._slice_bytes)
            found[index] = combine(found[index], crc, nbytes) if inside else crc
        return found


def stored(file: GGUFFile) -> dict[str, list[int]] | None:
    """The checksums of each tensor by name, and that of the header by ""; None where the file has
    none. Raises MetadataError where they do not fit the tensors."""
    values = file.metadata.get(KEY_CHECKSUMS)
    if values is None:
        return None
    counts = {name: n_slices(info.shape) for name, info in file.tensors.items()}
    expected = 1 + sum(counts.values())
    head = file.encoded_value(KEY_CHECKSUMS)[4:8]
    is_fitting = isinstance(values, list) and len(values) == expected
    if not is_fitting or int.from_bytes(head, "little") != ValueType.UINT32:
        raise errors.MetadataError(
            f"{file.path}: key {KEY_CHECKSUMS}: not {expected} values of type uint32, one for the "
            f"header and the others for its tensors"
        )
    found, at = {"": values[:1]}, 1
    for name, count in counts.items():
        found[name] = values[at : at + count]
        at += count
    return found


def header_checksum(file: GGUFFile) -> int:
    """The CRC-32 of all before the data, without the values of the array of checksums."""
    start, end = file.value_spans[KEY_CHECKSUMS]
    before = file.bytes_at(0, start + _ARRAY_HEAD_BYTES)
    behind = file.bytes_at(end, file.data_offset - end)
    return zlib.crc32(behind.data, zlib.crc32(before.data))


def _product(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo that of the CRC."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _power_of_x(exponent: int) -> int:
    """x to this power, modulo the polynomial of the CRC."""
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = _product(power, square)
        square = _product(square, square)
        exponent >>= 1
    return power
