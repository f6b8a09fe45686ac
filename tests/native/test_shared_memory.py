"""Slots give way to a context and to scratch, and come back; what is computed stays the same."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_tools import synthetic
from orchestrator.config import Config
from orchestrator.engine import llama_parts
from orchestrator.engine.engine import Engine
from orchestrator.errors import NativeError
from orchestrator.native import Library, touched_memory
from orchestrator.native.llama import LlamaContext

MIB = 2**20
SHAPE = replace(
    synthetic.preset("tiny-qwen3moe"),
    context=16384,
    n_layer=4,
    n_expert=128,
    n_head_kv=2,
    head_dim=64,
)
PROMPT = np.random.default_rng(0).integers(10, 300, 3000).tolist()


@pytest.fixture(scope="module")
def path(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write(tmp_path_factory.mktemp("shared") / "m.gguf", SHAPE, tiers=("q8_0",))


def opened(path: Path, **settings: object) -> Engine:
    usual = {"policy": "lru", "threads": 1, "ubatch": 512, "use_extra_bufts": False}
    return Engine.open(Config.build(model=path, **{**usual, **settings}))


@pytest.fixture(scope="module")
def cap(path: Path) -> int:
    """A cap with slots for two thirds of the experts."""
    with opened(path, ctx=4096) as engine:
        assert engine.plan.slots is not None
        return engine.plan.total_bytes - engine.plan.slots.total_bytes // 3


def test_the_rows_are_those_of_a_run_with_memory_to_spare(path: Path, cap: int) -> None:
    """Long and short prompts, a cut and answers, in micro-batches of one size."""
    talk = [(PROMPT, 0), (PROMPT[:1], 3000), (PROMPT[:700], 100), (PROMPT[5:6], 800), (PROMPT, 10)]
    with opened(path, ctx=16384) as engine:
        expected = [engine.eval(tokens, pos) for tokens, pos in talk]
    with opened(path, ram=cap, conversations=True) as engine:
        assert engine.plan.shared is not None and engine.n_ctx == 16384
        for (tokens, pos), row in zip(talk, expected, strict=True):
            assert np.array_equal(engine.eval(tokens, pos), row)
        assert engine.store.stats().slot_bytes < engine.plan.slots.total_bytes  # type: ignore[union-attr]


def test_slots_give_way_to_what_is_used_and_come_back(path: Path, cap: int) -> None:
    """Scratch of a large micro-batch stays for a while behind it, and counts as long."""
    with opened(path, ram=cap, conversations=True, ubatch=None) as engine:
        plan, store, shared = engine.plan, engine.store, engine.plan.shared
        assert shared is not None and plan.slots is not None
        seen, at = [], 0
        for n in (20, 3000, 1, 3000, 600, 90, 1, 2500):
            engine.eval(PROMPT[:n], at)
            at += n
            touched = touched_memory(store.library)
            beside = touched.cache.resident + touched.scratch.resident + touched.work.resident
            held = store.stats().slot_bytes
            assert held + beside <= shared.n_bytes, n
            seen.append(held)
        short, long, behind, *_ = seen
        assert long < behind < short == plan.slots.total_bytes
        engine.reset()
        engine.eval(PROMPT[:20], 0)
        assert store.stats().slot_bytes == short


def test_what_a_prompt_that_was_given_up_leaves_still_counts(path: Path, cap: int) -> None:
    """No small step gives its scratch back before a short prompt of another conversation."""
    with opened(path, ram=cap, conversations=True, ubatch=None) as engine:
        store, shared = engine.store, engine.plan.shared
        assert shared is not None
        for at in range(0, 9000, 3000):
            engine.eval(PROMPT, at)
        engine.reset()
        engine.eval(PROMPT[:400], 0)
        touched = touched_memory(store.library)
        beside = touched.cache.resident + touched.scratch.resident + touched.work.resident
        assert store.stats().slot_bytes + beside <= shared.n_bytes


def test_cells_of_short_cuts_stay_and_count(path: Path, cap: int) -> None:
    with opened(path, ram=cap, conversations=True) as engine:
        shared = engine.plan.shared
        assert shared is not None
        engine.eval(PROMPT[:2000], 0)
        for length in (1800, 1600, 1400, 1100, 900):
            engine.eval(PROMPT[:1], length)
            beside = sum(each.resident for each in touched_memory(engine.store.library))
            assert engine.store.stats().slot_bytes + beside <= shared.n_bytes


def test_an_answer_takes_cell_after_cell(path: Path, cap: int) -> None:
    with opened(path, ram=cap, conversations=True) as engine:
        store, held = engine.store, []
        for pos, token in enumerate(PROMPT[:1300]):
            engine.eval([token], pos)
            held.append(store.stats().slot_bytes)
    assert held == sorted(held, reverse=True)
    assert len(set(held)) > 2  # from 512 cells on it goes in steps of 256


def test_a_step_for_which_no_room_is_made_fails_alone(path: Path, cap: int) -> None:
    def full(_room: object) -> None:
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


def test_several_sequences_take_from_the_slots_too(path: Path, cap: int) -> None:
    settings = {"ram": cap, "conversations": True, "sequences": 2, "threads": 1}
    with opened(path, **settings) as engine:
        shared = engine.plan.shared
        assert shared is not None
        engine.eval(PROMPT[:1500], 0)
        for sequence in (0, 1):
            engine.fork(sequence)
        before = engine.store.stats().slot_bytes
        for _ in range(300):
            engine.decode_batch([5, 6], [0, 1])
        beside = sum(each.resident for each in touched_memory(engine.store.library))
        held = engine.store.stats().slot_bytes
        assert held <= before - int(512 * shared.cell_bytes)
        assert held + beside <= shared.n_bytes


def test_attention_sees_free_cells_between_those_of_sequences(path: Path, cap: int) -> None:
    """A long prompt that is gone lies before a short one: scratch goes by the last cell."""
    with opened(path, ram=cap, conversations=True, sequences=1, ubatch=None) as engine:
        shared = engine.plan.shared
        assert shared is not None
        for prompt in (2 * PROMPT, PROMPT[:500]):
            engine.eval(prompt, 0)
            engine.fork(0)
        for pos, tokens in ((500, PROMPT[:1]), (501, PROMPT[:1000])):
            engine.eval(tokens, pos)
            beside = sum(each.resident for each in touched_memory(engine.store.library))
            assert engine.store.stats().slot_bytes + beside <= shared.n_bytes


def test_a_context_that_the_system_refuses_to_reserve_is_halved(
    path: Path, cap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(LlamaContext):
        def __init__(self, *args: Any, n_ctx: int, **more: Any) -> None:
            if n_ctx > 5000:
                raise NativeError("the context cannot be made")
            super().__init__(*args, n_ctx=n_ctx, **more)

    monkeypatch.setattr(llama_parts, "LlamaContext", Refusing)
    with opened(path, ram=cap, conversations=True) as engine:
        assert engine.plan.n_ctx == 16384 and engine.n_ctx == 4096
    with pytest.raises(NativeError, match="cannot be made"):
        opened(path, ram=cap, conversations=True, ctx=8192)


@pytest.mark.parametrize(("copies", "may"), [(0, True), (64 * MIB, False)])
def test_what_nobody_asked_for_takes_no_copies_of_prompts(
    copies: int, may: bool, path: Path, cap: int
) -> None:
    """Memory that copies may take and do not is free for it."""
    with opened(path, ram=cap, conversations=True) as engine:
        driver, asked = engine.driver, []

        def keep(n_bytes: int) -> int:
            asked.append(n_bytes)
            return copies

        engine.eval(PROMPT[:100], 0)
        driver.most_prompts, driver.keep_prompts = 64 * MIB, keep
        engine.eval(PROMPT[:400], 100)
        given = asked[-1]
        with driver.unlearned(driver.on_route_unasked):
            status = engine.context.decode(PROMPT[500:900], 500)
            refused = pytest.raises(NativeError, match="takes no memory from prompts")
            with nullcontext() if may else refused:
                driver.check(status)
        assert (min(asked) < given) is may
