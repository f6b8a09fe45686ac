"""Rewrites regular expressions of JSON schemas for llama.cpp's grammars.

llama.cpp supports `^...$` around literals, classes, groups and repetitions. The result matches
texts inside JSON strings, where quotes, backslashes and control characters are escaped. It matches
a subset of the texts that the pattern matches: characters that need an escape are removed from
classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_TIMES = 2000
_MOST_DEPTH = 50
_LAST = 0x10FFFF
_DIGITS, _WORD = [(48, 57)], [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACES = [(9, 13), (32, 32), (0xA0, 0xA0), (0x2028, 0x2029), (0xFEFF, 0xFEFF)]
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0, "b": 8}
# Characters that JSON strings only contain as escapes, and DEL, which llama.cpp excludes too.
_UNSAFE = [(0, 31), (34, 34), (92, 92), (127, 127), (0xD800, 0xDFFF)]
_ESCAPES = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}

_NOT_REGULAR = "the pattern is not a valid regular expression"

Ranges = list[tuple[int, int]]


class PatternError(ValueError):
    """Raised if the server cannot make a model's answer match a regular expression.

    The message says why.
    """


@dataclass(frozen=True)
class One:
    """A part of a regular expression that matches one character in any of the given ranges."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Times:
    """A part of a regular expression that repeats another part, `item`, `least` to `most` times.

    A `most` of None means no limit.
    """

    item: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Choice:
    """A part of a regular expression that matches any of several alternatives.

    Each alternative is a sequence of parts.
    """

    choices: tuple[tuple[Node, ...], ...]


Node = One | Times | Choice


def translated(pattern: str, least: int = 0, most: int | None = None) -> str:
    """Return a regular expression for llama.cpp that enforces `pattern` and a length.

    It matches the texts that `pattern` matches and that have `least` to `most` characters. A `most`
    of None means no limit. Raises PatternError if `pattern` cannot be enforced or is not a regular
    expression.
    """
    reader = _Reader(pattern)
    rest = Times(One(tuple(_complement([]))), 0, None)
    whole = []
    for begins, items, ends in reader.alternatives():
        items = [*([] if begins else [rest]), *items, *([] if ends else [rest])]
        whole.append(_bounded(items, least, most))
    return f"^{_written_choice(whole)}$"


def of_words(words: Iterable[str]) -> str:
    """Return a regular expression for llama.cpp that matches exactly these words.

    Common beginnings of words are written only once, as in `ab(c|d)`, because llama.cpp is slow
    with many alternatives. Raises PatternError if this nests the groups too deeply.
    """
    return f"^{_branches(sorted(set(words)), 0, 0)}$"


def _branches(words: list[str], at: int, depth: int) -> str:
    """Return a regular expression that matches the rest of each word, from the character `at` on.

    All words are equal before that character. Raises PatternError at a `depth` above the limit.
    """
    if depth > _MOST_DEPTH:
        raise PatternError(
            "the texts of an `enum` share prefixes at too many levels (as a, ab and abc do): their "
            f"regular expression would have more than {_MOST_DEPTH} nested groups: remove some "
            "texts"
        )
    if len(words) == 1:
        return _literal(words[0][at:])
    end = at
    while all(len(word) > end and word[end] == words[0][end] for word in words):
        end += 1
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault(word[end : end + 1], []).append(word)
    choices = [_branches(each, end, depth + 1) for first, each in groups.items() if first]
    optional = "?" if "" in groups else ""
    return _literal(words[0][at:end]) + f"({'|'.join(choices)})" + optional


def _literal(text: str) -> str:
    return "".join(_written_one(One(((ord(char), ord(char)),))) for char in text)


