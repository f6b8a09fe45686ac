"""Keeps threads, and uses them again for the work of later models.

Each thread that computes has OpenMP threads of its own. It also has file descriptors in our library
that stay open until the process ends. With new threads for each model, these would accumulate.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue


class Task:
    """A function that runs on a reused thread. Wait for its end with join."""

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self._function, self.name = function, name
        self._ended = threading.Event()

    def run(self) -> None:
        """Call the function on the current thread."""
        self._function()

    def end(self) -> None:
        """Record that the task's function has ended, so that `join` returns.

        The thread that ran the function calls this.
        """
        self._ended.set()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the function has ended, or until timeout_s seconds have passed."""
        self._ended.wait(timeout_s)

    def is_alive(self) -> bool:
        """Return whether the function has not ended yet."""
        return not self._ended.is_set()


class _Kept:
    """A pool of threads that have ended their function and wait for another function."""

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
            del task  # otherwise the waiting thread would keep the function's objects alive


_kept = _Kept()


def start(function: Callable[[], object], name: str) -> Task:
    """Run a function on a reused thread, or on a new thread if no reused thread is free.

    name: name of the thread meanwhile. Raises RuntimeError if no thread can be started.
    """
    return _kept.start(function, name)
