"""How many bytes of requests are in memory at once."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# What reading a body takes, its tokens and llama.cpp's objects among it, for each of its bytes.
# Measured: 37 for a text to be tokenized, 31 for one to be answered.
BODY_FACTOR = 40
# Of a body whose answer has begun, so much of that is left at most.
LEFT = 1 / 8
# Who held more than this lets the allocator give memory back that would else stay with it.
TRIM_FROM_BYTES = 2**15


def bodies_bytes(longest_bytes: int, parallel: int) -> int:
    """How long bodies may be together: some full contexts for each answer that decodes, and beside
    them the longest one, as which a body counts that does not say how long it is."""
    return longest_bytes * (2 + parallel // 4)


class Bodies:
    """Lets bodies in as there is room for them. Of one event loop.

    A short one may pass a long one that waits: else one client would hold up all others.
    """

    def __init__(self, workers: Executor) -> None:
        """workers: where memory is given back."""
        self.held_bytes = 0
        self._line: list[tuple[int, int, asyncio.Future[None]]] = []
        self._workers = workers

    async def hold(self, n_bytes: int, most_bytes: int) -> Hold:
        """Waits until n_bytes more are at most most_bytes, or the only ones."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((n_bytes, most_bytes, turn))
        self._call()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give(n_bytes)
            self._call()
            raise
        return Hold(self._give, n_bytes)

    def _call(self) -> None:
        waiting = []
        for n_bytes, most_bytes, turn in self._line:
            if turn.done():
                continue  # its client left
            if self.held_bytes and self.held_bytes + n_bytes > most_bytes:
                waiting.append((n_bytes, most_bytes, turn))
            else:
                self.held_bytes += n_bytes
                turn.set_result(None)
        self._line = waiting

    def _give(self, n_bytes: int) -> None:
        self.held_bytes -= n_bytes
        self._call()
        if n_bytes >= TRIM_FROM_BYTES:
            with suppress(RuntimeError):  # the server ends
                self._workers.submit(trim)


class Hold:
    """The place of one body. Release it, once or more often."""

    def __init__(self, give: Callable[[int], None], n_bytes: int) -> None:
        self._give, self.n_bytes = give, n_bytes

    def shrink(self, n_bytes: int) -> None:
        """Gives back all but so many bytes."""
        if n_bytes < self.n_bytes:
            back, self.n_bytes = self.n_bytes - n_bytes, n_bytes
            self._give(back)

    def release(self) -> None:
        self.shrink(0)


class Holding:
    """An answer that holds its request's body: all of it until its first part has come."""

    def __init__(self, answer: ASGIApp, hold: Hold) -> None:
        self._answer, self._hold = answer, hold

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = int(self._hold.n_bytes * LEFT)

        async def sending(message: Message) -> None:
            part = message.get("body", b"")
            if part and not part.startswith(b":"):  # a comment says that the work goes on
                self._hold.shrink(left)
            await send(message)

        try:
            await self._answer(scope, receive, sending)
        finally:
            self._hold.release()


def trim() -> None:
    """Lets the allocator give back what nobody uses, where it can (glibc)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
