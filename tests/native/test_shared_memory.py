"""KV cells and scratch take memory from the slots and return it. Logits do not change."""

import os
import signal
import threading
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from answering import answered, submitted
from asking import request_of
from mixing import SHAPE

from gguf_tools import synthetic
from orchestrator.errors import NativeError
from orchestrator.native import Store, touched_memory
from orchestrator.native.llama import LlamaContext
from orchestrator.runtime import llama_parts
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.runtime import Runtime

N_CTX = 16384
PROMPT = np.random.default_rng(0).integers(10, 300, 3000).tolist()


@pytest.fixture(scope="module")
def path(library, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    return synthetic.write(folder / "m.gguf", replace(SHAPE, context=N_CTX), tiers=("q8_0",))


def opened(path, answering=None, **settings):
    usual = {"policy": "lru", "threads": 1, "ubatch": 512, "use_extra_bufts": False}
    return Runtime.open(request_of(model=path, **{**usual, **settings}), answering=answering)


@pytest.fixture(scope="module")
def cap(path):
    """A memory limit with slots for two thirds of the experts."""
    with opened(path, ctx=4096) as runtime, runtime.evaluator() as e:
        return e.plan.total_bytes - e.plan.slots.total_bytes // 3


def held(e):
    """Return the bytes of the slots. Check that slots and touched memory fit the shared limit."""
    n_bytes = e.inside.store.stats().slot_bytes
    touched = sum(each.resident for each in touched_memory(e.inside.store.library))
    assert n_bytes + touched <= e.plan.shared.n_bytes
    return n_bytes


def test_slots_shrink_with_used_memory_and_grow_again(path, cap):
    """Slots shrink when KV cells and scratch are used, and grow again after a reset.

    Scratch of a large micro-batch stays for a few steps and counts until it is freed.
    """
    with (
        opened(path, ram=cap, conversations=True, ubatch=None) as runtime,
        runtime.evaluator() as e,
    ):
        plan, seen, at = e.plan, [], 0
        for n in (20, 3000, 1, 3000, 600, 90, 1, 2500):
            e.eval(PROMPT[:n], at)
            at += n
            seen.append(held(e))
        short, long, after, *_ = seen
        assert long < after < short
        copy_bytes = plan.shared.cache_bytes(512)  # for a prompt copy
        assert 0 <= plan.slots.total_bytes - short <= copy_bytes
        e.reset()
        e.eval(PROMPT[:20], 0)
        assert held(e) == short


@pytest.mark.parametrize(
    ("ubatch", "steps"),
    [
        # No small step frees scratch before a short prompt of another conversation.
        (None, [(3000, 0), (3000, 3000), (3000, 6000), (400, 0)]),
        # The cells of a slightly shortened sequence stay.
        (512, [(2000, 0), (1, 1800), (1, 1600), (1, 1400), (1, 1100), (1, 900)]),
    ],
)
def test_memory_that_stays_after_a_prompt_counts(ubatch, steps, path, cap):
    with (
        opened(path, ram=cap, conversations=True, ubatch=ubatch) as runtime,
        runtime.evaluator() as e,
    ):
        for n, pos in steps:
            if not pos:
                e.reset()
            e.eval(PROMPT[:n], pos)
            held(e)


def test_slots_shrink_during_a_long_answer(path, cap):
    with opened(path, ram=cap, conversations=True) as runtime, runtime.evaluator() as e:
        seen = []
        for pos, token in enumerate(PROMPT[:1300]):
            e.eval([token], pos)
            seen.append(e.inside.store.stats().slot_bytes)
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) > 2  # from 512 cells on, in steps of 256


def test_a_step_that_gets_no_memory_fails_alone(path, cap):
    def full(_bytes):
        raise MemoryError("no more")

    with opened(path, ram=cap, conversations=True) as runtime, runtime.evaluator() as e:
        e.inside.store.set_room(full)
        with pytest.raises(MemoryError, match="no more"):
            e.eval(PROMPT[:100], 0)
        e.inside.store.set_room(e.inside.driver.make_room)
        assert e.n_cached == 0
        row = e.eval(PROMPT[:100], 0)
    with opened(path, ctx=4096) as runtime, runtime.evaluator() as e:
        assert np.array_equal(e.eval(PROMPT[:100], 0), row)


def test_an_aborted_step_keeps_no_slot(path, cap):
    """After an aborted step, the smallest limit can be set and the next prompt works.

    The step ends between a layer's hook, which pins experts, and the ops that use them.
    """
    with opened(path, ram=cap, conversations=True) as runtime, runtime.evaluator() as e:
        expected = e.eval(PROMPT[:20], 0)
        e.reset()
        routed = []

        def stop():
            if len(routed) > 2:
                e.cancel()
            return len(routed) > 2

        def route(event):
            routed.append(event.layer)
            e.inside.driver.on_route(event)

        e.inside.context.should_stop = stop
        e.inside.store.set_route(route)
        with pytest.raises(NativeError, match="cancelled"):
            e.eval(PROMPT[:600], 0)
        e.inside.store.check()
        while e.inside.store.loading:
            pass
        assert e.inside.store.limit(e.plan.shared.least_slots) == 0
        del routed[:]
        e.inside.driver.set_route()
        assert np.array_equal(e.eval(PROMPT[:20], 0), expected)


def test_a_signal_ends_a_step_of_an_answer(path, cap):
    """A stop from another thread ends a step of an answer.

    Python signal handlers cannot run inside the step.
    """
    with opened(path, ram=cap, conversations=True) as runtime, runtime.evaluator() as e:
        e.eval(PROMPT[:20], 0)
        routed = []

        def route(event):
            routed.append(event.layer)
            e.inside.driver.on_route(event)
            thread = threading.Thread(target=e.inside.context.stop)
            thread.start()
            thread.join()

        e.inside.store.set_route(route)
        with pytest.raises(NativeError, match="cancelled"):
            e.eval([5], 20)
        assert len(routed) == 1


