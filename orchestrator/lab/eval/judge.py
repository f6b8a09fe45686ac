"""What a model says to given tokens: decided token by token, or as a prompt at once; how well it
predicts a text, and how far from the best tier it is; and multiple choice by log-likelihood, as
lm_eval scores it.

A prefill decision sees the tokens that come after the one it is for, so quality is judged by
decode decisions; the other form stands beside it. What stands before the tokens that are judged may
be read as a prompt, as in a chat.

acc: the choice with the highest log-likelihood is the answer. acc_norm: the same with each
log-likelihood divided by the choice's length in characters.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.closing import Closing
from gguf_tools.units import format_size
from orchestrator.errors import ConfigError
from orchestrator.events import Phase
from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import Estimate
from orchestrator.lab.eval.text import Window, json_lines
from orchestrator.runtime.evaluator import Evaluator, log_softmax


class Judge:
    """Asks one model for the probabilities of given tokens.

    prefill: read everything as a prompt, which needs a model that was loaded with logits_all.
    """

    def __init__(self, evaluator: Evaluator, prefill: bool = False) -> None:
        self.evaluator = evaluator
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
        room = self.evaluator.n_ctx - len(tokens)
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
        """Read everything again, after something else used the evaluator."""
        self._next = None
        self._read = []

    def _prompt_rows(self, tokens: Sequence[int], first: int) -> Iterator[np.ndarray]:
        """Logits of the tokens from `first` on, where all are read as a prompt: as many as a
        window has would take more memory than many a model, so that they stay where they are."""
        for part in self.evaluator.eval_each(tokens, 0, Phase.PREFILL):
            yield from part[first:]
            first = max(0, first - len(part))

    def _decode_rows(self, context: list[int], tokens: Sequence[int]) -> Iterator[np.ndarray]:
        if self._next is None or context != self._context:
            self.forget()
            # The last token of a prompt is decoded as an answer's are: what a policy does behind a
            # prompt, it does before that.
            last = len(context) - 1
            if last:
                self.evaluator.eval(context[:last], 0, phase=Phase.PREFILL)
            self._context, self._next = context, self._decoded(context[last], last)
        yield self._next
        for offset, token in enumerate(tokens[:-1]):
            yield self._decoded(token, len(context) + offset)

    def _decoded(self, token: int, position: int) -> np.ndarray:
        row: np.ndarray = self.evaluator.eval([token], position, phase=Phase.DECODE)[-1]
        return row


class Reference(Closing):
    """Log-probabilities float32 [n_tokens, n_vocab] in a file; free it with close or `with`."""

    def __init__(self, n_tokens: int, n_vocab: int, path: Path | None = None) -> None:
        """path: an empty file, or one that has them already; None for a temporary one. Raises
        ConfigError where the folder has no room for it."""
        needed = 4 * n_tokens * n_vocab
        folder = tempfile.gettempdir() if path is None else str(path.parent)
        free = shutil.disk_usage(folder).free
        known = 0 if path is None else path.stat().st_size
        if needed > free + known:
            raise ConfigError(
                f"comparing {n_tokens} tokens with the best tier takes {format_size(needed)} in "
                f"{folder}, where {format_size(free)} are free: lower --max-tokens"
            )
        self._file = tempfile.TemporaryFile() if path is None else path.open("r+b")  # noqa: SIM115
        self._file.truncate(needed)
        shape = (n_tokens, n_vocab)
        self.rows: np.ndarray = np.memmap(self._file, np.float32, "r+", shape=shape)
        self._places: np.ndarray | None = None

    def part(self, places: np.ndarray) -> Reference:
        """Some of the tokens, as if they were all: places int [n], where each stands. Lives as long
        as the whole."""
        other = copy(self)
        other._places = places
        return other

    def row(self, at: int) -> np.ndarray:
        """float32 [n_vocab], a view: the log-probabilities of one token's prediction."""
        return np.asarray(self.rows[at if self._places is None else self._places[at]])

    def close(self) -> None:
        """Frees the file; safe to call twice."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class TextScores:
    """One pass over a text of n scored tokens, in the text's order.

    nll float64 [n]: negative log-likelihoods in nats. kl, agrees float64 [n]: KL divergence from
    the reference, and 1 where the likeliest token is its one, else 0; [0] without a reference.
    domains: each token's domain, an index into names.
    """

    nll: np.ndarray
    kl: np.ndarray
    agrees: np.ndarray
    domains: np.ndarray
    names: tuple[str, ...]

    @property
    def perplexity(self) -> Estimate:
        return arithmetic.perplexity(self.nll)

    def by_domain(self) -> dict[str, Estimate]:
        """The perplexity of each domain, where the text has several."""
        if len(self.names) < 2:
            return {}
        return {
            name: arithmetic.perplexity(self.nll[self.domains == index])
            for index, name in enumerate(self.names)
        }

    def part(self, places: np.ndarray) -> TextScores:
        """The scores of some of the tokens. places int [m]."""
        return replace(
            self,
            nll=self.nll[places],
            kl=self.kl[places],
            agrees=self.agrees[places],
            domains=self.domains[places],
        )


def score_text(
    judge: Judge,
    windows: Sequence[Window],
    *,
    keep: Reference | None = None,
    against: Reference | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> TextScores:
    """Scores the windows' tokens from each one's first scored token on.

    keep: filled with this model's own log-probabilities; against: what to compare with.
    """
    total = sum(window.n_scored for window in windows)
    nll = np.empty(total)
    kl, agrees = np.empty((2, total if against is not None else 0))
    names = tuple(dict.fromkeys(window.domain for window in windows))
    places = [names.index(window.domain) for window in windows]
    domains = np.repeat(places, [window.n_scored for window in windows])
    at = 0
    for window in windows:
        rows = judge.rows(window.tokens, window.first, window.prompt)
        for target, logits in zip(window.tokens[window.first :], rows, strict=True):
            logp = log_softmax(logits)
            nll[at] = -logp[target]
            if keep is not None:
                keep.rows[at] = logp
            if against is not None:
                row = against.row(at).astype(np.float64)
                kl[at] = arithmetic.kl_divergence(row, logp)
                agrees[at] = row.argmax() == logp.argmax()
            at += 1
        progress(at / total)
    return TextScores(nll, kl, agrees, domains, names)


@dataclass(frozen=True, slots=True)
class Question:
    """prompt: what stands before a choice, context included. answer: index of the right one."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class ChoiceScores:
    """right and right_norm bool [n_questions]: whether acc and acc_norm count the question."""

    right: np.ndarray
    right_norm: np.ndarray

    @property
    def acc(self) -> Estimate:
        return arithmetic.mean(self.right.astype(np.float64))

    @property
    def acc_norm(self) -> Estimate:
        return arithmetic.mean(self.right_norm.astype(np.float64))


