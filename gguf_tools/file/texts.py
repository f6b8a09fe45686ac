"""Reading text that a user gives, in a file or on stdin: bounded, from a regular file, in UTF-8."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from gguf_tools.errors import TextFileError
from gguf_tools.file.opening import open_file

_BOM = b"\xef\xbb\xbf"
# What files of other encodings begin with. UTF-32 first: its mark begins with that of UTF-16.
_OTHER_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
# Enough of a file that is too long to see whether it is text at all.
_FIRST_BYTES = 1 << 16


def decode_text(data: bytes, name: str) -> str:
    """Decode UTF-8 text and leave out a byte order mark at its start.

    name: what the text is called in an error message, such as a path. Raises TextFileError for
    another encoding, and for a zero byte, which no text has.
    """
    mark = next((each for each in _OTHER_MARKS if data.startswith(each)), None)
    if mark is not None:
        raise TextFileError(f"{name}: it is in {_OTHER_MARKS[mark]}; save it as UTF-8")
    wrong = data.find(0)
    try:
        text = data.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        start = error.start + len(_BOM) * data.startswith(_BOM)
        wrong = start if wrong < 0 else min(start, wrong)
    if wrong >= 0:
        raise TextFileError(
            f"{name}: it is not a text in UTF-8, at byte {wrong} (0x{data[wrong]:02x}); save it as"
            " UTF-8"
        )
    return text


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading in binary mode.

    Raises TextFileError for a file that cannot be opened, and for a device, a pipe or a folder,
    which may have no end.
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
    """Return the text of a regular file in UTF-8 of at most ``most_bytes`` bytes.

    A byte order mark at its start is left out. too_long: what is said of a longer file. Raises
    TextFileError for anything else, in one sentence that starts with the path.
    """
    with open_regular(path) as file:
        try:
            # no more than the file has: memory for all of it is taken at once
            data = file.read(min(most_bytes, os.fstat(file.fileno()).st_size) + 1)
        except OSError as error:
            raise TextFileError(f"{path}: {error.strerror or error}") from error
    if len(data) <= most_bytes:
        return decode_text(data, str(path))
    if 0 in data[:_FIRST_BYTES]:
        decode_text(data[:_FIRST_BYTES], str(path))  # what it is matters more than its length
    raise TextFileError(f"{path}: {too_long or f'it has more than {most_bytes:,} bytes'}")
