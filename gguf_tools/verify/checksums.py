"""Compare the contents of model files with their checksums.

A packed file contains its own checksums. A file from the Hugging Face Hub has its SHA-256 as its
name in huggingface_hub's cache. Other GGUF files have no checksums, so damage is only detected if
it makes a value invalid.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.errors import GGUFError
from gguf_tools.file.checksums import SliceChecksums, header_checksum, n_slices, stored
from gguf_tools.file.chunks import sha256_of
from gguf_tools.file.layout import parse_expert_name
from gguf_tools.file.parse import TensorInfo
from gguf_tools.file.reader import GGUFFile
from gguf_tools.verify.report import Problem, problem_at
from gguf_tools.workers import Job

_SHA256 = re.compile(r"[0-9a-f]{64}")


class FileChecksums:
    """Compares the known checksums of a model file with those of the data read from it.

    Checksums are known if they are stored in the file, or if the file is in the cache of the
    Hugging Face Hub.

    refused: error message if the stored checksums are unusable.
    hub_hash: the file's SHA-256 according to the Hub, or None.
    """

    def __init__(self, part: GGUFFile) -> None:
        self.part = part
        self.refused: str | None = None
        self.hub_hash = _hub_hash(part.path)
        self._hash: str | None = None
        self._stored: dict[str, list[int]] | None = None
        try:
            self._stored = stored(part)
        except GGUFError as error:
            self.refused = str(error)
        self._found = {
            info.name: SliceChecksums(info.nbytes, n_slices(info.shape))
            for info in part.tensors.values()
            if self._stored is not None
        }

    @property
    def is_covered(self) -> bool:
        """Whether stored checksums cover the whole file, so that any damage is detected."""
        return self._stored is not None or self.hub_hash is not None

    def add(self, info: TensorInfo, start: int, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Include a piece of a tensor's data in the checksums that `problems` compares later.

        Pieces can be added in any order and from several threads.

        start: position of the piece, in bytes from the start of the tensor.
        """
        if self._stored is not None:
            self._found[info.name].add(start, data.data)

    def jobs(self) -> Iterator[Job]:
        """Yield a function that computes the SHA-256 of the whole file, which `problems` needs.

        The function keeps the SHA-256 in this object, and returns the number of bytes that it read.
        Nothing is yielded if the Hugging Face Hub's SHA-256 of the file is not known, because
        `problems` then compares no SHA-256.
        """
        if self.hub_hash is not None:
            yield self._read_whole

    def _read_whole(self) -> int:
        self._hash = sha256_of(self.part.path)
        return self.part.size

    def problems(self) -> Iterator[Problem]:
        """Yield a `Problem` for each known checksum that the data of the file does not match.

        Known checksums are those that are stored in the file, and the file's SHA-256 if the file is
        in the cache of the Hugging Face Hub. If the stored checksums are unusable, a `Problem` says
        so.

        Two steps must come first, because they compute the checksums of the data:

        - Pass the data of all tensors to `add`.
        - Call the function that `jobs` yields. It computes the SHA-256 of the file. If `jobs`
          yields nothing, no SHA-256 is needed.
        """
        part = self.part
        if self.refused is not None:
            yield Problem(self.refused, str(part.path))
        if self.hub_hash is not None and self._hash != self.hub_hash:
            yield Problem(
                f"{part.path}: the file differs from the one on the Hub (SHA-256 {self._hash}): "
                f"remove the file and pull it again",
                str(part.path),
            )
        if self._stored is None:
            return
        if header_checksum(part) != self._stored[""][0]:
            yield Problem(
                f"{part.path}: the header is damaged: its checksum differs", str(part.path)
            )
        for info in part.tensors.values():
            pairs = zip(self._stored[info.name], self._found[info.name].values(), strict=True)
            bad = [index for index, (expected, found) in enumerate(pairs) if expected != found]
            if bad:
                yield _damaged(part, info, bad)


def _damaged(part: GGUFFile, info: TensorInfo, bad: list[int]) -> Problem:
    if n_slices(info.shape) == 1 or parse_expert_name(info.name) is None:
        return problem_at(part, info, "damaged: its checksum differs")
    more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
    where = info._replace(offset=info.offset + bad[0] * (info.nbytes // info.shape[2]))
    return problem_at(part, where, f"expert {bad[0]} is damaged{more}: its checksum differs")


def _hub_hash(path: Path) -> str | None:
    """Return the SHA-256 in the name of a file in huggingface_hub's cache.

    Return None for files that the cache does not name by their SHA-256.
    """
    try:
        blob = path.resolve(strict=True)
    except OSError:
        return None
    named = blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name)
    return blob.name if named else None
