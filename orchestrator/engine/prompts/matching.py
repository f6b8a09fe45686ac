"""How much of a prompt a kept sequence holds, by tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Vocabulary(Protocol):
    """What of a model's vocabulary is needed: orchestrator.native.llama.Model."""

    def piece(self, token: int, special: bool = False) -> bytes: ...

    def is_control(self, token: int) -> bool: ...

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]: ...


def common_prefix(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """How many tokens both begin with."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(np.asarray(a[:n], np.int64) != np.asarray(b[:n], np.int64))
    return int(differs[0]) if len(differs) else n


def as_held(prompt: Sequence[int], held: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """The prompt with the tokens of `held` wherever both stand for the same text.

    A model often answers in other tokens than its tokenizer makes of the answer's text, so that the
    next prompt would differ from what was read. Texts are compared between control tokens, where no
    token crosses.
    """
    whole = list(prompt)
    done = common_prefix(whole, held)
    at = done
    while done < len(whole) and at < len(held):
        if whole[done] == held[at]:
            done, at = done + 1, at + 1
            continue
        end, held_end = _span(whole, done, vocabulary), _span(held, at, vocabulary)
        text = _text(whole[done:end], vocabulary)
        held_text = _text(held[at:held_end], vocabulary)
        rest: list[int] | None = []
        if text != held_text:
            # The last token of an answer may not have been read, where the sequence ends.
            starts = held_end == len(held) and held_text and text.startswith(held_text)
            rest = _exact_tokens(text[len(held_text) :], vocabulary) if starts else None
        if rest is None or held_end == at:
            break
        whole[done:end] = [*held[at:held_end], *rest]
        done += held_end - at
        at = held_end
    return whole


def _span(tokens: Sequence[int], start: int, vocabulary: Vocabulary) -> int:
    """Where the text ends that begins at start: at the next control token."""
    for i in range(start, len(tokens)):
        if vocabulary.is_control(tokens[i]):
            return i
    return len(tokens)


def _text(tokens: Sequence[int], vocabulary: Vocabulary) -> bytes:
    return b"".join(vocabulary.piece(token, True) for token in tokens)


def _exact_tokens(text: bytes, vocabulary: Vocabulary) -> list[int] | None:
    """Tokens that stand for exactly this text; None where the tokenizer makes no such."""
    try:
        tokens = vocabulary.tokenize(text.decode(), add_special=False, parse_special=False)
    except UnicodeDecodeError:
        return None
    return tokens if _text(tokens, vocabulary) == text else None
