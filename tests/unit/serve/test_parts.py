"""Parts on their way from a thread to the event loop: all of them, in order, and none waits."""

from __future__ import annotations

import asyncio
import threading
import time

from orchestrator.serve.parts import Parts

N = 20_000


def test_every_part_arrives_in_order() -> None:
    """However the two meet: a wake-up that is lost would leave a stream silent."""

    async def taken() -> list[int]:
        parts: Parts[int] = Parts()

        def make() -> None:
            for number in range(N):
                parts.put(number)
                if number % 64 == 0:
                    time.sleep(1e-5)  # so that the loop waits now and then

        thread = threading.Thread(target=make)
        thread.start()
        found: list[int] = []
        while len(found) < N:
            while not parts:
                assert await parts.coming(20), f"the wake-up for part {len(found)} is lost"
            found.append(parts.take())
        thread.join()
        assert not parts
        return found

    assert asyncio.run(taken()) == list(range(N))


def test_what_does_not_come_in_time_is_said() -> None:
    async def wait() -> list[bool]:
        parts: Parts[str] = Parts()
        said = [await parts.coming(0.01)]
        parts.put("a")
        said.append(await parts.coming(0.01))
        parts.take()
        asyncio.get_running_loop().call_later(0.02, parts.put, "b")
        said.append(await parts.coming(None))
        return said

    assert asyncio.run(wait()) == [False, True, True]


def test_a_call_that_comes_late_wakes_nobody() -> None:
    """The second part is put while who waits is on its way, and taken with the first one."""

    async def wait() -> tuple[list[str], bool]:
        parts: Parts[str] = Parts()
        loop = asyncio.get_running_loop()

        def put() -> None:
            parts.put("a")
            loop.call_soon(parts.put, "b")

        loop.call_soon(put)
        assert await parts.coming(None)
        found = [parts.take(), parts.take()]
        return found, await parts.coming(0.05)

    assert asyncio.run(wait()) == (["a", "b"], False)


def test_who_is_cancelled_waits_no_more() -> None:
    """A part that comes afterwards wakes nobody, and no error is left in the loop."""

    async def leave() -> list[object]:
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, what: errors.append(what))
        parts: Parts[str] = Parts()
        waiting = asyncio.create_task(parts.coming(None))
        await asyncio.sleep(0)
        thread = threading.Thread(target=parts.put, args=("late",))
        thread.start()
        thread.join()  # its call into the loop is on its way
        waiting.cancel()
        await asyncio.wait({waiting})
        await asyncio.sleep(0)
        assert waiting.cancelled() and parts
        return errors

    assert asyncio.run(leave()) == []
