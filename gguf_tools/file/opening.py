"""Opening a file that may be anything."""

import os
from typing import BinaryIO


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file to read. It does not wait for a pipe that nobody writes into, which then reads
    as empty. Raises OSError."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
