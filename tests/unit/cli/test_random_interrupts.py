"""Ctrl-C at random moments of each command: status 130, nothing said, no file. The long form is
tests/interrupting.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from orchestrator.native import Library

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import interrupting

TIMES = 2
NAMES = ("eval", "trace", "calibrate", "pack", "convert", "replay", "chat")


@pytest.fixture(scope="module")
def folder(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interrupted")


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupt_ends_a_command_quietly(folder: Path, name: str) -> None:
    if name == "convert" and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs the extra `convert`")
    command = interrupting.commands(folder)[name]()
    ends, wrong = interrupting.interrupt(command, TIMES, seed=name)
    assert wrong == []
    assert ends["status 130"] >= TIMES - 1
