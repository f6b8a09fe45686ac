"""How the next token is chosen from the logits, and which texts end an answer.

The only declaration of these settings: Config takes its fields from here, and so do front ends that
have them per request.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.settings import Settings, setting


@dataclass(frozen=True)
class Sampling(Settings):
    """One answer's sampling.

    temp 0 takes the most likely token. Otherwise a token is drawn from those that top_k, top_p
    and min_p leave, in this order, with the logits divided by temp, as llama.cpp does. seed None
    draws differently each time. An answer ends before the first of the texts in stop.
    """

    temp: float = setting(
        0.7, "Temperature; 0 takes the likeliest.", metavar="T", within=(0.0, 100.0), answer=True
    )
    top_k: int = setting(
        40, "Draw from the N likeliest tokens; 0 for all.", within=(0, 2**31 - 1), answer=True
    )
    top_p: float = setting(0.95, "Nucleus sampling.", metavar="P", within=(0.0, 1.0), answer=True)
    min_p: float = setting(
        0.0,
        "Leave out tokens of less than P times the likeliest one's probability.",
        metavar="P",
        within=(0.0, 1.0),
        answer=True,
    )
    seed: int | None = setting(
        None, "Makes the sampling repeatable.", within=(0, 2**32 - 1), answer=True
    )
    stop: tuple[str, ...] = setting(
        (),
        "A text that ends the answer and is left out of it; may be repeated.",
        metavar="TEXT",
        answer=True,
        repeated=True,
    )

    @property
    def greedy(self) -> bool:
        return self.temp <= 0.0

    def start_seed(self) -> int:
        """The seed to use: the given one, or a fresh one."""
        return self.seed if self.seed is not None else secrets.randbits(32)


class StopTexts:
    """Finds where a streamed text has to end. found: whether one of the stop texts came."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.found = False

    def feed(self, piece: str) -> str:
        """What may be shown once `piece` came: all but what could begin a stop text, or, where
        one came, all before it."""
        text = self._held + piece
        self._held = ""
        ends = [at for at in (text.find(each) for each in self._stop) if at >= 0]
        if ends:
            self.found = True
            return text[: min(ends)]
        most = max((len(each) for each in self._stop), default=1) - 1
        for length in range(min(most, len(text)), 0, -1):
            if any(each.startswith(text[-length:]) for each in self._stop):
                self._held = text[-length:]
                return text[:-length]
        return text

    def rest(self) -> str:
        """What was held back and began no stop text after all."""
        text, self._held = self._held, ""
        return text
