"""What a server does while nothing is asked for: until the first request, and behind the last one
in flight."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from asgi import HANG_S, ask, begun, quiet, state_with
from served import DEMO, server_library
from starlette.applications import Starlette

from orchestrator.config import Config
from orchestrator.engine.idle import Idle
from orchestrator.serve.app import application
from orchestrator.serve.backend import Backend
from orchestrator.serve.settings import ServeSettings

COMPLETIONS = "/v1/completions"
ASK = {"prompt": "Tell", "max_tokens": 2, "temperature": 0, "ignore_eos": True}


def made(parallel: int = 1, **settings: Any) -> Backend:
    usual: dict[str, Any] = {"policy": "lru", "high_tier": "q8_0", "expert_ram": 24 * 2**20}
    sizes = {"ctx": 512, "threads": 1, "ubatch": 64}
    config = Config.build(model=DEMO, **usual | sizes | settings)
    return Backend(config, ServeSettings(parallel=parallel), server_library(), lambda *_: None)


def app_of(backend: Backend) -> Starlette:
    state = state_with(backend, parallel=backend.parallel)
    state.gate.open(backend.cells)
    return application(state, quiet)


def said(app: Starlette, *asked: dict[str, Any]) -> list[Any]:
    """The answers to some requests at once."""

    async def all_at_once() -> list[Any]:
        replies = [begun(app, COMPLETIONS, each)[1] for each in asked]
        return [(await each).json()["choices"] for each in replies]

    return asyncio.run(all_at_once())


@pytest.fixture
def backend() -> Iterator[Backend]:
    with closing(made()) as found:
        yield found


@pytest.fixture
def asked_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """One that had no time for anything until now."""
    with monkeypatch.context() as patched:
        patched.setattr(Idle, "start", lambda *_: None)
        found = made()
    with closing(found):
        yield found


def test_experts_come_in_until_a_request_and_behind_it(
    backend: Backend, asked_at_once: Backend
) -> None:
    """The answers are what they are without, and nothing is read for nobody beside them."""
    driver, store, app = backend.engine.driver, backend.engine.store, app_of(backend)
    driver._idle.wait()
    assert driver.brought > 0 and store.full
    expected = said(app, ASK)
    store.check()
    other = asked_at_once
    driver, store, app = other.engine.driver, other.engine.store, app_of(other)
    beside: list[Any] = []
    store.set_step_done(lambda _: beside.append(driver._idle._thread))
    assert driver.brought == 0 and said(app, ASK) == expected
    driver._idle.wait()
    assert driver.brought > 0 and store.full
    assert said(app, ASK) == expected
    assert len(beside) > 2 and not any(beside)
    store.check()


def test_it_waits_for_the_step_of_one_who_left(
    asked_at_once: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request has ended, and its step runs on."""
    backend = asked_at_once
    driver, store = backend.engine.driver, backend.engine.store
    in_step, settling, go_on = threading.Event(), threading.Event(), threading.Event()
    settle, seen = driver.settle, []

    def held(_: object) -> None:
        in_step.set()
        assert go_on.wait(HANG_S)
        seen.append("step")

    def settles() -> None:
        settling.set()
        settle()
        seen.append("idle")

    store.set_step_done(held)
    monkeypatch.setattr(driver, "settle", settles)
    app = app_of(backend)

    async def leaves() -> None:
        client, task = begun(app, COMPLETIONS, ASK)
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, in_step.wait, HANG_S)
        client.leave()
        await asyncio.wait_for(task, HANG_S)
        assert await loop.run_in_executor(None, settling.wait, HANG_S)
        go_on.set()

    asyncio.run(leaves())
    driver._idle.wait()
    assert seen == ["step", "idle"]


def test_figures_do_not_end_it(backend: Backend) -> None:
    thread, app = backend.engine.driver._idle._thread, app_of(backend)
    assert thread is not None
    assert [ask(app, path).status for path in ("/metrics", "/experts", "/props")] == [200] * 3
    assert backend.engine.driver._idle._thread is thread
