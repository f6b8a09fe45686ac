"""Breaking text between words where a line of the terminal ends: a stream of it, and notes."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Callable

_FENCE = "```"
_TAB_COLUMNS = 8


def folded(text: str, width: int) -> str:
    """The lines of a note, none of them longer than `width` but for a single word. What goes on in
    another line stands below its second column, as of a table, where that leaves it room."""
    return "\n".join(_folded(line, width) for line in text.split("\n"))


def _folded(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    table = re.match(r" *\S.*? {2,}", line)
    indent = len(table[0]) if table and len(table[0]) <= width // 2 else 2
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


class WordWrap:
    """Lines of at most width() columns out of text that comes in pieces.

    A word is held back until it is whole. What stands between two lines of ``` is code, which is
    passed on as it comes, so that it can be copied. Scripts that set no spaces (wide characters)
    may break anywhere.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._begin()

    def _begin(self) -> None:
        self._column = 0
        self._space = self._word = self._line_start = ""
        self._in_code = self._too_long = False

    def feed(self, text: str) -> str:
        """What can be shown once `text` has come."""
        return "".join(map(self._next, text))

    def end(self) -> str:
        """The rest; the next text begins on a line of its own."""
        rest = self._whole_word() + self._space
        self._begin()
        return rest

    def _next(self, char: str) -> str:
        if char == "\n":
            return self._end_line()
        if len(self._line_start) < len(_FENCE) and not (char.isspace() and not self._line_start):
            self._line_start += char
        if self._in_code:
            return char
        if self._too_long and not char.isspace():
            self._column = (self._column + _columns(char)) % self._width()
            return char
        self._too_long = False
        if char.isspace():
            shown = self._whole_word()
            self._space += char
            return shown
        if _columns(char) == 2:
            shown = self._whole_word()
            self._word = char
            return shown + self._whole_word()
        self._word += char
        # A word that is longer than a line is broken by the terminal, so that it can be copied.
        self._too_long = _columns(self._word) >= self._width()
        return self._whole_word() if self._too_long else ""

    def _end_line(self) -> str:
        shown = self._whole_word() + self._space
        if self._line_start == _FENCE:
            self._in_code = not self._in_code
        self._column, self._space, self._line_start, self._too_long = 0, "", "", False
        return shown + "\n"

    def _whole_word(self) -> str:
        """The word that is complete, behind its space or on a line of its own."""
        if not self._word:
            return ""
        width, space, word = self._width(), self._space, self._word
        self._space = self._word = ""
        column = self._column + _columns(space, self._column) + _columns(word)
        if column > width and self._column:
            self._column = _columns(word)
            return "\n" + word
        self._column = column if column <= width else column % width
        return space + word


def _columns(text: str, start: int = 0) -> int:
    """How many columns a terminal gives to `text` that begins in column `start`."""
    column = start
    for char in text:
        if char == "\t":
            column += _TAB_COLUMNS - column % _TAB_COLUMNS
        elif unicodedata.east_asian_width(char) in "WF":
            column += 2
        elif not unicodedata.combining(char):
            column += 1
    return column - start
