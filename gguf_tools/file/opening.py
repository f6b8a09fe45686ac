"""Open a path that may not be a regular file."""

import os
from typing import BinaryIO


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading in binary mode. Raises OSError if it cannot be opened.

    Opening a pipe does not wait for a writer. A pipe without a writer reads as an empty file.
    """
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
