"""What is safe and fit to show on a terminal."""

from __future__ import annotations

import pytest
from fake_engine import HOSTILE

from orchestrator.console import strip_controls


def test_no_control_character_reaches_the_terminal():
    shown = strip_controls(HOSTILE)
    assert shown == "red[31m ]0;titlebell back2Jend\ttab"
    everything = "".join(map(chr, range(0x3000)))
    left = strip_controls(everything)
    assert [c for c in left if ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0] == ["\t", "\n"]


@pytest.mark.parametrize("text", ["Grüße, 世界 🙂\n", "فارسی می‌خواهم", "a\tb\n\nc"])
def test_ordinary_text_stays(text):
    assert strip_controls(text) == text
