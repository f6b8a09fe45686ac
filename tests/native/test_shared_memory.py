"""Slots give way to a context and to scratch, and come back; what is computed stays the same."""

import os
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
from mixing import SHAPE
from orchestrator.runtime.engine import Engine

from gguf_tools import synthetic
from orchestrator.config import Config
from orchestrator.errors import NativeError
from orchestrator.native import Store, touched_memory
from orchestrator.native.llama import LlamaContext, Sampling
from orchestrator.runtime import llama_parts

N_CTX = 16384
PROMPT = np.random.default_rng(0).integers(10, 300, 3000).tolist()


@pytest.fixture(scope="module")
def path(library, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    return synthetic.write(folder / "m.gguf", replace(SHAPE, context=N_CTX), tiers=("q8_0",))


def opened(path, **settings):
    usual = {"policy": "lru", "threads": 1, "ubatch": 512, "use_extra_bufts": False}
    return Engine.open(Config.build(model=path, **{**usual, **settings}))


@pytest.fixture(scope="module")
def cap(path):
    """A cap with slots for two thirds of the experts."""
    with opened(path, ctx=4096) as engine:
        return engine.plan.total_bytes - engine.plan.slots.total_bytes // 3


def held(engine):
    """Bytes of slots. All that is used is within what there is."""
    n_bytes = engine.store.stats().slot_bytes
    beside = sum(each.resident for each in touched_memory(engine.store.library))
    assert n_bytes + beside <= engine.plan.shared.n_bytes
    return n_bytes


def test_slots_give_way_to_what_is_used_and_come_back(path, cap):
    """Scratch of a large micro-batch stays for a while behind it, and counts as long."""
    with opened(path, ram=cap, conversations=True, ubatch=None) as engine:
        plan, seen, at = engine.plan, [], 0
        for n in (20, 3000, 1, 3000, 600, 90, 1, 2500):
            engine.eval(PROMPT[:n], at)
            at += n
            seen.append(held(engine))
        short, long, behind, *_ = seen
        assert long < behind < short
        room = plan.shared.cache_bytes(512)  # for a copy
        assert 0 <= plan.slots.total_bytes - short <= room
        engine.reset()
        engine.eval(PROMPT[:20], 0)
        assert held(engine) == short


@pytest.mark.parametrize(
    ("ubatch", "steps"),
    [
        # No small step gives scratch back before a short prompt of another conversation.
        (None, [(3000, 0), (3000, 3000), (3000, 6000), (400, 0)]),
        # Cells of short cuts stay.
        (512, [(2000, 0), (1, 1800), (1, 1600), (1, 1400), (1, 1100), (1, 900)]),
    ],
)
def test_what_stays_behind_a_prompt_counts(ubatch, steps, path, cap):
    with opened(path, ram=cap, conversations=True, ubatch=ubatch) as engine:
        for n, pos in steps:
            if not pos:
                engine.reset()
            engine.eval(PROMPT[:n], pos)
            held(engine)


def test_an_answer_takes_cell_after_cell(path, cap):
    with opened(path, ram=cap, conversations=True) as engine:
        seen = []
        for pos, token in enumerate(PROMPT[:1300]):
            engine.eval([token], pos)
            seen.append(engine.store.stats().slot_bytes)
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) > 2  # from 512 cells on it goes in steps of 256


def test_a_step_for_which_no_room_is_made_fails_alone(path, cap):
    def full(_room):
        raise MemoryError("no more")

    with opened(path, ram=cap, conversations=True) as engine:
        engine.store.set_room(full)
        with pytest.raises(MemoryError, match="no more"):
            engine.eval(PROMPT[:100], 0)
        engine.store.set_room(engine.driver.make_room)
        assert engine.n_cached == 0
        row = engine.eval(PROMPT[:100], 0)
    with opened(path, ctx=4096) as engine:
        assert np.array_equal(engine.eval(PROMPT[:100], 0), row)


def test_a_step_that_is_cut_off_keeps_no_slot(path, cap):
    """It ends between the hook of a layer, which pins experts, and the ops that use them. The next
    prompt needs a smaller limit."""
    with opened(path, ram=cap, conversations=True) as engine:
        expected = list(engine.generate(PROMPT[:20], Sampling(temp=0), 2))
        engine.reset()
        routed = []

        def stop():
            if len(routed) > 2:
                engine.cancel()
            return len(routed) > 2

        def route(event):
            routed.append(event.layer)
            engine.driver.on_route(event)

        engine.context.should_stop = stop
        engine.store.set_route(route)
        assert list(engine.generate(PROMPT[:600], Sampling(temp=0), 2)) == []
        assert engine.last_stats.finish == "cancelled"
        engine.store.check()
        while engine.store.loading:
            pass
        assert engine.store.limit(engine.plan.shared.least_slots) == 0
        del routed[:]
        engine.driver.set_route()
        assert list(engine.generate(PROMPT[:20], Sampling(temp=0), 2)) == expected


def test_a_signal_ends_a_step_of_an_answer(path, cap):
    """No handler of Python's runs in it: what a signal calls comes from another thread."""
    with opened(path, ram=cap, conversations=True) as engine:
        answered = engine.generate(PROMPT[:20], Sampling(temp=0), 8)
        next(answered)
        routed = []

        def route(event):
            routed.append(event.layer)
            engine.driver.on_route(event)
            thread = threading.Thread(target=engine.context.stop)
            thread.start()
            thread.join()

        engine.store.set_route(route)
        assert list(answered) == [] and engine.last_stats.finish == "cancelled"
        assert len(routed) == 1


