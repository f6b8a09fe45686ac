"""Text that is safe to show on a terminal, and the progress bar."""

import io
import sys
import time

import pytest
from fake_runtime import HOSTILE
from tables import cases

from orchestrator.chat import console
from orchestrator.chat.console import progress_bar, strip_controls

HANG_S = 120.0


def test_no_control_character_reaches_the_terminal():
    shown = strip_controls(HOSTILE)
    assert shown == "red[31m ]0;titlebell back2Jend\ttab"
    everything = "".join(map(chr, range(0x3000)))
    left = strip_controls(everything)
    assert [c for c in left if ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0] == ["\t", "\n"]


@pytest.mark.parametrize("text", ["Grüße, 世界 🙂\n", "فارسی می‌خواهم", "a\tb\n\nc"])
def test_ordinary_text_stays(text):
    assert strip_controls(text) == text


class Screen(io.StringIO):
    """A terminal that records its output."""

    def isatty(self):
        return True


@cases("share, shown", (None, "Measuring, "), (0.0, f"Measuring [{'-' * 24}]   0 %, "))
def test_a_single_report_is_shown_with_the_elapsed_seconds(monkeypatch, share, shown):
    """Reports before work without further reports, such as a measurement in another process, are
    shown with the seconds since then."""
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console, "BAR_TICK_S", 0.01)
    end = time.monotonic() + HANG_S
    with progress_bar("Measuring") as progress:
        progress(share)
        while f"{shown}1 s" not in screen.getvalue():
            assert time.monotonic() < end, screen.getvalue()
            time.sleep(0.01)
    assert screen.getvalue().endswith("\r\x1b[K")
