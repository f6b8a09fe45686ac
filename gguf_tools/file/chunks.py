"""Read files in pieces, so that memory use does not depend on the file size."""

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
    """Yield a byte range of a file in pieces, as (position within the range, bytes of the piece).

    A piece is a read-only uint8 array of at most CHUNK_BYTES bytes.
    """
    for start in range(0, nbytes, CHUNK_BYTES):
        yield start, file.bytes_at(offset + start, min(CHUNK_BYTES, nbytes - start))


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal text.

    Raises OSError if the file cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()
