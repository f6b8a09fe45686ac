"""What comes of an answer, on its way from the thread that makes it to the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from typing import TypeVar

from orchestrator.native import NativeRequest

T = TypeVar("T")

# Tokens that come faster than this go out together: nobody sees the difference, and each way to a
# client takes time from the cores that compute.
REST_S = 0.04
# So many have to come fast before the next ones wait for each other.
FAST = 2


async def outlasting(work: asyncio.Future[T], give_up: Callable[[], None] = lambda: None) -> T:
    """What comes of work on a thread. Where this is cancelled it still ends with the work, whose
    memory is in use until then. give_up: asks the work to end soon."""
    try:
        return await asyncio.shield(work)
    finally:
        give_up()
        await asyncio.wait({work})
        if not work.cancelled():
            work.exception()  # nobody else asks for it where this was cancelled


class Parts:
    """One request, which runs on a thread of its own, and one coroutine that takes what comes.
    Close it, also where it was not taken to its end."""

    def __init__(
        self, request: NativeRequest, workers: Executor, at_end: Callable[[], None]
    ) -> None:
        """In the event loop that takes. at_end: called once the work has ended, however much of
        what came of it is taken. Raises OSError where no file descriptors are left, and the request
        is closed."""
        self._loop = asyncio.get_running_loop()
        self._request, self._at_end = request, at_end
        self._waiter: asyncio.Future[bool] | None = None
        self._told = False
        self._fast, self._last_s = 0, self._loop.time()
        with ExitStack() as undo:
            undo.callback(request.close)
            self._from, self._to = os.pipe()
            undo.callback(self._close_pipe)
            os.set_blocking(self._from, False)
            os.set_blocking(self._to, False)
            self._loop.add_reader(self._from, self._tell)
            self._thread = self._loop.run_in_executor(workers, request.run, self._to)
            undo.pop_all()
        self._thread.add_done_callback(self._clear)

    async def next(self, within_s: float | None) -> tuple[bytes, bool] | None:
        """(what has come, whether that was all); None where nothing did within so many seconds
        (None: for ever)."""
        if self._fast >= FAST:
            await self._coming(REST_S)  # shorter at the end of the answer
            text, is_all = self._request.take()
            if text or is_all:
                return text, is_all
            self._fast = 0
        while True:
            text, is_all = self._request.take()
            if text or is_all:
                now_s = self._loop.time()
                self._fast = self._fast + 1 if now_s - self._last_s < REST_S else 0
                self._last_s = now_s
                return text, is_all
            if not await self._coming(within_s):
                return None

    async def close(self) -> None:
        """Ends the work, and returns when it has ended. Raises what the thread raised."""
        self._request.cancel()
        await asyncio.shield(self._thread)

    async def _coming(self, within_s: float | None) -> bool:
        """Waits for a byte of the thread; False where there is none within so many seconds."""
        if self._told:
            self._told = False
            return True
        self._waiter = self._loop.create_future()
        late = None if within_s is None else self._loop.call_later(within_s, self._answer, False)
        try:
            return await self._waiter
        finally:
            self._waiter = None
            if late is not None:
                late.cancel()

    def _tell(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._from, 16)
        if self._waiter is None:
            self._told = True
        else:
            self._answer(True)

    def _answer(self, is_here: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(is_here)

    def _clear(self, _thread: asyncio.Future[None]) -> None:
        """The thread writes no more."""
        self._close_pipe()
        try:
            self._at_end()
        finally:
            self._answer(True)

    def _close_pipe(self) -> None:
        self._loop.remove_reader(self._from)
        os.close(self._from)
        os.close(self._to)
