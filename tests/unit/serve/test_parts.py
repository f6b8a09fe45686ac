"""What comes of an answer, from a thread to the event loop: all of it, in order, and none waits."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from orchestrator.serve import parts as module
from orchestrator.serve.parts import REST_S, Parts

N = 20_000


class Made:
    """A request as the native one: who takes nothing is told of what comes next, once."""

    def __init__(self, make: Callable[[Made], None]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._come, self._awaited, self._ready = b"", False, -1
        self._ended = False
        self.told = 0
        self.cancelled = threading.Event()

    def run(self, ready: int) -> None:
        self._ready = ready
        try:
            self._make(self)
        finally:
            with self._lock:
                self._ended = True
            os.write(ready, b"\0")

    def put(self, text: bytes) -> None:
        with self._lock:
            self._come += text
            if self._awaited:
                self._awaited = False
                self.told += 1
                os.write(self._ready, b"\0")

    def take(self) -> tuple[bytes, bool]:
        with self._lock:
            text, self._come = self._come, b""
            self._awaited = not text
            return text, self._ended

    def cancel(self) -> None:
        self.cancelled.set()


def through(make: Callable[[Made], None], use: Callable[[Parts], Any]) -> tuple[Any, Made]:
    """What a coroutine makes of the parts of such a request, and the request."""
    request = Made(make)

    async def run() -> Any:
        with ThreadPoolExecutor(1) as workers:
            parts = Parts(request, workers)  # type: ignore[arg-type]
            try:
                return await use(parts)
            finally:
                await parts.close()

    return asyncio.run(run()), request


async def all_of(parts: Parts) -> list[bytes]:
    found, is_all = [], False
    while not is_all:
        come = await parts.next(20)
        assert come is not None, f"a wake-up is lost behind {len(found)} parts"
        text, is_all = come
        found.append(text)
    return found


def test_all_of_it_arrives_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the two meet: a wake-up that is lost would leave a stream silent."""
    monkeypatch.setattr(module, "REST_S", 1e-4)

    def make(request: Made) -> None:
        for number in range(N):
            request.put(b"%d\n" % number)
            if number % 64 == 0:
                time.sleep(1e-5)  # so that the loop waits now and then

    found, _ = through(make, all_of)
    assert [int(line) for line in b"".join(found).splitlines()] == list(range(N))


def test_fast_parts_go_together_and_slow_ones_at_once() -> None:
    def fast(request: Made) -> None:
        for _ in range(100):
            request.put(b"a")
            time.sleep(REST_S / 10)

    found, request = through(fast, all_of)
    assert b"".join(found) == b"a" * 100
    assert len(found) < 40 and request.told < 10

    def slow(request: Made) -> None:
        for _ in range(5):
            time.sleep(2 * REST_S)
            request.put(b"a")

    found, request = through(slow, all_of)
    assert [text for text in found if text] == [b"a"] * 5
    assert request.told == 5


def test_parts_that_become_slow_do_not_wait_for_each_other() -> None:
    times: list[float] = []

    def make(request: Made) -> None:
        for _ in range(4):
            request.put(b"a")
            time.sleep(REST_S / 4)
        for _ in range(3):
            time.sleep(3 * REST_S)
            times.append(time.monotonic())
            request.put(b"b")

    async def use(parts: Parts) -> list[float]:
        seen: list[float] = []
        is_all = False
        while not is_all:
            come = await parts.next(20)
            assert come is not None
            text, is_all = come
            seen += [time.monotonic()] * text.count(b"b")
        return seen

    seen, _ = through(make, use)
    assert len(seen) == 3
    assert seen[2] - times[2] < REST_S / 2  # the first one may have waited


def test_the_end_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REST_S", 5.0)
    ended: list[float] = []

    def make(request: Made) -> None:
        for _ in range(8):
            request.put(b"a")
            time.sleep(0.02)
        ended.append(time.monotonic())

    async def use(parts: Parts) -> float:
        await all_of(parts)
        return time.monotonic()

    at, _ = through(make, use)
    assert at - ended[0] < 1


def test_what_does_not_come_in_time_is_said() -> None:
    go = threading.Event()

    def make(request: Made) -> None:
        go.wait(20)
        request.put(b"a")

    async def use(parts: Parts) -> list[Any]:
        said = [await parts.next(0.01), await parts.next(0.01)]
        go.set()
        return [*said, (await parts.next(None) or (b"", True))[0]]

    assert through(make, use)[0] == [None, None, b"a"]


def test_who_is_cancelled_waits_no_more() -> None:
    """The work ends, and what comes afterwards wakes nobody; no error is left in the loop."""

    def make(request: Made) -> None:
        request.cancelled.wait(20)
        request.put(b"late")

    async def use(parts: Parts) -> list[object]:
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, what: errors.append(what))
        waiting = asyncio.create_task(parts.next(None))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        await parts.close()
        await asyncio.sleep(0.01)
        return errors

    errors, request = through(make, use)
    assert errors == [] and request.cancelled.is_set()


def test_what_the_thread_raises_is_raised() -> None:
    def make(_request: Made) -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        through(make, all_of)
