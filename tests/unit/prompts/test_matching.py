"""How much of a prompt a kept sequence holds, whatever tokens it was read in."""

import pytest

from orchestrator.engine.prompt_copies import common_prefix
from orchestrator.engine.prompts import as_held

BEGIN, END = 1, 2


class Letters:
    """Tokens below 256 are letters, 256 + n the first n letters of the alphabet; the tokenizer
    takes the longest one that fits. 1 and 2 are control tokens."""

    def piece(self, token, special=False):
        if self.is_control(token):
            return b"<%d>" % token if special else b""
        return b"abcdefghijkl"[: token - 256] if token >= 256 else bytes([token])

    def is_control(self, token):
        return token in (BEGIN, END)

    def tokenize(self, text, add_special, parse_special):
        assert not add_special and not parse_special
        data, tokens = text.encode(), []
        while data:
            n = next((n for n in range(12, 1, -1) if data.startswith(self.piece(256 + n))), 1)
            tokens.append(256 + n if n > 1 else data[0])
            data = data[n:]
        return tokens


LETTERS = Letters()


def of(text):
    """One token a letter; < and > are the control tokens."""
    return [{"<": BEGIN, ">": END}.get(each, ord(each)) for each in text]


@pytest.mark.parametrize(
    ("a", "b", "n"),
    [([], [1], 0), ([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 3], 2), ([5], [6], 0)],
)
def test_common_prefix(a, b, n):
    assert common_prefix(a, b) == n


WHO = [*of("<who>"), BEGIN, 260, END]


@pytest.mark.parametrize(
    ("prompt", "held", "found"),
    [
        # An answer keeps the tokens that it was given in, and its last one may not have been read.
        ([*WHO, *of("<xyz>")], of("<who><abcd><x"), of("<who><abcd><xyz>")),
        ([*WHO, *of("<more>")], of("<who><ab"), of("<who><abcd><more>")),
        # Another text stays as it is.
        *[
            (WHO, held, WHO)
            for held in (*(of("<who><abce>"), of("<who><x"), of("<who><abcdef"), of("<what>")), [])
        ],
        # Texts are not compared across control tokens.
        ([BEGIN, 260, END], [BEGIN, *of("ab"), END, *of("cd")], [BEGIN, 260, END]),
    ],
)
def test_what_is_held_of_a_prompt(prompt, held, found):
    assert as_held(prompt, held, LETTERS) == found
