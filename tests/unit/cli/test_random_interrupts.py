"""Ctrl-C, and signals that end a process, at random moments of commands: status 130, nothing said,
no file. The long form is tests/interrupting.py."""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path

import pytest

from orchestrator.native import Library

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import interrupting
import small_commands

TIMES = 2
NAMES = ("eval", "trace", "calibrate", "pack", "convert", "replay", "chat", "pull")


@pytest.fixture(scope="module")
def folder(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interrupted")


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupt_ends_a_command_quietly(folder: Path, name: str) -> None:
    if name == "convert" and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs the extra `convert`")
    command = small_commands.commands(folder)[name]()
    ends, wrong = interrupting.interrupt(command, TIMES, seed=name)
    assert wrong == []
    assert ends["status 130"] >= TIMES - 1


@pytest.mark.parametrize(
    ("name", "number"),
    [("pack", signal.SIGTERM), ("chat", signal.SIGHUP), ("trace", signal.SIGTERM)],
)
def test_so_does_a_signal_that_ends_a_process(
    folder: Path, name: str, number: signal.Signals
) -> None:
    command = small_commands.commands(folder)[name]()
    ends, wrong = interrupting.interrupt(command, TIMES, seed=name, number=number)
    assert wrong == []
    assert ends[f"status {128 + number}"] >= TIMES - 1


def test_a_machine_that_stood_still_took_no_time() -> None:
    now_s = [0.0]
    clock = interrupting.Clock(lambda: now_s[0])
    now_s[0] = 0.5
    assert clock.now_s() == 0.5
    now_s[0] = 300.5
    assert clock.now_s() == 0.5 + interrupting.STILL_S
