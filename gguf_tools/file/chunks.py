"""Files read a piece at a time, so that their size does not matter to the memory."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.file.reader import GGUFFile

CHUNK_BYTES = 8 << 20


def chunks(
    file: GGUFFile, offset: int, nbytes: int
) -> Iterator[tuple[int, np.ndarray[Any, np.dtype[np.uint8]]]]:
    """(start, view) pieces of a byte range of a file, in order."""
    for start in range(0, nbytes, CHUNK_BYTES):
        yield start, file.bytes_at(offset + start, min(CHUNK_BYTES, nbytes - start))


def sha256_of(path: Path) -> str:
    """The hash of a file's bytes, hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()
