"""How much of a prompt a kept sequence holds, and which marks of a running one stay."""

from types import SimpleNamespace

from orchestrator.runtime.prompts import PromptCache, as_held
from tables import cases

from orchestrator.memory.footprint import PROMPT_MARKS
from orchestrator.runtime.prompt_copies import Shelf

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


WHO = [*of("<who>"), BEGIN, 260, END]


@cases(
    "prompt, held, found",
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
)
def test_what_is_held_of_a_prompt(prompt, held, found):
    assert as_held(prompt, held, LETTERS) == found


PART_BYTES = 100


class Reading:
    """Steps of a model whose memory goes back to marks alone, each of PART_BYTES."""

    def __init__(self):
        self.cached = []
        self.marks = []
        self.state = SimpleNamespace(has_part=True, n_bytes=lambda part: PART_BYTES)

    def mark(self, with_part):
        length, part = len(self.cached), b"part" if with_part else None
        self.marks.append(SimpleNamespace(length=length, part=part, n_bytes=PART_BYTES * with_part))


@cases(
    "budget_parts, read, kept",
    (100, PROMPT_MARKS, [1, 2, 3, 4, 5, 6]),
    (100, PROMPT_MARKS + 1, [1, 3, 4, 5, 6, 7]),
    (100, PROMPT_MARKS + 3, [1, 5, 6, 7, 8, 9]),
    (3, 3, [1, 2, 3]),
    (3, 5, [1, 4, 5]),
    (1, 3, [3]),
)
def test_the_oldest_mark_and_the_latest_ones_stay(budget_parts, read, kept):
    steps = Reading()
    shelf = Shelf(budget_parts * PART_BYTES)
    cache = PromptCache(steps, LETTERS, 4096, shelf, None, "key")
    for token in range(read):
        steps.cached.append(token)
        cache.mark()
    assert [each.length for each in steps.marks] == kept
    assert shelf.live_bytes == len(kept) * PART_BYTES <= shelf.budget_bytes


def test_a_mark_that_never_has_room_takes_no_other_ones_place():
    steps = Reading()
    cache = PromptCache(steps, LETTERS, 4096, Shelf(PART_BYTES - 1), None, "key")
    steps.cached.append(0)
    cache.mark()
    assert [each.part for each in steps.marks] == [None]
