"""Scoring of text and multiple-choice questions by log-likelihood.

Judge yields the logits of given tokens. Text is scored by perplexity and by KL divergence from the
best tier; questions are scored as in lm_eval.

By default, each token is a decode step of its own. A policy decision for a prefill batch depends on
later tokens of the batch, so it would be unfair to score a token with it. Tokens before the scored
ones may be read as a prompt, as in a chat.

- acc: the choice with the highest log-likelihood counts as the answer.
- acc_norm: the same, with each log-likelihood divided by the choice's length in characters.
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
    """Computes the logits that one model assigns to given tokens.

    With prefill=True, all tokens are read as prompts (prefill steps). The runtime must then have
    been opened with logits_all.
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
        """Yield the logits float32 [n_vocab] that predict each token from tokens[first] on.

        Each prediction uses all tokens before it. With prompt=True, the tokens before `first` are
        read as a prompt. Otherwise each token is a decode step. A yielded array is valid until the
        next one.
        """
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
        """Compute how likely the model continues `context` with exactly these tokens.

        Returns a pair. The first value has the log-probability of each token, float64
        [len(tokens)]. The second value is True if each token is the model's most likely next token.

        The context is read as a prompt. If it is too long, its oldest tokens are dropped.
        """
        n_free = self.evaluator.n_ctx - len(tokens)
        kept = list(context)[-max(1, n_free) :]
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
        """Forget the tokens of the previous call, so that the next call evaluates all its tokens.

        Call this after other code has used the same evaluator.
        """
        self._next = None
        self._read = []

    def _prompt_rows(self, tokens: Sequence[int], first: int) -> Iterator[np.ndarray]:
        """Yield the logits of the tokens from index `first` on. All tokens are read as a prompt.

        The logits are computed in parts, because those of all tokens may need more memory than the
        model.
        """
        for part in self.evaluator.eval_each(tokens, 0, Phase.PREFILL):
            yield from part[first:]
            first = max(0, first - len(part))

    def _decode_rows(self, context: list[int], tokens: Sequence[int]) -> Iterator[np.ndarray]:
        if self._next is None or context != self._context:
            self.forget()
            # Read the last prompt token in a decode step, as an answer does. The policy's work at
            # the end of a prompt comes before it.
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
    """A file with the log-probabilities of a reference model, float32 [n_tokens, n_vocab].

    Other models are compared with it. Free it with close or `with`.
    """

    def __init__(self, n_tokens: int, n_vocab: int, path: Path | None = None) -> None:
        """Create the file, or open a file that already has the values.

        - path: an existing file, either with the values or empty. None creates a temporary file.

        Raises ConfigError if the folder has too little free space.
        """
        needed = 4 * n_tokens * n_vocab
        folder = tempfile.gettempdir() if path is None else str(path.parent)
        free = shutil.disk_usage(folder).free
        known = 0 if path is None else path.stat().st_size
        if needed > free + known:
            smaller = "use a smaller --max-tokens"
            if path is not None:
                smaller = "run `moe-edge calibrate` with a smaller --calib-tokens"
            raise ConfigError(
                f"{folder} has too little free space to compare {n_tokens} tokens with the best "
                f"precision: {format_size(needed)} needed, {format_size(free)} free. Free some "
                f"space, or {smaller}"
            )
        self._file = tempfile.TemporaryFile() if path is None else path.open("r+b")  # noqa: SIM115
        self._file.truncate(needed)
        shape = (n_tokens, n_vocab)
        self.rows: np.ndarray = np.memmap(self._file, np.float32, "r+", shape=shape)
        self._places: np.ndarray | None = None

    def part(self, places: np.ndarray) -> Reference:
        """Return a view of this file that has the log-probabilities of only some tokens.

        The view is valid until this object is closed.

        - places: positions of these n tokens in this file, int [n]. Token i of the view is token
          places[i] of the file.
        """
        other = copy(self)
        other._places = places
        return other

    def row(self, at: int) -> np.ndarray:
        """Return the log-probabilities that predict the token at this position, float32 [n_vocab].

        The array is a view of the file.
        """
        return np.asarray(self.rows[at if self._places is None else self._places[at]])

    def close(self) -> None:
        """Close the file. A temporary file is deleted. A second call has no effect."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class TextScores:
    """Scores of the n scored tokens of a text, in the order of the text.

    - nll float64 [n]: negative log-likelihoods in nats.
    - kl float64 [n]: KL divergence from a reference model in nats; empty without a reference.
    - agrees float64 [n]: 1 if the most likely token is that of the reference, else 0; empty without
      a reference.
    - domains int [n]: the domain (label) of each token, as an index into `names`.
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
        """Return the perplexity of each domain of the text; {} if the text has only one domain."""
        if len(self.names) < 2:
            return {}
        return {
            name: arithmetic.perplexity(self.nll[self.domains == index])
            for index, name in enumerate(self.names)
        }

    def part(self, places: np.ndarray) -> TextScores:
        """Return the scores of a selection of the n scored tokens.

        - places: indices of the selected tokens among the n tokens, int [m].
        """
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
    """Let a model read a text, and return scores of its tokens, such as their log-likelihoods.

    - judge: computes the model's logits.
    - windows: the pieces of the text. In each window, the tokens from index `window.first` on are
      scored.
    - keep: a file to which the model's log-probabilities are written.
    - against: a file with the log-probabilities of a reference model. If given, the scores also
      compare the two models, for example by KL divergence.
    - progress: a function that receives the completed fraction after each window.
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
    """A multiple-choice question.

    `prompt` is the text before the choice, including any context. `answer` is the index of the
    correct choice.
    """

    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class ChoiceScores:
    """Scores of multiple-choice questions, each bool [n_questions].

    - right: whether the most likely choice is correct (accuracy "acc").
    - right_norm: whether the choice that is most likely per character is correct ("acc_norm").
    """

    right: np.ndarray
    right_norm: np.ndarray

    @property
    def acc(self) -> Estimate:
        return arithmetic.mean(self.right.astype(np.float64))

    @property
    def acc_norm(self) -> Estimate:
        return arithmetic.mean(self.right_norm.astype(np.float64))


def read_questions(path: Path) -> list[Question]:
    """Read questions from a file of JSON lines {"question", "choices", "answer"}.

    An optional "context" is put before the question, separated by a blank line. "answer" is an
    index from 0 or a letter from A. Raises ConfigError with the line number of an invalid record.
    """
    questions = [_question(path, number, record) for number, record in json_lines(path)]
    if not questions:
        raise ConfigError(f"{path} holds no questions: it needs one JSON object per line")
    return questions


def _question(path: Path, number: int, record: dict[str, Any]) -> Question:
    where = f"{path} line {number}"
    text, choices, context = record.get("question"), record.get("choices"), record.get("context")
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f'{where} needs a "question" that is a non-empty string')
    if context is not None and not isinstance(context, str):
        raise ConfigError(f'{where}: "context" must be a string')
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(each, str) and each for each in choices)
    ):
        raise ConfigError(f'{where} needs "choices": a list of at least two non-empty strings')
    answer = record.get("answer")
    if isinstance(answer, str):
        letter = answer.strip().upper()
        answer = ord(letter) - ord("A") if len(letter) == 1 else None
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise ConfigError(
            f'{where}: "answer" must be an index below {len(choices)} or the letter of a choice'
        )
    prompt = f"{context}\n\n{text}" if context else text
    return Question(prompt, tuple(choices), answer)


def score_choices(
    judge: Judge,
    questions: Sequence[Question],
    progress: Callable[[float], None] = lambda share: None,
) -> ChoiceScores:
    """Answer multiple-choice questions with a model, and return which answers are correct.

    Raises ConfigError for a choice that has no tokens.
    """
    right, right_norm = [], []
    for number, question in enumerate(questions, 1):
        # No space is inserted after a prompt that ends in whitespace, such as that of a chat
        # template.
        space = "" if question.prompt[-1].isspace() else " "
        logp = []
        for choice in question.choices:
            # Tokenize prompt and choice together, because a choice alone may get other tokens.
            n = len(judge.evaluator.tokenize(question.prompt))
            whole = judge.evaluator.tokenize(question.prompt + space + choice)
            context, tokens = whole[:n], whole[n:]
            if not context or not tokens:
                raise ConfigError(
                    f"question {number}: the prompt with the choice '{choice}' has no more tokens "
                    f"than the prompt alone: use another choice"
                )
            logp.append(float(judge.continuation(context, tokens)[0].sum()))
        lengths = [len(choice) for choice in question.choices]
        right.append(np.argmax(logp) == question.answer)
        right_norm.append(np.argmax(np.divide(logp, lengths)) == question.answer)
        progress(number / len(questions))
    return ChoiceScores(np.array(right), np.array(right_norm))
