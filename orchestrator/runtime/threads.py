"""Threads that are kept and used again for the work of later models.

Each thread that computes has compute threads of its own in OpenMP, and file descriptors in our
library that stay open as long as the process lives. New threads for each model would add up.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue


class Task:
    """A function that runs on a kept thread. Its methods are those of threading.Thread."""

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self._function, self.name = function, name
        self._ended = threading.Event()

    def run(self) -> None:
        """Call the function. The thread that runs the task does this."""
        self._function()

    def end(self) -> None:
        """Let the callers of join continue, because the function has ended."""
        self._ended.set()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the function."""
        self._ended.wait(timeout_s)

    def is_alive(self) -> bool:
        """Whether the function has not ended yet."""
        return not self._ended.is_set()


class _Kept:
    """The threads that wait for another function, by their queues."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Task]] = []
        self._process = os.getpid()

    def start(self, function: Callable[[], object], name: str) -> Task:
        task = Task(function, name)
        with self._lock:
            if self._process != os.getpid():  # the threads have stayed in the parent of the fork
                self._idle, self._process = [], os.getpid()
            queue = self._idle.pop() if self._idle else None
        if queue is None:
            queue = SimpleQueue()
            threading.Thread(target=self._serve, args=(queue,), daemon=True).start()
        queue.put(task)
        return task

    def _serve(self, queue: SimpleQueue[Task]) -> None:
        while True:
            task = queue.get()
            threading.current_thread().name = task.name
            try:
                task.run()
            except BaseException:
                task.end()
                raise
            with self._lock:
                self._idle.append(queue)
            task.end()
            del task  # it would keep what belongs to its function


_kept = _Kept()


def start(function: Callable[[], object], name: str) -> Task:
    """Run a function on a kept thread, or on a new one if none is free.

    Raises RuntimeError if no thread can be started.
    """
    return _kept.start(function, name)
