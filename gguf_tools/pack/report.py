"""What ``pack``, ``export`` and ``convert`` have written."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class PackReport:
    """What was written. ``tiers``: (name, bits per weight, bytes of all experts), best
    first. ``fallbacks`` and ``warnings`` are sentences for the user."""

    path: Path
    nbytes: int
    tiers: list[tuple[str, float, int]]
    fallbacks: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0
