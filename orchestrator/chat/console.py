"""The terminal: answers on stdout, all else on stderr, and no escape code in a pipe.

The only place that reads NO_COLOR and TERM.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from gguf_tools import interrupts
from gguf_tools.columns import explained
from gguf_tools.units import format_size
from orchestrator.cache.files import user_folder

_FENCE = "```"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_TAB_COLUMNS = 8


def _folded(line: str, width: int) -> str:
    """Break a line of text into lines of at most `width` columns. Only a single word may be longer.

    The lines after the first are indented by 2. If the text is a row of a table, they are indented
    to the second column of the table, unless that column is too far right.
    """
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
    """Breaks text that comes in pieces into lines of at most width() columns.

    A word is held back until it is complete. Code between two lines of ``` is not broken, so that
    users can copy it. Text in wide characters, which has no spaces, may be broken anywhere.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        """Begin the first line. `width` returns the width of the terminal in columns."""
        self._width = width
        self._begin()

    def _begin(self) -> None:
        self._column = 0
        self._space = self._word = self._line_start = ""
        self._in_code = self._too_long = False

    def feed(self, text: str) -> str:
        """Add a piece of text, and return the text that is ready to be shown.

        The last word is usually held back until it is complete.
        """
        return "".join(map(self._next, text))

    def end(self) -> str:
        """Finish the text, and return the part of it that was held back.

        Call this after the last piece of a text. The next piece then counts as the beginning of a
        line.
        """
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
        """Return the word that was held back, with its space or a line break before it."""
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
    """Return the width of a text on a terminal, in columns, if it begins in column `start`."""
    column = start
    for char in text:
        if char == "\t":
            column += _TAB_COLUMNS - column % _TAB_COLUMNS
        elif unicodedata.east_asian_width(char) in "WF":
            column += 2
        elif not unicodedata.combining(char):
            column += 1
    return column - start


BAR_CELLS = 24
# A shorter bar would only flicker.
BAR_DELAY_S = 0.4
BAR_INTERVAL_S = 0.1
# Between reports a bar counts the seconds.
BAR_TICK_S = 1.0
ESTIMATE_AFTER_S = 3
HISTORY_LINES = 1000

# C0 and C1 controls except newline and tab, and codes that reorder text. The text of a model must
# not move the cursor, set the title or the clipboard, or look like another text.
_CONTROLS = dict.fromkeys(
    [c for c in range(0x20) if c not in (0x09, 0x0A)]
    + list(range(0x7F, 0xA0))
    + list(range(0x202A, 0x202F))
    + list(range(0x2066, 0x206A))
)


def strip_controls(text: str) -> str:
    """Return a text without the characters that control a terminal. Newlines and tabs stay."""
    return text.translate(_CONTROLS)


class Console:
    """Writes the texts of a command to stdout and stderr, and reads lines from stdin.

    Colours, progress bars and line breaks are used only on a terminal.
    """

    def __init__(self) -> None:
        """Find out which of stdin, stdout and stderr are terminals, and whether they show colours.

        Characters that a stream's encoding lacks are replaced from now on.
        """
        # A character that the terminal's encoding lacks must not end the answer.
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            reconfigure = getattr(stream, "reconfigure", None)
            # A stream that was read from cannot be reconfigured.
            if reconfigure and stream.errors != "replace":
                reconfigure(errors="replace")
        self.in_tty = _is_tty(sys.stdin)
        self.out_tty = _is_tty(sys.stdout)
        self.err_tty = _is_tty(sys.stderr)
        self.notes: TextIO = sys.stdout if self.out_tty and not self.err_tty else sys.stderr
        smart = os.environ.get("TERM", "dumb") != "dumb"
        self._bars = self.err_tty and smart
        self._color = smart and not os.environ.get("NO_COLOR") and (self.err_tty or self.out_tty)
        self._smart = smart
        self._wrap = WordWrap(lambda: shutil.get_terminal_size().columns)
        self._between = " · " if _can_say("·", self.notes) else " | "
        self._history: Path | None = None
        self._is_thinking = self._is_in_line = False
        # Each report draws the bar, and a thread draws it between reports.
        self._lock = threading.RLock()
        self._bar_ended = threading.Event()
        self._bar_shown = False
        self._bar_label = ""
        self._bar_fraction: float | Callable[[], float] | None = None
        self._bar_bytes = 0
        self._bar_start_s = 0.0
        self._bar_next_s = 0.0

    def answer(self, text: str) -> None:
        """Write a piece of the answer to stdout.

        On a terminal, control characters are removed, and lines end between words.
        """
        self._end_thought()
        self.write(self._wrap.feed(strip_controls(text)) if self.out_tty else text)

    def thought(self, text: str) -> None:
        """Write a piece of the model's reasoning, which comes before its answer.

        The text is dim. If stdout is not a terminal, nothing is written.
        """
        if self.out_tty:
            if not self._is_thinking and self._color:
                sys.stdout.write(_DIM)
            self._is_thinking = True
            self.write(self._wrap.feed(strip_controls(text)))

    def _end_thought(self) -> None:
        if self._is_thinking:
            self._is_thinking = False
            self.write(self._wrap.end())
            sys.stdout.write(_PLAIN if self._color else "")
            self.end_line()
            self.write("\n")

    def end_answer(self) -> None:
        """Finish the answer by writing its last word.

        The method `answer` writes the pieces of an answer. On a terminal, it holds back each word
        until the word is complete. Call `end_answer` after the last piece.
        """
        self._end_thought()
        self.write(self._wrap.end())

    def write(self, text: str) -> None:
        """Write a text to stdout without breaking its lines.

        On a terminal, control characters are removed.
        """
        sys.stdout.write(strip_controls(text) if self.out_tty else text)
        sys.stdout.flush()
        self._is_in_line = not text.endswith("\n") if text else self._is_in_line

    def end_line(self) -> None:
        """Write a newline to stdout, unless the last character written was a newline."""
        if self._is_in_line:
            self.write("\n")

    @contextmanager
    def quiet_keys(self) -> Iterator[None]:
        """Hide the characters that the user types during the block.

        They are kept for the next question. Ctrl-C still works.
        """
        before = self._tty_state()
        if before is None:
            yield
            return
        import termios

        quiet = list(before)
        # Without ICANON the keys arrive as they were pressed, for the next line's editing.
        quiet[3] = before[3] & ~(termios.ECHO | termios.ICANON)
        restore = partial(termios.tcsetattr, sys.stdin, termios.TCSANOW, before)
        termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
        try:
            with interrupts.leaving(restore):
                yield
        finally:
            restore()

    def _tty_state(self) -> list[Any] | None:
        """Return the modes of the terminal, as termios has them.

        Returns None if stdin or stdout is no terminal. Also returns None if this process is in the
        background, because changing the modes would then stop it.
        """
        if not (self.in_tty and self.out_tty):
            return None
        import termios

        try:
            if os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp():
                return None
            return termios.tcgetattr(sys.stdin)
        except (OSError, termios.error):
            return None

    def note(self, text: str) -> None:
        """Write a dim line for the user, broken between words to the width of the terminal."""
        self.end_bar()
        self.notes.write(self._dim(_fit(strip_controls(text), self.notes)) + "\n")
        self.notes.flush()

    def explain(self, groups: Mapping[str, Sequence[tuple[str, str]]]) -> None:
        """Write groups of names with their explanations, each group under its heading."""
        self.note(explained(groups, shutil.get_terminal_size().columns))

    def fields(self, fields: list[str]) -> None:
        """Write short texts (fields) as one dim line for the user.

        A line that is too wide for the terminal is broken between fields.
        """
        width = shutil.get_terminal_size().columns
        line = ""
        for field in fields:
            longer = line + self._between + field if line else field
            if line and len(longer) > width:
                self.note(line)
                longer = field
            line = longer
        self.note(line)

    def error(self, text: str) -> None:
        """Write one sentence about an error to stderr."""
        self.end_bar()
        sys.stderr.write(_fit(f"Error: {strip_controls(text)}", sys.stderr) + "\n")
        sys.stderr.flush()

    def prefill_bar(self, done: Callable[[], float], total: int) -> None:
        """Show a progress bar while the `total` tokens of a prompt are read.

        `done` returns how many tokens have been read.
        """
        self.bar(f"Reading {total} tokens", lambda: done() / total if total else 1.0)

    def bar(
        self, label: str, fraction: float | Callable[[], float] | None, total_bytes: int = 0
    ) -> None:
        """Show a progress bar with the label `label`, or update it. `end_bar` removes it.

        `fraction` is the share of the work that is done, 0 to 1, or None if it is unknown. It may
        be a function, which is called whenever the bar is drawn. `total_bytes` is the size of the
        whole work, or 0 to show no sizes.

        A new bar appears after a moment. It shows the time left, or the time that has passed.
        Without a terminal nothing is shown.
        """
        if not self._bars:
            return
        with self._lock:
            now = time.monotonic()
            if label != self._bar_label:
                self.end_bar()
                self._bar_label, self._bar_start_s = label, now
                self._bar_ended = threading.Event()
                threading.Thread(target=self._tick, args=(self._bar_ended,), daemon=True).start()
            self._bar_fraction, self._bar_bytes = fraction, total_bytes
            self._draw_bar(now)

    def _tick(self, ended: threading.Event) -> None:
        """Redraw the progress bar about once per second until `ended` is set. Runs on a thread."""
        wait_s = BAR_DELAY_S
        while not ended.wait(wait_s):
            with self._lock:
                if not ended.is_set():
                    self._draw_bar(time.monotonic())
            wait_s = BAR_TICK_S

    def _draw_bar(self, now: float) -> None:
        if now < max(self._bar_start_s + BAR_DELAY_S, self._bar_next_s):
            return
        self._bar_next_s = now + BAR_INTERVAL_S
        share = self._bar_fraction() if callable(self._bar_fraction) else self._bar_fraction
        cells = amount = ""
        if share is not None:
            full = round(BAR_CELLS * min(max(share, 0.0), 1.0))
            cells = f" [{'#' * full}{'-' * (BAR_CELLS - full)}]"
            amount = f" {100 * share:3.0f} %"
            if self._bar_bytes:
                amount += f", {format_size(share * self._bar_bytes)} of "
                amount += format_size(self._bar_bytes)
        amount += _time_of(now - self._bar_start_s, share)
        text = self._bar_label + cells + amount
        width = shutil.get_terminal_size().columns - 1
        if len(text) > width:  # the share is said without the cells, and the label in whole words
            n_columns = max(1, width - len(amount))
            text = (textwrap.shorten(self._bar_label, n_columns, placeholder="") + amount)[:width]
        sys.stderr.write("\r\x1b[K" + self._dim(text))
        sys.stderr.flush()
        self._bar_shown = True

    def end_bar(self) -> None:
        """Remove the progress bar if one is shown."""
        with self._lock:
            self._bar_ended.set()
            self._bar_label = ""
            if self._bar_shown:
                self._bar_shown = False
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()

    @contextmanager
    def bars(self) -> Iterator[Console]:
        """Return a context manager for code that shows progress bars by the method `bar`.

        The context manager yields this console. The end of the `with` block removes the bar that is
        shown, if any.
        """
        try:
            yield self
        finally:
            self.end_bar()

    def ask(self, mark: str = ">") -> str | None:
        """Show `mark`, and return the line that the user types, or None at the end of the input.

        Raises KeyboardInterrupt at Ctrl-C.
        """
        try:
            if self.in_tty and self.out_tty:
                # readline has to know which characters of the prompt take no place.
                bold = f"\001\x1b[1m\002{mark}\001\x1b[0m\002"
                line = input((bold if self._color else mark) + " ")
            else:
                self.notes.write(f"{mark} ")
                self.notes.flush()
                line = sys.stdin.readline()
                if not line:
                    return None
        except EOFError:
            return None
        self._keep_history()
        return line.rstrip("\n")

    def open_history(self, words: list[str]) -> None:
        """Let `ask` recall earlier lines with the arrow keys and complete `words` with Tab.

        The lines are kept in a file for later sessions. A note is shown if Python has no readline
        module or the file cannot be written.
        """
        if not (self.in_tty and self.out_tty):
            return
        try:
            import readline
        except ImportError:
            self.note(
                "This Python has no readline module, so the history of typed lines and the arrow "
                "keys do not work."
            )
            return
        path = user_folder("state") / "history"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Only the owner may read the messages.
            os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
            readline.set_history_length(HISTORY_LINES)
            readline.read_history_file(path)
            self._history = path
        except OSError as error:
            self.note(f"The history of typed lines is not kept: {path}: {error.strerror}")
        matches: list[str] = []

        def complete(text: str, state: int) -> str | None:
            if state == 0:
                matches[:] = [word for word in words if text and word.startswith(text)]
            return matches[state] if state < len(matches) else None

        readline.set_completer(complete)
        readline.set_completer_delims(" \t\n")
        libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
        if self._smart and not libedit:
            # Pasted text is one message, even if it has several lines.
            readline.parse_and_bind("set enable-bracketed-paste on")
            readline.parse_and_bind("set enable-active-region off")

    def _keep_history(self) -> None:
        if self._history is None:
            return
        import readline

        try:
            readline.write_history_file(self._history)
        except OSError as error:
            self.note(f"The history of typed lines is not kept: {self._history}: {error.strerror}")
            self._history = None

    def _dim(self, text: str) -> str:
        """Return a text with the codes that make it dim on a terminal.

        Leading and trailing newlines stay outside the codes.
        """
        if not (self._color and text.strip()):
            return text
        start = len(text) - len(text.lstrip("\n"))
        end = len(text.rstrip("\n"))
        return f"{text[:start]}{_DIM}{text[start:end]}{_PLAIN}{text[end:]}"


@dataclass
class ProgressBar:
    """A progress bar on a terminal. Call it with the share of the work that is done, 0 to 1.

    A share of None means that it is unknown. `total_bytes` is the size of the whole work, or 0 if
    it is unknown.
    """

    console: Console
    label: str
    total_bytes: int = 0

    def __call__(self, fraction: float | None) -> None:
        self.console.bar(self.label, fraction, self.total_bytes)


@contextmanager
def progress_bar(label: str) -> Iterator[ProgressBar]:
    """Return a context with a progress bar on stderr, which is removed at the end of the block."""
    with Console().bars() as console:
        yield ProgressBar(console, label)


def _time_of(passed_s: float, fraction: float | None) -> str:
    """Return the time left as text, such as ", 3 min left".

    If the fraction is unknown, it returns the time that has passed. At first, when both times say
    little, it returns "".
    """
    if fraction is None or fraction <= 0:
        return f", {passed_s:.0f} s" if passed_s >= BAR_TICK_S else ""
    if passed_s < ESTIMATE_AFTER_S or fraction >= 1:
        return ""
    left_s = passed_s * (1 - fraction) / fraction
    if left_s < 100:
        return f", {left_s:.0f} s left"
    return f", {left_s / 60:.0f} min left"


def _fit(text: str, stream: TextIO) -> str:
    """Return a text broken to the width of a terminal.

    If the stream is not a terminal, the text is unchanged.
    """
    if not _is_tty(stream):
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(_folded(line, width) for line in text.split("\n"))


def _can_say(text: str, stream: TextIO) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _is_tty(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False