def test_prompt_progress_counts_layers(path, cap):
    """The progress of a prompt grows with each layer, also in a step with several micro-batches."""
    with opened(path, Answering(), ram=cap) as runtime:
        driver, steps = runtime.inside.driver, {}

        def route(event):
            steps.setdefault(event.step, []).append(driver.tokens_done())
            driver.on_route(event)

        runtime.inside.store.set_route(route)
        more = {"stream": True, "return_progress": True}
        with closing(submitted(runtime, PROMPT[:1100], 1, **more)) as answer:
            events = [each for each in answer if "prompt_progress" in each]
        read = [each["prompt_progress"]["processed"] for each in events]
        assert read == sorted(read) and read[-1] == 1100 and len(read) > 2
        for seen in steps.values():
            # A layer counts after its experts are computed, so both of the first two routes report
            # 0.
            assert seen == sorted(seen) and seen[0] == 0
            assert len(set(seen)) == len(seen) - 1 > 1


@pytest.mark.parametrize("end", ["cancel", "interrupt", "nothing is read"])
def test_waiting_for_slots_ends(end, path, cap, monkeypatch):
    """A cancel, Ctrl-C, or the lack of running reads ends the wait for slots above the limit."""
    with opened(path, ram=cap, conversations=True) as runtime, runtime.evaluator() as e:
        monkeypatch.setattr(Store, "limit", lambda *_: 4096)
        monkeypatch.setattr(Store, "loading", 0 if end == "nothing is read" else 1)
        ends = {"cancel": e.cancel, "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT)}
        e.inside.driver._pause = ends.get(end)
        error = KeyboardInterrupt if end == "interrupt" else NativeError
        said = {"cancel": "cancelled", "nothing is read": "none is running"}.get(end)
        with pytest.raises(error, match=said):
            e.eval(PROMPT[:600], 0)
        monkeypatch.undo()
        assert e.eval(PROMPT[:600], 0).shape[0] == 1


def test_cells_of_several_sequences_shrink_the_slots(path, cap):
    with (
        opened(path, ram=cap, conversations=True, sequences=2) as runtime,
        runtime.evaluator() as e,
    ):
        e.eval(PROMPT[:1500], 0)
        for sequence in (0, 1):
            e.fork(sequence)
        before = held(e)
        for _ in range(300):
            e.decode_batch([5, 6], [0, 1])
        assert held(e) <= before - int(512 * e.plan.shared.cell_bytes)


def test_attention_sees_free_cells_between_those_of_sequences(path, cap):
    """Scratch counts for all cells up to the last one in use.

    The free cells of a dropped long prompt precede those of a short one.
    """
    with (
        opened(path, ram=cap, conversations=True, sequences=1, ubatch=None) as runtime,
        runtime.evaluator() as e,
    ):
        for prompt in (2 * PROMPT, PROMPT[:500]):
            e.eval(prompt, 0)
            e.fork(0)
        for pos, tokens in ((500, PROMPT[:1]), (501, PROMPT[:1000])):
            e.eval(tokens, pos)
            held(e)


def test_prompt_copies_shrink_the_slots(path, cap):
    """Prompt copies shrink the slots, and all memory stays within the shared limit.

    Memory for one more copy is reserved, so a new copy never exceeds the limit.
    """
    with opened(path, Answering(reads_ahead=False), ram=cap) as runtime:
        shared, seen, store = runtime.plan.shared, [], runtime.inside.store
        assert shared.prompts > 0

        def answer(prompt):
            answered(runtime, prompt, 2)
            seen.append(store.stats().slot_bytes)
            touched = sum(each.resident for each in touched_memory(store.library))
            assert seen[-1] + touched + runtime.memory()["kept prompts"] <= shared.n_bytes

        for start in range(0, 2400, 600):
            answer(PROMPT[start : start + 100])
        assert seen[0] > seen[-1]
        answer(PROMPT)
        assert runtime.memory()["kept prompts"] == 0


@pytest.fixture
def refusing(monkeypatch):
    """refusing(name, most): creating a context fails if this parameter is larger than `most`."""

    def refuse(name, most):
        class Refusing(LlamaContext):
            def __init__(self, *args, **more):
                if more[name] > most:
                    raise NativeError("the context cannot be made")
                super().__init__(*args, **more)

        monkeypatch.setattr(llama_parts, "LlamaContext", Refusing)

    return refuse


def test_a_context_that_cannot_be_reserved_is_halved(path, cap, refusing):
    refusing("n_ctx", 5000)
    with opened(path, ram=cap, conversations=True) as runtime, runtime.evaluator() as e:
        assert e.plan.n_ctx == N_CTX and e.n_ctx == 4096
    with pytest.raises(NativeError, match="cannot be made"):
        opened(path, ram=cap, conversations=True, ctx=8192)


def test_a_smaller_micro_batch_is_tried_before_a_shorter_context(path, cap, refusing):
    refusing("n_ubatch", 1024)
    with (
        opened(path, ram=cap, conversations=True, ubatch=None) as runtime,
        runtime.evaluator() as e,
    ):
        assert e.plan.n_ubatch > 1024 and e.n_ctx == e.plan.n_ctx
        e.eval(PROMPT, 0)
        assert f"{e.n_ctx} ({len(PROMPT)} in use)" in runtime.mode
    with pytest.raises(NativeError, match="cannot be made"):
        opened(path, ram=cap, conversations=True, ubatch=2048)
