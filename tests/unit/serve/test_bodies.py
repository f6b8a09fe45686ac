"""Bodies together are as long as there is room for, and clients that leave hold nothing."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("starlette", reason="starlette is missing: run `make build`")

from asgi import Client, FakeBackend, FakeRequest, state_with

from orchestrator.serve.app import application
from orchestrator.serve.backend import server_config
from orchestrator.serve.bodies import BODY_FACTOR, Bodies, Hold, bodies_bytes

WORKERS = ThreadPoolExecutor(1)


def test_bodies_wait_for_room_and_short_ones_pass() -> None:
    async def run() -> None:
        bodies = Bodies(WORKERS)
        first = await bodies.hold(80, 100)
        long = asyncio.create_task(bodies.hold(40, 100))
        left = asyncio.create_task(bodies.hold(30, 100))
        short = await bodies.hold(20, 100)
        left.cancel()
        first.shrink(60)
        assert bodies.held_bytes == 80 and not long.done()
        first.shrink(40)
        held = await long
        assert bodies.held_bytes == 100
        for each in (first, first, short, held):
            each.release()
        assert bodies.held_bytes == 0
        whole = await bodies.hold(500, 100)  # alone, it may be longer than all together
        whole.release()

    asyncio.run(run())


def test_who_leaves_with_its_turn_gives_it_back() -> None:
    async def run() -> None:
        bodies = Bodies(WORKERS)
        first = await bodies.hold(100, 100)
        second = asyncio.create_task(bodies.hold(100, 100))
        third = asyncio.create_task(bodies.hold(100, 100))
        await asyncio.sleep(0)
        first.release()
        second.cancel()  # its turn has come, and it has not run
        held: Hold = await third
        assert bodies.held_bytes == 100 == held.n_bytes

    asyncio.run(run())


def test_a_body_of_unknown_length_waits_for_no_answer() -> None:
    async def run() -> None:
        bodies = Bodies(WORKERS)
        running = await bodies.hold(100, bodies_bytes(1000, 1))
        unknown = await bodies.hold(1000, bodies_bytes(1000, 1))
        assert bodies.held_bytes == running.n_bytes + unknown.n_bytes

    asyncio.run(run())


def test_each_request_gives_its_room_back() -> None:
    """Also one that is refused, and each of many at once on a path without a line."""
    answers = [FakeRequest(200, False, [b"{}"]) for _ in range(20)]
    state = state_with(FakeBackend(*answers))
    app = application(state, lambda _line: None)
    peaks = []

    async def once(path: str, body: bytes) -> int:
        reply = await Client(app, "POST", path, body, content_length=str(len(body))).run()
        peaks.append(state.bodies.held_bytes)
        return reply.status

    async def run() -> list[int]:
        text = b'{"content": "' + b"a" * 60_000 + b'"}'
        asks = [once("/tokenize", text) for _ in range(10)]
        asks += [once("/v1/completions", b'{"prompt": "a"}'), once("/v1/completions", b"{")]
        return await asyncio.gather(*asks)

    assert asyncio.run(run()) == [200] * 11 + [400]
    assert state.bodies.held_bytes == 0
    assert max(peaks) <= bodies_bytes(2**17, 1)


def test_the_plan_counts_them(tmp_path: object) -> None:
    from orchestrator.config import Config

    config = Config.build(model="a.gguf")
    one, longer, more = (
        server_config(config, parallel, longest).beside
        for parallel, longest in ((1, 1000), (1, 2000), (4, 1000))
    )
    assert longer - one == 2 * BODY_FACTOR * 1000
    assert more - one > BODY_FACTOR * 1000
