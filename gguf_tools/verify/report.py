"""The report of `verify` and its problems."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gguf_tools.file.parse import TensorInfo
from gguf_tools.file.reader import GGUFFile


class Problem(NamedTuple):
    """A problem found in a file. The text is a sentence that starts with the file name.

    offset: byte offset in the file.
    block: number of the quantization block in the tensor.
    """

    text: str
    file: str
    tensor: str | None = None
    offset: int | None = None
    block: int | None = None


@dataclass(slots=True)
class VerifyReport:
    """The result of verifying a model: what was checked and which problems were found.

    files, tiers: the model's files and the names of its precisions.
    n_tensors, n_blocks, nbytes: amount of tensor data that was checked.
    unchecked: files without checksums, in which not all damage can be detected.
    no_experts: a note if the model has no experts, which is not a problem. Otherwise empty.
    """

    files: list[Path]
    tiers: list[str]
    n_tensors: int = 0
    n_blocks: int = 0
    nbytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    seconds: float = 0.0
    unchecked: list[Path] = field(default_factory=list)
    no_experts: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dict. Sizes are in bytes."""
        return {
            "ok": not self.problems,
            "files": [str(path) for path in self.files],
            "tiers": self.tiers,
            "tensors": self.n_tensors,
            "blocks": self.n_blocks,
            "checked_bytes": self.nbytes,
            "without_checksums": [str(path) for path in self.unchecked],
            "seconds": round(self.seconds, 3),
            "problems": [problem._asdict() for problem in self.problems],
        }


def problem_at(part: GGUFFile, info: TensorInfo, text: str) -> Problem:
    """Return a `Problem` of a tensor. Its text starts with the names of the file and the tensor.

    part: the file.
    text: the end of the problem's text, which describes the problem.
    """
    where = f"{part.path}: tensor {info.name}: offset {info.offset}"
    return Problem(f"{where}: {text}", str(part.path), info.name, info.offset)
