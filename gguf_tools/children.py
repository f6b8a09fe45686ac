"""Processes that this one starts, and that do not outlive what they are for."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from gguf_tools import interrupts

# How long a group of processes gets to end by itself.
PATIENCE_S = 2.0
_LOOK_S = 0.05


@contextmanager
def child(
    command: Sequence[str], with_its_own: bool = False, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process that speaks text, with the options of Popen; killed where it still runs at the end
    of the block. with_its_own: what it has started goes with it. Raises OSError."""
    process: subprocess.Popen[str] | None = None
    try:
        # An interrupt within Popen would leave a process that nobody knows.
        with interrupts.held():
            if with_its_own:
                options["preexec_fn"] = _new_group
            process = subprocess.Popen(command, text=True, **options)
        yield process
    finally:
        if process is not None and process.poll() is None:
            if with_its_own:
                _end_group(process.pid)
            process.kill()
            process.communicate()


def _end_group(group: int) -> None:
    """ninja gives its compilers groups of their own, and ends them where it may end by itself."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        for _ in range(int(PATIENCE_S / _LOOK_S)):
            time.sleep(_LOOK_S)
            # A process that nobody has waited for yet is still of its group.
            if not _lives(group):
                return
        os.killpg(group, signal.SIGKILL)


def _lives(group: int) -> bool:
    for each in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getpgid(each.pid) == group and each.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _new_group() -> None:
    """Popen's own option for this is of Python 3.11."""
    os.setpgid(0, 0)
