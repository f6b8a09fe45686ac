"""What a model says to given tokens: decided token by token, or as a prompt at once.

A prefill decision sees the tokens that come after the one it is for, so quality is judged by
decode decisions; the other form stands beside it. What stands before the tokens that are judged may
be read as a prompt, as in a chat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from orchestrator.engine.engine import Engine
from orchestrator.engine.texts import log_softmax
from orchestrator.events import Phase


class Judge:
    """One engine, asked for the probabilities of tokens that are given.

    prefill needs an engine that was opened with logits_all.
    """

    def __init__(self, engine: Engine, prefill: bool = False) -> None:
        self.engine = engine
        self.prefill = prefill
        self._read: list[int] = []
        self._context: list[int] = []
        self._next: np.ndarray | None = None

    def rows(
        self, tokens: Sequence[int], first: int = 1, prompt: bool = False
    ) -> Iterator[np.ndarray]:
        """Logits float32 [n_vocab] that predict tokens[first], tokens[first + 1], ..., each by
        all tokens before it, and valid until the next. prompt: the tokens before `first` are read
        as a prompt. Without one all are decided token by token, and what the last call read of the
        beginning is not read again."""
        if prompt and not self.prefill:
            self.forget()
            yield from self._decode_rows(list(tokens[:first]), tokens[first:])
            return
        known = 0
        while known < min(first - 1, len(self._read)) and tokens[known] == self._read[known]:
            known += 1
        self.forget()
        if self.prefill:
            yield from self._prompt_rows(tokens[:-1], first - 1)
            return
        self._read = list(tokens[:known])
        for position in range(known, len(tokens) - 1):
            row = self._decoded(tokens[position], position)
            self._read.append(tokens[position])
            if position >= first - 1:
                yield row

    def continuation(
        self, context: Sequence[int], tokens: Sequence[int]
    ) -> tuple[np.ndarray, bool]:
        """(log-probabilities float64 [n] of n tokens behind a context, whether each of them is
        the likeliest). The context is read as a prompt, and the oldest tokens of one that is too
        long are dropped. A context that was the last call's too is not evaluated again.
        """
        room = self.engine.n_ctx - len(tokens)
        kept = list(context)[-max(1, room) :]
        if self.prefill:
            rows = self._prompt_rows([*kept, *tokens[:-1]], len(kept) - 1)
        else:
            rows = self._decode_rows(kept, tokens)
        found, likeliest = np.empty(len(tokens)), True
        for at, (token, row) in enumerate(zip(tokens, rows, strict=True)):
            logp = log_softmax(row)
            found[at] = logp[token]
            likeliest &= bool(logp.argmax() == token)
        return found, likeliest

    def forget(self) -> None:
        """After somebody else used the engine: everything is read again."""
        self._next = None
        self._read = []

    def _prompt_rows(self, tokens: Sequence[int], first: int) -> Iterator[np.ndarray]:
        """Logits of the tokens from `first` on, where all are read as a prompt: as many as a
        window has would take more memory than many a model, so that they stay where they are."""
        for part in self.engine.eval_each(tokens, 0, Phase.PREFILL):
            yield from part[first:]
            first = max(0, first - len(part))

    def _decode_rows(self, context: list[int], tokens: Sequence[int]) -> Iterator[np.ndarray]:
        if self._next is None or context != self._context:
            self.forget()
            self._context, self._next = context, self._behind_prompt(context)
        yield self._next
        for offset, token in enumerate(tokens[:-1]):
            yield self._decoded(token, len(context) + offset)

    def _behind_prompt(self, prompt: Sequence[int]) -> np.ndarray:
        """Logits float32 [n_vocab] behind a prompt, whose last token is decoded as an answer's are:
        what a policy does behind a prompt, it does before that."""
        last = len(prompt) - 1
        if last:
            self.engine.eval(prompt[:last], 0, phase=Phase.PREFILL)
        return self._decoded(prompt[last], last)

    def _decoded(self, token: int, position: int) -> np.ndarray:
        row: np.ndarray = self.engine.eval([token], position, phase=Phase.DECODE)[-1]
        return row
