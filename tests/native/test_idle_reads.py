"""Experts that come in while nothing is asked for: the answers stay, and nothing else goes."""

import os
import signal
import threading

import numpy as np
import pytest

from gguf_tools import interrupts
from orchestrator.config import Sampling
from orchestrator.errors import ConfigError
from orchestrator.events import ABSENT
from orchestrator.lab.replay.record import Recorder

from . import conftest
from .conftest import drawn

PROMPT = drawn(24, 5)


@pytest.fixture(params=["lru", "dymoe", "firm"])
def policy(request):
    return request.param


def opened(model, policy, **settings):
    return conftest.opened(model, 0.6, policy=policy, use_extra_bufts=False, **settings)


def idle(engine):
    """Everything that comes in has come in."""
    driver = engine.driver
    engine.idle()
    driver._idle.wait()
    engine.store.check()
    return driver


def logits(engine, between=lambda: None):
    """Of a prompt and eight tokens of its answer."""
    rows = [engine.eval(PROMPT, 0)[-1]]
    for i in range(8):
        between()
        rows.append(engine.eval([int(rows[-1].argmax())], len(PROMPT) + i)[-1])
    return np.stack(rows)


def test_answers_are_the_same(policy, device, one):
    where = {"device": device} if device else {}
    with opened(one, policy, **where) as engine:
        expected = logits(engine)
    with opened(one, policy, **where) as engine:
        engine.cancel()  # a stopped answer does not keep it from reading
        assert idle(engine).brought > 0
        np.testing.assert_array_equal(logits(engine), expected)
        # a request may come at any moment: it ends what is going on
        np.testing.assert_array_equal(logits(engine, engine.idle), expected)
        engine.store.check()
        with pytest.raises(ConfigError, match="record with a new engine"):
            Recorder(engine)


def test_what_was_used_most_is_in_memory_afterwards(policy, one):
    with opened(one, policy, remember=True) as engine:
        list(engine.generate(PROMPT, Sampling(temp=0.0, seed=1), 16))
        used = engine.driver.used()
    with opened(one, policy, remember=True) as engine:
        store = engine.store
        kept = engine._loader.history.usage.recall()
        np.testing.assert_allclose(kept, used)
        assert (store.resident() == ABSENT).all()
        driver = idle(engine)
        resident = store.resident() != ABSENT
        share = kept / kept.sum(axis=1, keepdims=True)
        for layer in range(len(share)):
            here, absent = share[layer][resident[layer]], share[layer][~resident[layer]]
            assert here.min(initial=1.0) >= absent.max(initial=0.0)
        assert resident[0].any()
        assert policy == "lru" or resident.any(axis=1).all()
        stats = store.stats()
        assert stats.evictions == 0
        assert stats.slot_bytes_peak <= stats.budget_bytes
        brought = driver.brought  # the last ones may lack a matrix that has no free slot
        assert brought >= resident.sum() > 0
        assert idle(engine).brought == brought  # slots are full: nothing is exchanged


def test_a_file_that_was_cut_is_told_by_the_token_that_needs_it(one, tmp_path):
    copy = tmp_path / "short.gguf"
    whole = one.read_bytes()
    copy.write_bytes(whole)
    with opened(copy, "lru") as engine:
        with open(copy, "r+b") as file:
            file.truncate(len(whole) // 2)
        idle(engine)
        with pytest.raises(Exception, match="was written to while it is in use"):
            engine.eval(PROMPT, 0)


def test_every_step_waits_until_it_has_ended(one):
    """No thread reads for nobody while tokens need what it would take."""
    calls = {
        "eval": lambda engine: engine.eval(PROMPT, 0),
        "generate": lambda engine: list(engine.generate(PROMPT, Sampling(temp=0.0), 2)),
        "decode_batch": lambda engine: engine.decode_batch([7], [0]),
    }
    with opened(one, "dymoe", sequences=1) as engine:
        for name, call in calls.items():
            begun = []
            engine.idle()
            engine.store.set_step_done(lambda _: begun.append(engine.driver._idle._thread is None))  # noqa: B023
            call(engine)
            assert begun and all(begun), name


def test_ctrl_c_while_it_starts_leaves_what_can_be_closed(one, monkeypatch):
    start = threading.Thread.start

    def interrupted(thread):
        os.kill(os.getpid(), signal.SIGINT)
        start(thread)

    with opened(one, "lru") as engine:
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt), interrupts.listening():
            engine.idle()
        monkeypatch.undo()
        assert engine.eval(PROMPT, 0).shape[0] == 1


def test_closing_ends_it(one):
    for _ in range(5):
        engine = opened(one, "lru", remember=True)
        engine.idle()
        engine.close()
        engine.close()
