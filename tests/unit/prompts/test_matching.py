"""How much of a prompt a kept sequence holds, whatever tokens it was read in."""

import pytest

from orchestrator.engine.prompt_copies import common_prefix
from orchestrator.engine.prompts import as_held

BEGIN, END = 1, 2


class Letters:
    """Tokens below 256 are letters, 256 + n the first n letters of the alphabet; the tokenizer
    takes the longest one that fits. 1 and 2 are control tokens."""

    def piece(self, token: int, special: bool = False) -> bytes:
        if self.is_control(token):
            return b"<%d>" % token if special else b""
        return b"abcdefghijkl"[: token - 256] if token >= 256 else bytes([token])

    def is_control(self, token: int) -> bool:
        return token in (BEGIN, END)

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        assert not add_special and not parse_special
        data, tokens = text.encode(), []
        while data:
            n = next((n for n in range(12, 1, -1) if data.startswith(self.piece(256 + n))), 1)
            tokens.append(256 + n if n > 1 else data[0])
            data = data[n:]
        return tokens


LETTERS = Letters()


def of(text: str) -> list[int]:
    """One token a letter; < and > are the control tokens."""
    return [{"<": BEGIN, ">": END}.get(each, ord(each)) for each in text]


@pytest.mark.parametrize(
    ("a", "b", "n"),
    [([], [1], 0), ([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 3], 2), ([5], [6], 0)],
)
def test_common_prefix(a: list[int], b: list[int], n: int) -> None:
    assert common_prefix(a, b) == n


def test_an_answer_keeps_the_tokens_that_it_was_given_in() -> None:
    held = [*of("<who>"), *of("<abcd>"), *of("<x")]
    prompt = [*of("<who>"), BEGIN, 260, END, *of("<xyz>")]
    assert as_held(prompt, held, LETTERS) == of("<who><abcd><xyz>")


def test_the_last_token_of_an_answer_may_not_have_been_read() -> None:
    held = [*of("<who><ab")]
    prompt = [*of("<who>"), BEGIN, 260, END, *of("<more>")]
    assert as_held(prompt, held, LETTERS) == of("<who><abcd><more>")


def test_another_text_stays_as_it_is() -> None:
    prompt = [*of("<who>"), BEGIN, 260, END]
    for held in (of("<who><abce>"), of("<who><x"), of("<who><abcdef"), of("<what>"), []):
        assert as_held(prompt, held, LETTERS) == prompt


def test_texts_are_not_compared_across_control_tokens() -> None:
    held = [BEGIN, *of("ab"), END, *of("cd")]
    prompt = [BEGIN, 260, END]
    assert as_held(prompt, held, LETTERS) == prompt
