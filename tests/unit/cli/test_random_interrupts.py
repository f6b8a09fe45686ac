"""Ctrl-C, and signals that end a process, at random moments of commands: status 130, nothing said,
no file. The long form is tests/helpers/interrupting.py."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from typing import Any

import interrupting
import pytest
import small_commands

from orchestrator.native import Library

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


def test_a_moment_outside_of_the_work_is_drawn_again() -> None:
    """Before the command handles signals, and behind its end on a machine that grew faster. A run
    that goes on to its end in spite of a signal in its first half is wrong."""

    def result(status: int, took_s: float = 1.0, done: float = 1.0, reached: bool = True) -> Any:
        return interrupting.Result(status, "", "", {}, took_s, reached, done)

    def ends_of(*results: Any) -> tuple[dict[str, int], list[str], list[float]]:
        left, asked = [result(0, 8.0), *results], []

        class Played(interrupting.Command):
            def run(self, after_s: float | None = None, *_: object, **__: object) -> Any:
                asked.append(after_s)
                return left.pop(0)

        ends, wrong = interrupting.interrupt(Played([], Path()), 1, "a seed", number=signal.SIGTERM)
        assert not left
        return dict(ends), wrong, asked[1:]

    ends, wrong, asked = ends_of(result(0, 1.0, reached=False), result(-15), result(143))
    assert (ends, wrong) == ({"status 143": 1}, [])
    assert max(asked[1:]) <= 1.0
    ends, wrong, _ = ends_of(result(0, 1.0, done=0.5))
    assert ends == {"status 0": 1} and wrong[0].endswith("it goes on to the end")
    ends, wrong, _ = ends_of(*[result(-15)] * interrupting.DRAWS)
    assert (ends, wrong) == ({"status -15": 1}, [])
