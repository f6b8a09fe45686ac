"""Multiple choice by log-likelihood, as lm_eval scores it.

acc: the choice with the highest log-likelihood is the answer. acc_norm: the same with each
log-likelihood divided by the choice's length in characters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.errors import ConfigError
from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import Estimate
from orchestrator.lab.eval.judge import Judge
from orchestrator.lab.eval.text import json_lines


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
            n = len(judge.engine.tokenize(question.prompt))
            whole = judge.engine.tokenize(question.prompt + space + choice)
            context, tokens = whole[:n], whole[n:]
            if not context or not tokens:
                raise ConfigError(f"question {number}: '{choice}' has no token of its own")
            logp.append(float(judge.continuation(context, tokens)[0].sum()))
        lengths = [len(choice) for choice in question.choices]
        right.append(np.argmax(logp) == question.answer)
        right_norm.append(np.argmax(np.divide(logp, lengths)) == question.answer)
        progress(number / len(questions))
    return ChoiceScores(np.array(right), np.array(right_norm))
