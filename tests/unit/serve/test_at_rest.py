"""What a server does while nothing is asked for: until the first request, and behind the last one
in flight."""

import asyncio
import itertools
import threading
from contextlib import closing

import pytest
from asgi import HANG_S, ask, at_once, begun, end_of, in_a_loop
from fake_backend import quiet, state_with
from paths import CHAT, COMPLETIONS
from served import DEMO, server_library

from orchestrator.config import Config
from orchestrator.engine import probe
from orchestrator.engine.idle import Idle
from orchestrator.engine.steps import Held
from orchestrator.serve.app import application
from orchestrator.serve.backend import Backend
from orchestrator.serve.settings import ServeSettings

ASK = {"prompt": "Tell", "max_tokens": 2, "temperature": 0, "ignore_eos": True}


def made(parallel=1, **settings):
    usual = {"policy": "lru", "high_tier": "q8_0", "expert_ram": 24 * 2**20}
    sizes = {"ctx": 512, "threads": 1, "ubatch": 64}
    config = Config.build(**{"model": DEMO} | usual | sizes | settings)
    return Backend(config, ServeSettings(parallel=parallel), server_library(), lambda *_: None)


def app_of(backend):
    state = state_with(backend, parallel=backend.parallel)
    state.gate.open(backend.cells)
    return application(state, quiet)


def said(app, *asked):
    return [each["choices"] for each in at_once(app, COMPLETIONS, *asked)]


@pytest.fixture
def backend():
    with closing(made()) as found:
        yield found


@pytest.fixture
def asked_at_once(monkeypatch):
    """One that had no time for anything until now."""
    with monkeypatch.context() as patched:
        patched.setattr(Idle, "start", lambda *_: None)
        found = made()
    with closing(found):
        yield found


def test_experts_come_in_until_a_request_and_behind_it(backend, asked_at_once):
    """The answers are what they are without, and nothing is read for nobody beside them."""
    driver, store, app = backend.engine.driver, backend.engine.store, app_of(backend)
    driver._idle.wait()
    assert driver.brought > 0 and store.full
    expected = said(app, ASK)
    store.check()
    other = asked_at_once
    driver, store, app = other.engine.driver, other.engine.store, app_of(other)
    beside = []
    store.set_step_done(lambda _: beside.append(driver._idle._thread))
    assert driver.brought == 0 and said(app, ASK) == expected
    driver._idle.wait()
    assert driver.brought > 0 and store.full
    assert said(app, ASK) == expected
    assert len(beside) > 2 and not any(beside)
    store.check()


@in_a_loop
async def test_it_waits_for_the_step_of_one_who_left(asked_at_once, monkeypatch):
    """Its request has ended, and its step runs on."""
    backend = asked_at_once
    driver, store = backend.engine.driver, backend.engine.store
    in_step, settling, go_on = threading.Event(), threading.Event(), threading.Event()
    settle, seen = driver.settle, []

    def held(_):
        in_step.set()
        assert go_on.wait(HANG_S)
        seen.append("step")

    def settles():
        settling.set()
        settle()
        seen.append("idle")

    store.set_step_done(held)
    monkeypatch.setattr(driver, "settle", settles)
    app = app_of(backend)
    client, task = begun(app, COMPLETIONS, ASK)
    loop = asyncio.get_running_loop()
    assert await loop.run_in_executor(None, in_step.wait, HANG_S)
    client.leave()
    await end_of(task)
    assert await loop.run_in_executor(None, settling.wait, HANG_S)
    go_on.set()
    driver._idle.wait()
    assert seen == ["step", "idle"]


def test_figures_do_not_end_it(backend):
    thread, app = backend.engine.driver._idle._thread, app_of(backend)
    assert thread is not None
    assert [ask(app, path).status for path in ("/metrics", "/experts", "/props")] == [200] * 3
    assert backend.engine.driver._idle._thread is thread


@pytest.fixture
def learning(tmp_path):
    """Makes servers of a model without a table, which may lose something."""
    model = tmp_path / DEMO.name
    model.symlink_to(DEMO.resolve())

    def make(parallel=1, **settings):
        allowed = {"policy": "floor", "max_loss": 0.5, "remember": True}
        return made(parallel, model=model, **allowed | {"expert_ram": 14 * 2**20} | settings)

    return make


