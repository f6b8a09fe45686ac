"""The report that pack, export and convert return."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class PackReport:
    """Summary of a model file that pack, export or convert has written.

    path, nbytes: the file and its size.
    tiers: (name, bits per weight, bytes of all experts) of each precision, the best first.
    fallbacks: notes on matrices that could not get the type of their precision.
    warnings: other notes for the user.
    """

    path: Path
    nbytes: int
    tiers: list[tuple[str, float, int]]
    fallbacks: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0
