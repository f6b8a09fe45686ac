"""The checksums of a model's files, against their bytes.

A packed file brings its own. One from the Hugging Face Hub lies in huggingface_hub's cache under
its SHA-256. Any other GGUF has none, and damage that leaves every block finite stays unseen there.
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
    """What one file must hold, and what was found in it so far."""

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
        """Whether all of the file can be checked."""
        return self._stored is not None or self.hub_hash is not None

    def add(self, info: TensorInfo, start: int, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Counts bytes of a tensor, from byte ``start`` of it on."""
        if self._stored is not None:
            self._found[info.name].add(start, data.data)

    def jobs(self) -> Iterator[Job]:
        """What is to be read beside the tensors."""
        if self.hub_hash is not None:
            yield self._read_whole

    def _read_whole(self) -> int:
        self._hash = sha256_of(self.part.path)
        return self.part.size

    def problems(self) -> Iterator[Problem]:
        """What is not as it was written, when all has been added."""
        part = self.part
        if self.refused is not None:
            yield Problem(self.refused, str(part.path))
        if self.hub_hash is not None and self._hash != self.hub_hash:
            yield Problem(
                f"{part.path}: not what the Hub sent: its SHA-256 is {self._hash}: remove the file "
                f"and pull it again",
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
            bad = [index for index, (told, found) in enumerate(pairs) if told != found]
            if bad:
                yield _damaged(part, info, bad)


def _damaged(part: GGUFFile, info: TensorInfo, bad: list[int]) -> Problem:
    if n_slices(info.shape) == 1 or parse_expert_name(info.name) is None:
        return problem_at(part, info, "damaged: its checksum differs")
    more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
    where = info._replace(offset=info.offset + bad[0] * (info.nbytes // info.shape[2]))
    return problem_at(part, where, f"expert {bad[0]} is damaged{more}: its checksum differs")


def _hub_hash(path: Path) -> str | None:
    """The SHA-256 that the Hub gave a file in huggingface_hub's cache, None elsewhere."""
    try:
        blob = path.resolve(strict=True)
    except OSError:
        return None
    named = blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name)
    return blob.name if named else None
