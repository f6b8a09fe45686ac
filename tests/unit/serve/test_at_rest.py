"""Idle reads of a server: before the first request, and after the last running one."""

import asyncio
import threading

import pytest
from asgi import HANG_S, ask, at_once, begun, end_of, in_a_loop
from paths import COMPLETIONS
from real_served import app_of, served_with
from served import DEMO

from orchestrator.config import Config
from orchestrator.runtime.idle import Idle

ASK = {"prompt": "Tell", "max_tokens": 2, "temperature": 0, "ignore_eos": True}


def made(**settings):
    usual = {"policy": "lru", "high_tier": "q8_0", "expert_ram": 24 * 2**20}
    sizes = {"ctx": 512, "threads": 1, "ubatch": 64}
    config = Config.build(**{"model": DEMO} | usual | sizes | settings)
    return served_with(config)


def said(app, *asked):
    return [each["choices"] for each in at_once(app, COMPLETIONS, *asked)]


@pytest.fixture
def served():
    with made() as found:
        yield found


@pytest.fixture
def asked_at_once(monkeypatch):
    """A server without idle reads until the fixture returns."""
    start = Idle.start
    monkeypatch.setattr(Idle, "start", lambda *_: None)
    with made() as found:
        monkeypatch.setattr(Idle, "start", start)
        yield found


def test_idle_reads_run_before_and_after_requests(served, asked_at_once):
    """Idle reads do not change answers, and none run during a request."""
    driver, store, app = served.runtime.inside.driver, served.runtime.inside.store, app_of(served)
    driver._idle.wait()
    assert driver.prefetched > 0 and store.full
    expected = said(app, ASK)
    store.check()
    other = asked_at_once
    driver, store, app = other.runtime.inside.driver, other.runtime.inside.store, app_of(other)
    idle_threads = []
    store.set_step_done(lambda _: idle_threads.append(driver._idle._thread))
    assert driver.prefetched == 0 and said(app, ASK) == expected
    driver._idle.wait()
    assert driver.prefetched > 0 and store.full
    assert said(app, ASK) == expected
    assert len(idle_threads) > 2 and not any(idle_threads)
    store.check()


@in_a_loop
async def test_idle_reads_wait_for_the_step_of_a_client_that_left(asked_at_once, monkeypatch):
    served = asked_at_once
    driver, store = served.runtime.inside.driver, served.runtime.inside.store
    in_step, settling, go_on = threading.Event(), threading.Event(), threading.Event()
    native = served.runtime._native
    settle, seen = native.settle, []

    def held(_):
        in_step.set()
        assert go_on.wait(HANG_S)
        seen.append("step")

    def settles():
        settling.set()
        settle()
        seen.append("idle")

    store.set_step_done(held)
    monkeypatch.setattr(native, "settle", settles)
    app = app_of(served)
    client, task = begun(app, COMPLETIONS, ASK)
    loop = asyncio.get_running_loop()
    assert await loop.run_in_executor(None, in_step.wait, HANG_S)
    client.leave()
    await end_of(task)
    assert await loop.run_in_executor(None, settling.wait, HANG_S)
    go_on.set()
    driver._idle.wait()
    assert seen == ["step", "idle"]


def test_status_requests_do_not_stop_idle_reads(served):
    thread, app = served.runtime.inside.driver._idle._thread, app_of(served)
    assert thread is not None
    assert [ask(app, path).status for path in ("/metrics", "/experts", "/props")] == [200] * 3
    assert served.runtime.inside.driver._idle._thread is thread
