"""How many bytes of requests are in memory at once.

A body counts once from its first byte on until its turn, whoever sends it. What is made of a body
takes many times as much. So one thread at a time works with a body before its turn, and after it
there are as many as may be answered at once.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.serve.parts import outlasting
from orchestrator.serve.wire import Refusal

T = TypeVar("T")

# What reading a body takes, its tokens and llama.cpp's objects among it, for each of its bytes.
# Measured: 37 for a text to be tokenized, 31 for one to be answered.
BODY_FACTOR = 40
# So many of the longest bodies may arrive and wait at once.
KEPT = 8
# What is made of small values takes more than other bodies do, a hundred times their length and
# above: a request has one value for so many bytes of the longest body; and so is a text shorter
# whose tokens are written as pieces, which take 250 times its length.
VALUE_BYTES, PIECES_SHARE = 12, 8
# The end of a body of this length lets the allocator give memory back that would else stay with it.
TRIM_FROM_BYTES = 2**15
# An entry of a request's state: its answer may wait for its client for longer than others.
PACES_ITSELF = "paces_itself"


def bodies_bytes(longest_bytes: int, parallel: int) -> int:
    """What bodies take together: those that arrive and wait, one that is looked at, and those of
    the answers that decode."""
    return longest_bytes * (KEPT + BODY_FACTOR * (1 + parallel))


class Bodies:
    """All bodies of a server. Of one event loop.

    kept_bytes: of those that arrive or wait; waiting: those that a thread will look at; refused:
    those that there was no room for, ever.
    """

    def __init__(self, workers: Executor) -> None:
        """workers: where bodies are looked at, and where memory is given back."""
        self.kept_bytes = self.waiting = self.refused = 0
        self._workers = workers
        self._one = asyncio.Lock()
        self._will_trim = False

    def keep(self, n_bytes: int, most_bytes: int) -> None:
        """Counts n_bytes more, or fewer. Raises Refusal where they are more than most_bytes then.
        Who waited for room could hold everybody up who sends nothing."""
        if n_bytes > 0 and self.kept_bytes + n_bytes > most_bytes:
            self.refused += 1
            raise Refusal(503, "other requests take the memory for requests: try again later")
        self.kept_bytes += n_bytes

    async def run(self, call: Callable[[], T]) -> T:
        """What call returns on a thread, which works with one body: after those before it. Where it
        is cancelled it ends with the work."""
        self.waiting += 1
        try:
            await self._one.acquire()
        finally:
            self.waiting -= 1
        try:
            loop = asyncio.get_running_loop()
            return await outlasting(loop.run_in_executor(self._workers, call))
        finally:
            self._one.release()

    def trim_soon(self) -> None:
        """Gives memory back, once for all who ask before it is done."""
        if self._will_trim:
            return
        with suppress(RuntimeError):  # the server ends
            self._workers.submit(self._trim)
            self._will_trim = True

    def _trim(self) -> None:
        self._will_trim = False
        trim()


class Body:
    """The body of one request. data: its bytes, until its turn. Close it."""

    def __init__(self, bodies: Bodies, longest_bytes: int) -> None:
        """longest_bytes: of any request's body."""
        self.data = b""
        self._bodies, self._most_bytes = bodies, KEPT * longest_bytes
        self._n_bytes = self._n_most = 0

    def count(self, n_bytes: int) -> None:
        """It is n_bytes long by now. Raises Refusal where there is no room for more."""
        self._bodies.keep(n_bytes - self._n_bytes, self._most_bytes)
        self._n_bytes = n_bytes
        self._n_most = max(self._n_most, n_bytes)

    async def run(self, call: Callable[[], T]) -> T:
        """What call, which works with this body, returns on a thread of its own."""
        return await self._bodies.run(call)

    def take(self) -> bytes:
        """The bytes, at its turn: from now on it is one of those that are answered."""
        data, self.data = self.data, b""
        self.count(0)
        return data

    def close(self) -> None:
        """Once nothing that was made of it is in use."""
        self.take()
        if self._n_most >= TRIM_FROM_BYTES:
            self._bodies.trim_soon()


class Holding:
    """An answer, and the body of its request until its end. paces_itself: it has bounds of its own
    for a client that does not read."""

    def __init__(self, answer: ASGIApp, body: Body, *, paces_itself: bool) -> None:
        self._answer, self._body, self._paces_itself = answer, body, paces_itself

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._paces_itself:
            scope.setdefault("state", {})[PACES_ITSELF] = True
        try:
            await self._answer(scope, receive, send)
        finally:
            self._body.close()


def trim() -> None:
    """Lets the allocator give back what nobody uses, where it can (glibc)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