def read_questions(path: Path) -> list[Question]:
    """Questions of JSON lines {"question", "choices", "answer"} and optionally "context", which
    stands before the question on lines of its own. answer is an index from 0 or a letter from A.
    Raises ConfigError for a record that is no question, naming its line."""
    questions = [_question(path, number, record) for number, record in json_lines(path)]
    if not questions:
        raise ConfigError(f"{path} holds no questions, one JSON object a line")
    return questions


def _question(path: Path, number: int, record: dict[str, Any]) -> Question:
    where = f"{path} line {number}"
    text, choices, context = record.get("question"), record.get("choices"), record.get("context")
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f'{where} has no "question" that is a text')
    if context is not None and not isinstance(context, str):
        raise ConfigError(f'{where}: "context" is not a text')
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(each, str) and each for each in choices)
    ):
        raise ConfigError(f'{where} has no "choices", a list of two texts or more')
    answer = record.get("answer")
    if isinstance(answer, str):
        letter = answer.strip().upper()
        answer = ord(letter) - ord("A") if len(letter) == 1 else None
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise ConfigError(
            f'{where}: "answer" is neither an index below {len(choices)} nor a letter of a choice'
        )
    prompt = f"{context}\n\n{text}" if context else text
    return Question(prompt, tuple(choices), answer)


def score_choices(
    judge: Judge,
    questions: Sequence[Question],
    progress: Callable[[float], None] = lambda share: None,
) -> ChoiceScores:
    """Answers every question. Raises ConfigError for a choice that is no token of its own."""
    right, right_norm = [], []
    for number, question in enumerate(questions, 1):
        # A prompt that ends in a line break, as a chat template's does, wants no space.
        space = "" if question.prompt[-1].isspace() else " "
        logp = []
        for choice in question.choices:
            # The choice's tokens are cut out of those of both together.
            n = len(judge.evaluator.tokenize(question.prompt))
            whole = judge.evaluator.tokenize(question.prompt + space + choice)
            context, tokens = whole[:n], whole[n:]
            if not context or not tokens:
                raise ConfigError(f"question {number}: '{choice}' has no token of its own")
            logp.append(float(judge.continuation(context, tokens)[0].sum()))
        lengths = [len(choice) for choice in question.choices]
        right.append(np.argmax(logp) == question.answer)
        right_norm.append(np.argmax(np.divide(logp, lengths)) == question.answer)
        progress(number / len(questions))
    return ChoiceScores(np.array(right), np.array(right_norm))
