"""Opening a file that may be anything."""

import os
from typing import BinaryIO


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """A file to read; a pipe that nobody writes into is empty, and nobody waits for it. Raises
    OSError."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