def turn(about, *before):
    """A question behind earlier ones and their answers."""
    said = [*before, f"Tell me about {about}."]
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return {"messages": messages, "max_tokens": 12, "temperature": 0}


def chatted(app, *asked):
    return at_once(app, CHAT, *asked)


def text_of(answer):
    return str(answer["choices"][0]["message"]["content"])


def probed(backend):
    """Answers and tokens that were probed, once all has been."""
    backend.engine.driver._idle.wait()
    backend.engine.store.check()
    found = backend.engine._loader.learned.usage.probed()
    return found.answers, round(found.moments[0])


def test_it_learns_what_skipping_loses_between_requests(learning):
    """Of each prompt what is new; then it skips. Until then answers are what they are without."""
    with closing(learning(remember=False)) as without:
        app = app_of(without)
        first = chatted(app, turn("Norway"))[0]
        second = chatted(app, turn("Peru", "Tell me about Norway.", text_of(first)))[0]
        assert probed(without) == (0, 0) and without.engine.config.probes == 0
    with closing(learning()) as backend:
        app = app_of(backend)
        found = chatted(app, turn("Norway"))[0]
        n_first = found["usage"]["prompt_tokens"]
        assert found["choices"] == first["choices"] and probed(backend) == (1, n_first - 1)
        before = ("Tell me about Norway.", text_of(found))
        found = chatted(app, turn("Peru", *before))[0]
        n_more = found["usage"]["prompt_tokens"] - n_first
        assert found["choices"] == second["choices"]
        assert probed(backend) == (2, n_first - 1 + n_more) and n_more > 12
        assert chatted(app, turn("Peru", *before))[0]["choices"] == second["choices"]
        assert probed(backend)[0] == 2  # nothing of it is new
        assert found["timings"]["kl_estimate"] is None
        chatted(app, turn("bread"))
        assert probed(backend)[0] == 3
        costs = chatted(app, turn("rivers"))[0]["timings"]
        assert 0 < costs["kl_estimate"] <= 0.5
        assert probed(backend)[0] == 4
        # A sequence that no longer holds its prompt is left alone.
        backend.attend()
        assert backend.forget(0) and backend._heard is not None
        backend._heard._last = Held(0, [1, 2, 3], 1)
        backend.idle()
        assert probed(backend)[0] == 4


def test_a_request_ends_what_is_learned_from_the_last_one(learning, monkeypatch):
    with closing(learning(remember=False)) as without:
        expected = [chatted(app_of(without), turn(each))[0]["choices"] for each in ("Peru", "tea")]
    begun_to, seen, real = threading.Event(), [], probe.log_softmax

    def slow(logits):
        seen.append(0)
        if len(seen) == 5:
            begun_to.set()
            while not backend.engine.driver._idle._stopping:
                assert not gone.wait(0.001)
        return real(logits)

    gone = threading.Event()
    monkeypatch.setattr(probe, "log_softmax", slow)
    with closing(learning()) as backend:
        app = app_of(backend)
        assert chatted(app, turn("Peru"))[0]["choices"] == expected[0]
        assert begun_to.wait(HANG_S)
        assert chatted(app, turn("tea"))[0]["choices"] == expected[1]
        assert probed(backend)[0] == 2 and len(seen) > 5
        assert backend.engine._loader.learned.usage.probed().moments[0] > 2


def test_several_at_once_are_learned_from_too(learning):
    """From the one that ended last, in sequences of its own."""
    with closing(learning(2)) as backend:
        answers = chatted(app_of(backend), turn("Norway"), turn("the moon"))
        lengths = {each["usage"]["prompt_tokens"] - 1 for each in answers}
        answers_probed, n_tokens = probed(backend)
        assert answers_probed == 1 and n_tokens in lengths
        again = chatted(app_of(backend), turn("Norway"), turn("the moon"))
        assert [text_of(each) for each in again] == [text_of(each) for each in answers]
