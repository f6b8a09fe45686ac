"""How the next token is chosen from the logits."""

from __future__ import annotations

import secrets
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """temp 0 takes the most likely token; otherwise the logits are divided by temp and a
    token is drawn from the smallest set whose probability reaches top_p, of the top_k likeliest
    (0: of all), without those less likely than min_p times the likeliest. seed None draws
    differently each time."""

    temp: float = 0.7
    top_p: float = 0.95
    seed: int | None = None
    top_k: int = 40
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.temp <= 0.0

    def start_seed(self) -> int:
        """The seed to use: the given one, or a fresh one."""
        return self.seed if self.seed is not None else secrets.randbits(32)
