"""Processes that this one starts end with what they are for."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import psutil
import pytest

from gguf_tools import children, interrupts
from gguf_tools.children import child

HANG_S = 600  # only what hangs takes so long
ASLEEP = [sys.executable, "-c", f"import time; time.sleep({2 * HANG_S})"]


def test_one_that_still_runs_is_killed() -> None:
    with pytest.raises(ZeroDivisionError), child(ASLEEP, stdout=subprocess.PIPE) as process:
        raise ZeroDivisionError
    assert process.poll() is not None


def test_what_it_has_started_goes_with_it() -> None:
    starts = (
        "import subprocess, sys; started = subprocess.Popen(sys.argv[1:]); "
        "print(started.pid, flush=True); started.wait()"
    )
    command = [sys.executable, "-c", starts, *ASLEEP]
    with child(command, with_its_own=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        started = psutil.Process(int(process.stdout.readline()))
        assert started.status() != psutil.STATUS_ZOMBIE
    gone, _ = psutil.wait_procs([started], timeout=HANG_S)
    assert gone


def test_an_interrupt_while_it_is_started_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Late(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)
            # As from a signal: within held it waits for the end of the block.
            interrupts.hand_over(KeyboardInterrupt())

    monkeypatch.setattr(children.subprocess, "Popen", Late)
    with pytest.raises(KeyboardInterrupt), child(ASLEEP, stdout=subprocess.PIPE):
        pytest.fail("the block begins all the same")
    assert made[0].poll() is not None
