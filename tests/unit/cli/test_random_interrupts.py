"""Ctrl-C, and signals that end a process, at random moments of commands: status 130, nothing said,
no file. The long form is tests/helpers/interrupting.py."""

import importlib.util
import signal

import interrupting
import pytest
import small_commands

TIMES = 2
NAMES = ("eval", "trace", "calibrate", "pack", "convert", "replay", "chat", "pull")


@pytest.fixture(scope="module")
def folder(library, tmp_path_factory):
    return tmp_path_factory.mktemp("interrupted")


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *[(name, signal.SIGINT) for name in NAMES],
        *[("pack", signal.SIGTERM), ("chat", signal.SIGHUP), ("trace", signal.SIGTERM)],
    ],
)
def test_a_signal_ends_a_command_quietly(folder, name, number):
    if name == "convert" and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs the extra `convert`")
    command = small_commands.commands(folder)[name]()
    ends, wrong = interrupting.interrupt(command, TIMES, seed=name, number=number)
    assert wrong == []
    assert ends[f"status {128 + number}"] >= TIMES - 1