def _complement(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Return the characters that are not in the given ranges."""
    found, begin = [], 0
    for first, last in sorted(ranges):
        if first > begin:
            found.append((begin, first - 1))
        begin = max(begin, last + 1)
    if begin <= _LAST:
        found.append((begin, _LAST))
    return found


class _Reader:
    """Parses a regular expression of ECMA-262 (JavaScript) into items."""

    def __init__(self, pattern: str) -> None:
        self._text, self._at, self._depth = pattern, 0, 0

    def alternatives(self) -> list[tuple[bool, list[Node], bool]]:
        """Parse the whole regular expression, and return its top-level alternatives.

        Each alternative is (whether it starts with ^, its parts in order, whether it ends with $).
        A part is a One (one character), a Times (a repeated part) or a Choice (alternatives in
        parentheses).
        """
        found = []
        while True:
            begins = self._skip("^")
            items = self._sequence()
            ends = self._skip("$")
            found.append((begins, items, ends))
            if self._skip("|"):
                continue
            if self._at < len(self._text):
                self._fail()
            return found

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, text: str) -> bool:
        """Skip `text` if the rest of the regular expression begins with it.

        Return whether it did.
        """
        is_there = self._text.startswith(text, self._at)
        self._at += len(text) if is_there else 0
        return is_there

    def _take(self) -> str:
        """Return the next character of the regular expression, and move past it."""
        if self._at >= len(self._text):
            raise PatternError(_NOT_REGULAR)
        self._at += 1
        return self._text[self._at - 1]

    def _fail(self) -> None:
        """Raise PatternError for an unexpected character."""
        if self._peek() in ("^", "$"):
            raise PatternError("this server cannot enforce ^ or $ inside a regular expression")
        raise PatternError(_NOT_REGULAR)

    def _sequence(self) -> list[Node]:
        items: list[Node] = []
        while self._peek() not in ("", "|", ")", "$", "^"):
            items.append(self._repeated(self._atom()))
        return items

    def _repeated(self, item: Node) -> Node:
        least: int = 1
        most: int | None = 1
        if self._skip("*"):
            least, most = 0, None
        elif self._skip("+"):
            least, most = 1, None
        elif self._skip("?"):
            least, most = 0, 1
        elif self._peek() == "{":
            end = self._text.find("}", self._at)
            first, comma, last = self._text[self._at + 1 : end].partition(",")
            if end < 0 or not first.isdecimal() or not (last.isdecimal() or not last):
                raise PatternError(_NOT_REGULAR)
            self._at = end + 1
            least = int(first)
            most = least if not comma else int(last) if last else None
            if most is not None and most < least:
                raise PatternError(
                    f"the pattern has the repetition {{{least},{most}}}, whose minimum is larger "
                    "than its maximum"
                )
        else:
            return item
        self._skip("?")  # a lazy repetition matches the same texts
        if self._peek() in ("*", "+", "{"):
            raise PatternError(_NOT_REGULAR)
        return Times(item, least, most)

    def _atom(self) -> Node:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == ".":
            return One(tuple(_complement([(10, 10), (13, 13), (0x2028, 0x2029)])))
        if char == "\\":
            return One(tuple(self._escape(in_class=False)))
        if char in "*+?{":
            raise PatternError(_NOT_REGULAR)
        return One(((ord(char), ord(char)),))

    def _group(self) -> Node:
        if self._skip("?"):
            is_named = self._peek() == "<" and self._text[self._at + 1 : self._at + 2] not in (
                "=",
                "!",
            )
            if is_named:
                self._at = self._text.find(">", self._at) + 1 or len(self._text)
            elif not self._skip(":"):
                raise PatternError(
                    "this server cannot enforce look-around groups in a regular expression"
                )
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise PatternError(
                f"the regular expression has more than {_MOST_DEPTH} levels of groups"
            )
        choices = [tuple(self._sequence())]
        while self._skip("|"):
            choices.append(tuple(self._sequence()))
        if not self._skip(")"):
            self._fail()
        self._depth -= 1
        return Choice(tuple(choices))

    def _class(self) -> Node:
        is_negated, ranges = self._skip("^"), []
        while not self._skip("]"):
            first = self._member()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._member()
                if len(first) != 1 or len(last) != 1 or first[0][0] > last[0][1]:
                    raise PatternError(_NOT_REGULAR)
                first = [(first[0][0], last[0][1])]
            ranges += first
        return One(tuple(_complement(ranges) if is_negated else sorted(ranges)))

    def _member(self) -> Ranges:
        char = self._take()
        return self._escape(in_class=True) if char == "\\" else [(ord(char), ord(char))]

    def _escape(self, in_class: bool) -> Ranges:
        """Parse an escape sequence after its backslash, and return its character ranges."""
        char = self._take()
        sets = {"d": _DIGITS, "w": _WORD, "s": _SPACES}
        if char.lower() in sets:
            found = sets[char.lower()]
            return list(found) if char.islower() else _complement(found)
        if char == "u" and self._skip("{"):
            return self._number(self._text.find("}", self._at) - self._at, 1)
        if char in "ux":
            return self._number(4 if char == "u" else 2, 0)
        if char in _CONTROLS and (char != "b" or in_class):
            return [(_CONTROLS[char], _CONTROLS[char])]
        if char.isalnum():
            raise PatternError(
                f"this server cannot enforce the escape sequence \\{char} in a regular expression"
            )
        return [(ord(char), ord(char))]

    def _number(self, n_digits: int, n_after: int) -> Ranges:
        """Parse a hexadecimal code point of n_digits, and return it as a character range.

        Also skips n_after characters after the digits.
        """
        digits = self._text[self._at : self._at + max(0, n_digits)]
        try:
            value = int(digits, 16) if len(digits) == n_digits else -1
        except ValueError:
            value = -1
        if not 0 <= value <= _LAST:
            raise PatternError(_NOT_REGULAR)
        self._at += n_digits + n_after
        return [(value, value)]


def _length(node: Node) -> tuple[int, int | None]:
    """Return the (least, most) characters that an item matches. A `most` of None means no limit."""
    if isinstance(node, One):
        return 1, 1
    if isinstance(node, Times):
        least, most = _length(node.item)
        is_open = node.most is None and most != 0
        return least * node.least, None if most is None or is_open else most * (node.most or 0)
    ends = [_total(choice) for choice in node.choices]
    is_open = any(end[1] is None for end in ends)
    return min(end[0] for end in ends), None if is_open else max(end[1] or 0 for end in ends)


def _total(items: Sequence[Node]) -> tuple[int, int | None]:
    """Return the (least, most) characters that a sequence of items matches.

    A `most` of None means no limit.
    """
    ends = [_length(item) for item in items]
    is_open = any(end[1] is None for end in ends)
    return sum(end[0] for end in ends), None if is_open else sum(end[1] or 0 for end in ends)


def _bounded(items: list[Node], least: int, most: int | None) -> list[Node]:
    """Return a sequence of items that only matches texts of `least` to `most` characters.

    This needs exactly one item of variable length, which repeats a single character. The bounds of
    that item are narrowed. Raises PatternError for other sequences.
    """
    has_least, has_most = _total(items)
    if has_least >= least and (most is None or (has_most is not None and has_most <= most)):
        return items
    open_ones = [n for n, item in enumerate(items) if len(set(_length(item))) > 1]
    single = items[open_ones[0]] if len(open_ones) == 1 else None
    if isinstance(single, Times) and isinstance(single.item, One):
        n_others = has_least - single.least
        lower = max(single.least, least - n_others)
        upper = min(
            (n for n in (single.most, None if most is None else most - n_others) if n is not None),
            default=None,
        )
        if upper is None or upper >= lower:
            made = list(items)
            made[open_ones[0]] = Times(single.item, lower, upper)
            return made
    raise PatternError(
        "this server cannot enforce this pattern together with minLength or maxLength"
    )


def _written_choice(choices: Sequence[Sequence[Node]]) -> str:
    texts = ["".join(map(_written, choice)) for choice in choices]
    return texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"


def _written(node: Node) -> str:
    if isinstance(node, Choice):
        texts = ["".join(map(_written, choice)) for choice in node.choices]
        return f"({'|'.join(texts)})"
    if isinstance(node, Times):
        if max(node.least, node.most or 0) > MOST_TIMES:
            raise PatternError(
                f"this server enforces repetitions in a regular expression only up to {MOST_TIMES}"
            )
        text = _written(node.item)
        if not isinstance(node.item, Choice) and not text.startswith("["):
            text = f"({text})"
        if node.most is None and node.least < 2:
            return text + "*+"[node.least]
        most = "" if node.most is None else node.most
        return f"{text}{{{node.least},{most}}}"
    return _written_one(node)


def _written_one(node: One) -> str:
    if len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]:
        code = node.ranges[0][0]
        if code in _ESCAPES:
            return "\\\\" + _in_class(ord(_ESCAPES[code]))
        if code < 32 or code == 127:
            return f"\\\\u{code:04x}"
        return chr(code) if chr(code).isascii() and chr(code).isalnum() else _in_class(code)
    safe = _complement([*_complement(node.ranges), *_UNSAFE])
    if not safe:
        raise PatternError(
            "this server cannot enforce a character class that has only characters that JSON "
            "escapes, such as [\\n\\t]: write alternatives instead, such as (\\n|\\t)"
        )
    parts = [
        _code(first) if first == last else f"{_code(first)}-{_code(last)}" for first, last in safe
    ]
    return f"[{''.join(parts)}]"


def _in_class(code: int) -> str:
    """Return the character with this code in brackets, as a class of a regular expression.

    A repetition then applies to all of its UTF-8 bytes.
    """
    return f"[{_code(code)}]"


def _code(code: int) -> str:
    """Return the character with this code as text for a class of llama.cpp's grammars.

    Characters with a special meaning are escaped.
    """
    if chr(code).isascii() and chr(code).isalnum():
        return chr(code)
    return (
        f"\\x{code:02X}" if code < 256 else f"\\u{code:04X}" if code < 65536 else f"\\U{code:08X}"
    )
