"""What one child process is told to measure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Job:
    """What to measure. settings: of PlainModel ("upstream") or Config ("engine").

    warm: read every expert before the first token. routing: also count expert use.
    """

    system: str
    model: str
    low: str | None
    settings: dict[str, Any]
    n_ctx: int
    n_ubatch: int
    threads: int
    prompt_tokens: int
    warmup: int
    tokens: int
    max_seconds: float
    seed: int
    warm: bool = False
    routing: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))
