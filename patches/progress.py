"""Show the progress of a build on stderr.

On a terminal it is a live line, otherwise a line every 15 s.
"""

from __future__ import annotations

import re
import sys
import time

SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Shows the progress of a build on the terminal.

    The progress is found in the output of ninja, as [n/m], or of make, as [ p%].
    """

    def __init__(self, what: str):
        self.what = what
        self.live = sys.stderr.isatty()
        self.started = self.printed = time.monotonic()
        self.done = ""
        self._show()

    def line(self, text: str) -> None:
        """Process one line of build output. Update the display if the line reports progress."""
        match = re.match(r"\[\s*(\d+)/(\d+)\]|\[\s*(\d+)%\]", text)
        if not match:
            return
        self.done = f"{match[3]}%" if match[3] else f"{match[1]}/{match[2]}"
        wait = 0.2 if self.live else SECONDS_BETWEEN_LINES
        if time.monotonic() - self.printed >= wait:
            self._show()

    def close(self) -> None:
        """Show the final progress and end the line."""
        if self.live or self.done:
            self._show()
        if self.live:
            print(file=sys.stderr, flush=True)

    def _show(self) -> None:
        self.printed = time.monotonic()
        minutes, seconds = divmod(int(self.printed - self.started), 60)
        text = f"{self.what} {self.done}".rstrip()
        if self.printed > self.started:
            text += f"  {minutes}:{seconds:02d}"
        sys.stderr.write(f"\r\x1b[K{text}" if self.live else f"{text}\n")
        sys.stderr.flush()
