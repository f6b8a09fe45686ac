"""Idle reads: logits do not change, and nothing is evicted."""

import os
import signal
import threading
from functools import partial

import numpy as np
import pytest
from answering import answered
from asking import needs_in

from gguf_tools import interrupts
from orchestrator.errors import ConfigError
from orchestrator.events import ABSENT
from orchestrator.lab.replay.record import Recorder
from orchestrator.plan.records import PlanRequest
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.runtime import Runtime

from . import conftest
from .conftest import drawn

PROMPT = drawn(24, 5)


@pytest.fixture(params=["lru", "dymoe", "firm"])
def policy(request):
    return request.param


def opened(model, policy, answering=None, **settings):
    needs = needs_in(settings)
    config = conftest.build(model, 0.6, policy=policy, use_extra_bufts=False, **settings)
    return Runtime.open(PlanRequest(config, needs), answering=answering)


def begin_idle(e, used=None):
    """Start to read likely experts into free slots."""
    e.inside.driver.idle(used, lambda: None)


def idle(e, used=None):
    """Run the idle reads to their end."""
    driver = e.inside.driver
    begin_idle(e, used)
    driver._idle.wait()
    e.inside.store.check()
    return driver


def logits(e, between=lambda: None):
    """Logits of a prompt and of eight tokens of its answer."""
    rows = [e.eval(PROMPT, 0)[-1]]
    for i in range(8):
        between()
        rows.append(e.eval([int(rows[-1].argmax())], len(PROMPT) + i)[-1])
    return np.stack(rows)


def test_answers_are_the_same(policy, device, one):
    """Idle reads before or during an answer do not change its logits."""
    where = {"device": device} if device else {}
    with opened(one, policy, **where) as runtime, runtime.evaluator() as e:
        expected = logits(e)
    with opened(one, policy, **where) as runtime, runtime.evaluator() as e:
        e.cancel()  # a cancelled answer does not prevent idle reads
        assert idle(e).prefetched > 0
        np.testing.assert_array_equal(logits(e), expected)
        # a request can come at any moment and ends the idle reads
        np.testing.assert_array_equal(logits(e, partial(begin_idle, e)), expected)
        e.inside.store.check()
        with pytest.raises(ConfigError, match="load the model again and start"):
            Recorder(e.inside)


def test_the_most_used_experts_are_resident_afterwards(policy, one):
    with opened(one, policy, Answering(reads_ahead=False), remember=True) as runtime:
        answered(runtime, PROMPT, 16)
        used = runtime.inside.driver.used()
    with opened(one, policy, remember=True) as runtime, runtime.evaluator() as e:
        store = e.inside.store
        kept = runtime._loader.history.usage.recall()
        np.testing.assert_allclose(kept, used)
        assert (store.resident() == ABSENT).all()
        driver = idle(e, kept)
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
        prefetched = driver.prefetched  # the last experts may lack a matrix without a free slot
        assert prefetched >= resident.sum() > 0
        assert idle(e, kept).prefetched == prefetched  # slots are full, so nothing is exchanged


def test_a_truncated_file_fails_the_step_that_needs_it(one, tmp_path):
    copy = tmp_path / "short.gguf"
    whole = one.read_bytes()
    copy.write_bytes(whole)
    with opened(copy, "lru") as runtime, runtime.evaluator() as e:
        with open(copy, "r+b") as file:
            file.truncate(len(whole) // 2)
        idle(e)
        with pytest.raises(Exception, match="was written to while it is in use"):
            e.eval(PROMPT, 0)


def test_every_step_ends_idle_reads_first(one):
    """When a step begins, the thread of the idle reads has ended."""
    calls = {
        "eval": lambda e: e.eval(PROMPT, 0),
        "decode_batch": lambda e: e.decode_batch([7], [0]),
    }
    with opened(one, "dymoe", sequences=1) as runtime, runtime.evaluator() as e:
        for name, call in calls.items():
            begun = []
            begin_idle(e)
            reads = e.inside.driver._idle
            e.inside.store.set_step_done(lambda _: begun.append(reads._thread is None))  # noqa: B023
            call(e)
            assert begun and all(begun), name


def test_ctrl_c_at_the_start_of_idle_reads(one, monkeypatch):
    """After Ctrl-C at the start of idle reads, the model evaluates and can be closed."""
    start = threading.Thread.start

    def interrupted(thread):
        os.kill(os.getpid(), signal.SIGINT)
        start(thread)

    with opened(one, "lru") as runtime, runtime.evaluator() as e:
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt), interrupts.listening():
            begin_idle(e)
        monkeypatch.undo()
        assert e.eval(PROMPT, 0).shape[0] == 1


def test_closing_ends_idle_reads(one):
    for _ in range(5):
        runtime = opened(one, "lru", remember=True)
        runtime.inside.driver.idle(None, lambda: None)
        runtime.close()
        runtime.close()


def test_an_answer_is_followed_by_reads_unless_they_are_off(one):
    for reads_ahead in (True, False):
        with opened(one, "lru", Answering(reads_ahead=reads_ahead)) as runtime:
            answered(runtime, [5], 1)  # which leaves slots free
            idle_reads = runtime.inside.driver._idle
            if reads_ahead:
                conftest.until(lambda: idle_reads.prefetched)  # noqa: B023
            with runtime.evaluator() as e:  # the evaluator waits for the end of idle reads
                e.eval(PROMPT, 0)
            assert bool(idle_reads.prefetched) == reads_ahead
