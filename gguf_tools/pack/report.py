"""The report that pack, export and convert return."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class PackReport:
    """Summary of a file written by pack, export or convert.

    path, nbytes: the file and its size.
    tiers: name, bits per weight and bytes of all experts for each tier, the best first.
    fallbacks: notes on matrices that have another type than their tier.
    warnings: other notes for the user.
    """

    path: Path
    nbytes: int
    tiers: list[tuple[str, float, int]]
    fallbacks: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0
