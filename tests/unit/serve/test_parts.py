"""Parts of an answer on their way from a thread to the event loop: complete, in order, and without
delay."""

import asyncio
import os
import threading
import time

import pytest
from asgi import HANG_S, end_of, in_a_loop

from orchestrator.runtime import answer as runtime_module
from orchestrator.runtime.answer import FAST, Answer
from orchestrator.serve import answer as module
from orchestrator.serve.admission import finish_despite_cancel
from orchestrator.serve.answer import Parts

N = 20_000
# A rest that is not shortened takes ten times the timeout of a deadlock.
LONG_S = 10 * HANG_S


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock the test moves forward, so no test depends on the machine's
    speed."""

    def __init__(self):
        super().__init__()
        self._skipped_s, self._rests, self._changed = 0.0, 0, threading.Condition()

    def time(self):
        return super().time() + self._skipped_s

    def call_at(self, when, *args, **context):
        timer = super().call_at(when, *args, **context)
        with self._changed:
            self._rests += when > self.time() + HANG_S
            self._changed.notify_all()
        return timer

    def until_rest(self, number):
        """From another thread: wait until a long timer was started this many times."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._rests >= number, HANG_S), (
                "no long timer was started"
            )

    def skip(self):
        """From another thread: let all timers expire that were started before this call."""
        self._skipped_s += 2 * LONG_S
        self.call_soon_threadsafe(lambda: None)


class Made:
    """A request that behaves like the native one: after `take` found nothing, the next part writes
    one byte to the pipe."""

    def __init__(self, make, loop):
        self._make, self._changed = make, threading.Condition()
        self._come, self._awaited, self._ready = b"", False, -1
        self._ended = False
        self.loop = loop
        self.told = 0
        self.cancelled, self.closed = threading.Event(), threading.Event()

    def run(self, ready):
        self._ready = ready
        try:
            self._make(self)
        finally:
            with self._changed:
                self._ended = True
            os.write(ready, b"\0")

    def put(self, text):
        with self._changed:
            self._come += text
            if self._awaited:
                self._awaited = False
                self.told += 1
                os.write(self._ready, b"\0")

    def take(self):
        with self._changed:
            text, self._come = self._come, b""
            self._awaited = not text
            self._changed.notify_all()
            return text, self._ended

    def until_taken(self):
        """From the producing thread: wait until all parts have been taken."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._come, HANG_S), "the part was not taken"

    def until_awaited(self):
        """From the producing thread: wait until the consumer has found nothing and waits for a
        byte."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._awaited, HANG_S), (
                "the consumer does not wait"
            )

    def cancel(self):
        self.cancelled.set()

    def close(self):
        self.closed.set()


def answer_of(request):
    def no_costs(_answer):
        return {}

    def run(_answer, ready):
        request.run(ready)

    ending = lambda: None, lambda: 0.0, lambda: ("end", False), lambda: ""
    return Answer(request, run, no_costs, *ending, "")


def through(make, use):
    """Run a coroutine on the parts of a request. Returns its result and the request."""
    loop = Loop()
    request = Made(make, loop)

    async def run():
        parts = Parts(answer_of(request), lambda: None)
        try:
            return await use(parts, request)
        finally:
            await parts.close()

    try:
        return loop.run_until_complete(run()), request
    finally:
        loop.close()


def rest(monkeypatch, seconds):
    """Set the time that fast parts wait for the next one."""
    for each in (module, runtime_module):
        monkeypatch.setattr(each, "REST_S", seconds)


async def all_of(parts, _request):
    """All parts that are not empty. If a wake-up is lost, the producing thread fails after
    HANG_S."""
    found, is_all = [], False
    while not is_all:
        text, is_all = await parts.next(None)
        found += [text] if text else []
    return found


def test_all_parts_arrive_in_order(monkeypatch):
    """No wake-up is lost, whatever the timing of the two threads."""
    rest(monkeypatch, 1e-4)

    def make(request):
        for number in range(N):
            request.put(b"%d\n" % number)
            if number % 64 == 0:
                time.sleep(1e-5)  # so that the event loop waits from time to time
        request.until_taken()  # the end of the request would also wake the loop

    found, _ = through(make, all_of)
    assert [int(line) for line in b"".join(found).splitlines()] == list(range(N))


def put_fast(request, text):
    """Put FAST parts in a row, after which further parts are collected."""
    for _ in range(FAST):
        request.put(text)
        request.until_taken()
    request.loop.until_rest(1)


@pytest.fixture
def long_rest(monkeypatch):
    rest(monkeypatch, LONG_S)


def test_fast_parts_are_collected(long_rest):
    """The first FAST parts go alone. Later ones are collected until the rest is over or the answer
    has ended."""

    def make(request):
        put_fast(request, b"a")
        for _ in range(50):
            request.put(b"b")
        request.loop.skip()
        request.until_taken()
        for _ in range(50):
            request.put(b"c")

    found, request = through(make, all_of)
    assert found == [b"a"] * FAST + [b"b" * 50, b"c" * 50]
    assert request.told <= FAST


def test_slow_parts_go_at_once(long_rest):
    """Parts are sent at once if they come slowly from the start, or slowly after fast ones."""

    def make(request):
        def put_slowly(text):
            request.until_awaited()
            request.loop.skip()
            request.put(text)
            request.until_taken()

        for _ in range(5):
            put_slowly(b"a")
        put_fast(request, b"b")
        request.loop.skip()  # otherwise a part that comes now would wait
        for _ in range(3):
            put_slowly(b"c")

    found, request = through(make, all_of)
    assert found == [b"a"] * 5 + [b"b"] * FAST + [b"c"] * 3
    assert request.told >= 8


def test_the_end_waits_for_nothing(long_rest):

    def make(request):
        put_fast(request, b"a")
        request.put(b"b")

    async def use(parts, request):
        return await end_of(all_of(parts, request))

    assert through(make, use)[0] == [b"a"] * FAST + [b"b"]


def test_a_cancelled_consumer_ends_the_work():
    """The work ends, later parts wake nothing, and the loop has no unhandled error."""

    def make(request):
        request.cancelled.wait(HANG_S)
        request.put(b"late")

    async def use(parts, _request):
        errors = []
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


def test_an_exception_of_the_thread_is_raised():
    def make(_request):
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        through(make, all_of)


@in_a_loop
async def test_a_cancelled_task_ends_its_thread_first():
    """The work is told to end even if its awaiting task was cancelled. Otherwise it would continue
    for HANG_S."""
    ended = threading.Event()
    loop = asyncio.get_running_loop()
    work = loop.run_in_executor(None, ended.wait, HANG_S)
    waiting = asyncio.create_task(finish_despite_cancel(work, ended.set))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert work.done() and work.result()


@in_a_loop
async def test_close_waits_for_the_end_callback():
    """`close` waits for the callback of the end, even if the thread has already ended."""
    seen = []
    answer = answer_of(Made(lambda _: None, None))
    parts = Parts(answer, lambda: seen.append("end"))
    while not answer.has_ended:
        time.sleep(1e-3)  # without running the event loop
    await parts.close()
    assert seen == ["end"]
