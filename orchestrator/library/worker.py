"""A thread that does the native work of one model, while its callers wait in Python.

A caller that waits in Python can be interrupted by Ctrl-C with its own signal handler. Nothing on
this thread replaces a handler, because only the main thread has any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar, cast

from gguf_tools import interrupts
from orchestrator.errors import ClosedError
from orchestrator.runtime import threads

T = TypeVar("T")

# An interrupt that arrives just before a wait begins does not end it, so waits are short.
_LOOK_S = 0.25


def _wait(event: threading.Event) -> None:
    """Wait for an event. A signal is handled within a quarter of a second."""
    while not event.wait(_LOOK_S):
        pass


class Stops:
    """Functions that stop native work (in C code). A call of the object calls all of them.

    Code that begins native work adds a function that stops this work (see `including`). Pass the
    object as `stop` to `Worker.call`, which calls it when Ctrl-C is pressed.
    """

    def __init__(self) -> None:
        self._functions: list[Callable[[], object]] = []

    def __call__(self) -> None:
        """Call all functions that are registered now."""
        for each in [*self._functions]:
            each()

    @contextmanager
    def including(self, function: Callable[[], object]) -> Iterator[None]:
        """Return a context manager that registers a function while its `with` block runs.

        During the block, a call of this Stops object calls `function`. The function should end the
        work of the block, such as a computation in native code.
        """
        self._functions.append(function)
        try:
            yield
        finally:
            self._functions.remove(function)


class Posted(Generic[T]):
    """A function that a worker thread runs for another thread, and the function's result.

    After the event `ended` is set, `result` or `error` is valid. `discard` is called with a result
    that is no longer wanted, and frees it.
    """

    def __init__(
        self, function: Callable[[], T], discard: Callable[[T], object] | None = None
    ) -> None:
        self._function, self._discard = function, discard
        self._lock = threading.Lock()
        self._is_cancelled = self._has_result = False
        self.ended = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run the function, store its result or its error, and set the event `ended`.

        Call this on the worker's thread. If the function was cancelled, its result is freed.
        """
        try:
            with interrupts.cancellable(lambda: self._is_cancelled):
                self.result = self._function()
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            self.error = error
        with self._lock:
            self._has_result = self.error is None
            is_cancelled = self._is_cancelled
        if is_cancelled:
            self.drop()
        self.ended.set()

    def cancel(self) -> bool:
        """Cancel this object's function: ask it to end soon without a result.

        Returns False if the function has already returned a result. The caller must then free the
        result, with a call of `drop` on the worker thread. If True is returned, the caller has
        nothing to free.
        """
        with self._lock:
            self._is_cancelled = True
            return not self._has_result

    def drop(self) -> None:
        """Free the function's result by calling `discard`, an argument of the constructor.

        Does nothing if `discard` is None, or if the function has no result. Call this on the
        worker thread, in one case only: after `cancel` has returned False. If the function returns
        a result after it was cancelled, `run` calls this method.
        """
        if self._has_result and self._discard is not None:
            self._discard(cast(T, self.result))


class Worker:
    """A thread that runs the calls of other threads, in the order in which they come."""

    def __init__(self, name: str) -> None:
        """Start the thread. Raises RuntimeError if no thread can be started."""
        self._calls: SimpleQueue[Posted[Any] | None] = SimpleQueue()
        self._thread_id, self._has_ended = 0, False
        self._task = threads.start(self._run, name)

    def _run(self) -> None:
        self._thread_id = threading.get_ident()
        while (call := self._calls.get()) is not None:
            call.run()
            del call  # it would keep its result until the next call
        self._thread_id = 0  # the thread may become that of another worker
        self._has_ended = True
        self._refuse_calls()

    def _refuse_calls(self) -> None:
        """End the calls that came after the end of the thread. They raise ClosedError."""
        with suppress(Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None:
                    call.error = ClosedError("this model is closed: open it again with LLM(...)")
                    call.ended.set()

    def call(
        self,
        function: Callable[[], T],
        stop: Callable[[], object] = lambda: None,
        discard: Callable[[T], object] | None = None,
    ) -> T:
        """Run a function on the worker's thread. Return its result or raise its error.

        Ctrl-C during the wait cancels the function. The KeyboardInterrupt is raised when the
        function has ended, or at a second Ctrl-C. `stop` is called after the first Ctrl-C, and ends
        native work that does not notice the cancel. `discard` frees the result if the function
        returned one although it was cancelled.

        Raises ClosedError after the end of the worker.
        """
        if self._is_here():
            return function()
        call = Posted(function, discard)
        self._calls.put(call)
        try:
            if self._has_ended:
                self._refuse_calls()
            _wait(call.ended)
        except BaseException:
            if not call.cancel():
                self.post(call.drop)
            stop()
            _wait(call.ended)
            raise
        if call.error is not None:
            raise call.error
        return cast(T, call.result)

    def post(self, function: Callable[[], object]) -> Posted[object]:
        """Run a function on the worker's thread after all earlier calls, without waiting for it."""
        call = Posted(function)
        self._calls.put(call)
        return call

    def end(self) -> None:
        """End the thread after it has run all functions that were given to `call` and `post`.

        Returns at once. Safe to call twice.
        """
        self._calls.put(None)

    def join(self) -> None:
        """Wait until the thread has ended. Does nothing on the worker's own thread."""
        if not self._is_here():
            self._task.join()

    def _is_here(self) -> bool:
        """Return whether the caller is on the worker's thread."""
        return threading.get_ident() == self._thread_id
