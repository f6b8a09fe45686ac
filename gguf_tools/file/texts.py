"""Read text that a user supplies, with checks: regular file, limited length, valid UTF-8."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from gguf_tools.errors import TextFileError
from gguf_tools.file.opening import open_file

_BOM = b"\xef\xbb\xbf"
# Byte order marks of other encodings. UTF-32 comes first, because its mark starts with UTF-16's.
_OTHER_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
# How much of a file that is too long is examined, to report a binary file as such.
_FIRST_BYTES = 1 << 16


def decode_text(data: bytes, name: str) -> str:
    """Return UTF-8 encoded text as a string, without a byte order mark at its start.

    Raises TextFileError if the data is in another encoding or contains a zero byte.

    name: the source for error messages, such as a path.
    """
    mark = next((each for each in _OTHER_MARKS if data.startswith(each)), None)
    if mark is not None:
        raise TextFileError(f"{name}: the text is in {_OTHER_MARKS[mark]}: save it as UTF-8")
    wrong = data.find(0)
    try:
        text = data.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        start = error.start + len(_BOM) * data.startswith(_BOM)
        wrong = start if wrong < 0 else min(start, wrong)
    if wrong >= 0:
        raise TextFileError(
            f"{name}: not UTF-8 text (byte 0x{data[wrong]:02x} at offset {wrong}): save it as UTF-8"
        )
    return text


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading in binary mode.

    Raises TextFileError if the file cannot be opened, or if it is a folder, a pipe or a device.
    Data of a pipe or a device may never end.
    """
    try:
        file = open_file(path)
    except OSError as error:
        raise TextFileError(f"{path}: {error.strerror or error}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise TextFileError(f"{path}: not a regular file")
    return file


def read_text(path: Path, most_bytes: int, too_long: str = "") -> str:
    """Return the contents of a regular UTF-8 file, without a byte order mark at its start.

    Raises TextFileError if the file is not a regular file, is not UTF-8, or is too long.

    most_bytes: maximum size of the file.
    too_long: message for a longer file, which is printed after the path.
    """
    with open_regular(path) as file:
        try:
            # read() allocates its argument at once, so it must not exceed the size of the file.
            data = file.read(min(most_bytes, os.fstat(file.fileno()).st_size) + 1)
        except OSError as error:
            raise TextFileError(f"{path}: {error.strerror or error}") from error
    if len(data) <= most_bytes:
        return decode_text(data, str(path))
    if 0 in data[:_FIRST_BYTES]:
        decode_text(data[:_FIRST_BYTES], str(path))  # raises: a binary file is the main problem
    raise TextFileError(
        f"{path}: {too_long or f'the file is longer than the maximum of {most_bytes:,} bytes'}"
    )
