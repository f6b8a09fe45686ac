"""Findings of ``verify``, each a sentence, and the report that holds them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gguf_tools.file.parse import TensorInfo
from gguf_tools.file.reader import GGUFFile


class Problem(NamedTuple):
    """One finding: a sentence that starts with the file, and the place where there is one.

    offset counts bytes from the start of the file, block from the start of the tensor.
    """

    text: str
    file: str
    tensor: str | None = None
    offset: int | None = None
    block: int | None = None


@dataclass(slots=True)
class VerifyReport:
    """What was looked at, and what was found. ``nbytes`` counts the tensor data checked.

    ``unchecked`` are files without checksums, where damage that leaves every block finite stays
    unseen. ``no_experts`` says that the file is of a model without experts, which is no damage;
    empty for a Mixture-of-Experts model."""

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
        """The report ready for JSON. Sizes are bytes."""
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
    where = f"{part.path}: tensor {info.name}: offset {info.offset}"
    return Problem(f"{where}: {text}", str(part.path), info.name, info.offset)
