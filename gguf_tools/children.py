"""Processes that this one starts, and that do not outlive what they are for."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gguf_tools import interrupts


@contextmanager
def child(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that speaks text, with the options of Popen; killed where it still runs at the end
    of the block. Raises OSError."""
    process: subprocess.Popen[str] | None = None
    try:
        # An interrupt within Popen would leave a process that nobody knows.
        with interrupts.held():
            process = subprocess.Popen(command, text=True, **options)
        yield process
    finally:
        if process is not None and process.poll() is None:
            process.kill()
            process.communicate()
