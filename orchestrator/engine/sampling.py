"""What follows the logits: their logarithms of probability, and which texts end an answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities float64 [..., n_vocab] of logits of the same shape."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


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
