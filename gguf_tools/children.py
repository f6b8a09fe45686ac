"""Start child processes that never outlive the block that uses them."""

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

# Time between SIGTERM and SIGKILL for a process group.
PATIENCE_S = 2.0
_POLL_S = 0.05


@contextmanager
def child(
    command: Sequence[str], kill_group: bool = False, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start a command as a child process and yield the process, with text pipes.

    At the end of the `with` block, the command is killed if it is still running.

    kill_group: also end the processes that the command has started.
    options: passed to `subprocess.Popen`.
    Raises OSError if the command cannot be started.
    """
    process: subprocess.Popen[str] | None = None
    try:
        # An interrupt inside Popen would leave a running process without a handle to it.
        with interrupts.held():
            if kill_group:
                options["preexec_fn"] = _new_group
            process = subprocess.Popen(command, text=True, **options)
        yield process
    finally:
        if process is not None and process.poll() is None:
            if kill_group:
                _end_group(process.pid)
            process.kill()
            process.communicate()


def _end_group(group: int) -> None:
    """Send SIGTERM to a process group, wait up to PATIENCE_S seconds, then send SIGKILL.

    SIGTERM comes first because of ninja, which runs its compilers in separate groups. Ninja only
    stops these compilers if it can shut down in order.
    """
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        for _ in range(int(PATIENCE_S / _POLL_S)):
            time.sleep(_POLL_S)
            if not _is_running(group):
                return
        os.killpg(group, signal.SIGKILL)


def _is_running(group: int) -> bool:
    """Return whether a process group has a live process.

    Zombies remain in the group until their parent waits for them, so they do not count.
    """
    for each in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getpgid(each.pid) == group and each.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _new_group() -> None:
    """Put the new process into its own group. Popen's option `process_group` needs Python 3.11."""
    os.setpgid(0, 0)
