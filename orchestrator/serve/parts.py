"""The parts of an answer, on their way from the thread that makes them to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Parts(Generic[T]):
    """A queue with one thread that puts and one coroutine that takes.

    A token of a small model takes as long as what asyncio's own queue, timeouts and a task for
    each part take together, so a part costs one call into the loop, and none where nobody waits.
    """

    def __init__(self) -> None:
        """In the event loop that takes."""
        self._loop = asyncio.get_running_loop()
        self._said: deque[T] = deque()
        self._waiter: asyncio.Future[bool] | None = None

    def put(self, part: T) -> None:
        """From any thread. Raises RuntimeError once the loop is closed."""
        self._said.append(part)
        # Who takes looks once more behind having said that it waits.
        if self._waiter is not None:
            self._loop.call_soon_threadsafe(self._wake)

    async def coming(self, within_s: float | None) -> bool:
        """Waits for a part; False where there is none within so many seconds (None: for ever)."""
        self._waiter = self._loop.create_future()
        if self._said:
            self._waiter = None
            return True
        late = None if within_s is None else self._loop.call_later(within_s, self._answer, False)
        try:
            return await self._waiter
        finally:
            self._waiter = None
            if late is not None:
                late.cancel()

    def take(self) -> T:
        """The next part. Raises IndexError where there is none."""
        return self._said.popleft()

    def __bool__(self) -> bool:
        return bool(self._said)

    def _wake(self) -> None:
        if self._said:  # else it was taken before this call came
            self._answer(True)

    def _answer(self, is_here: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(is_here)