def test_a_prompt_counts_its_layers(path, cap):
    """In one step of several micro-batches as well."""
    with opened(path, ram=cap, conversations=True) as engine:
        seen = []

        def route(event):
            seen.append(engine.prompt_done())
            engine.driver.on_route(event)

        engine.store.set_route(route)
        told = []
        for _ in engine.generate(PROMPT[:1100], Sampling(temp=0), 1, lambda *to: told.append(to)):
            pass
        assert told[0] == (0, 1100) and told[-1] == (1100, 1100)
        assert engine.prompt_done() == 1100
        assert seen == sorted(seen) and seen[0] < 100
        assert len(set(seen)) > len(seen) * 0.7 and len(seen) > len(told)


@pytest.mark.parametrize("end", ["cancel", "interrupt", "nothing is read"])
def test_waiting_for_slots_ends(end, path, cap, monkeypatch):
    """Where reads into slots that go never come to an end."""
    with opened(path, ram=cap, conversations=True) as engine:
        monkeypatch.setattr(Store, "limit", lambda *_: 4096)
        monkeypatch.setattr(Store, "loading", 0 if end == "nothing is read" else 1)
        ends = {"cancel": engine.cancel, "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT)}
        engine.driver._pause = ends.get(end)
        answer = engine.generate(PROMPT[:600], Sampling(temp=0), 2)
        if end == "cancel":
            assert list(answer) == [] and engine.last_stats.finish == "cancelled"
        elif end == "interrupt":
            with pytest.raises(KeyboardInterrupt):
                list(answer)
        else:
            with pytest.raises(NativeError, match="does not read"):
                list(answer)
        monkeypatch.undo()
        assert list(engine.generate(PROMPT[:600], Sampling(temp=0), 2)) != []


def test_several_sequences_take_from_the_slots_too(path, cap):
    with opened(path, ram=cap, conversations=True, sequences=2) as engine:
        engine.eval(PROMPT[:1500], 0)
        for sequence in (0, 1):
            engine.fork(sequence)
        before = held(engine)
        for _ in range(300):
            engine.decode_batch([5, 6], [0, 1])
        assert held(engine) <= before - int(512 * engine.plan.shared.cell_bytes)


def test_attention_sees_free_cells_between_those_of_sequences(path, cap):
    """A long prompt that is gone lies before a short one: scratch goes by the last cell."""
    with opened(path, ram=cap, conversations=True, sequences=1, ubatch=None) as engine:
        for prompt in (2 * PROMPT, PROMPT[:500]):
            engine.eval(prompt, 0)
            engine.fork(0)
        for pos, tokens in ((500, PROMPT[:1]), (501, PROMPT[:1000])):
            engine.eval(tokens, pos)
            held(engine)


def test_copies_of_prompts_take_from_slots_what_they_use(path, cap):
    """Room for one more copy is set aside, so that none passes the cap when it is made."""
    with opened(path, ram=cap, conversations=True) as engine:
        shared, seen = engine.plan.shared, []
        assert shared.prompts > 0

        def answered(prompt):
            for _ in engine.generate(prompt, Sampling(temp=0), 2):
                count()
            count()

        def count():
            seen.append(engine.store.stats().slot_bytes)
            beside = sum(each.resident for each in touched_memory(engine.store.library))
            assert seen[-1] + beside + engine.memory()["kept prompts"] <= shared.n_bytes

        for start in range(0, 2400, 600):
            answered(PROMPT[start : start + 100])
        assert seen[0] > seen[-1]
        answered(PROMPT)
        assert engine.memory()["kept prompts"] == 0


@pytest.fixture
def refusing(monkeypatch):
    """refusing(name, most): the system makes no context of which that is more."""

    def refuse(name, most):
        class Refusing(LlamaContext):
            def __init__(self, *args, **more):
                if more[name] > most:
                    raise NativeError("the context cannot be made")
                super().__init__(*args, **more)

        monkeypatch.setattr(llama_parts, "LlamaContext", Refusing)

    return refuse


def test_a_context_that_the_system_refuses_to_reserve_is_halved(path, cap, refusing):
    refusing("n_ctx", 5000)
    with opened(path, ram=cap, conversations=True) as engine:
        assert engine.plan.n_ctx == N_CTX and engine.n_ctx == 4096
    with pytest.raises(NativeError, match="cannot be made"):
        opened(path, ram=cap, conversations=True, ctx=8192)


def test_a_smaller_micro_batch_is_tried_before_a_shorter_context(path, cap, refusing):
    refusing("n_ubatch", 1024)
    with opened(path, ram=cap, conversations=True, ubatch=None) as engine:
        assert engine.plan.n_ubatch > 1024 and engine.n_ctx == engine.plan.n_ctx
        engine.eval(PROMPT, 0)
        assert f"{engine.n_ctx} ({len(PROMPT)} in use)" in engine.mode
    with pytest.raises(NativeError, match="cannot be made"):
        opened(path, ram=cap, conversations=True, ubatch=2048)
