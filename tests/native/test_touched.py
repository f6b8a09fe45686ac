"""Memory that was not touched is not resident: KV cache, scratch and work buffers."""

import ctypes
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from asking import request_of

from gguf_tools import synthetic
from orchestrator.native import touched_memory
from orchestrator.runtime import llama_parts
from orchestrator.runtime.runtime import Runtime

N_CTX = 131072
DRAWN = np.random.default_rng(0).integers(10, 300, 4000).tolist()
SHAPE = replace(synthetic.preset("tiny-qwen3moe"), context=N_CTX)
PAGE = 4096
MIB = 2**20
# For keys and values.
TENSORS = 2 * SHAPE.n_layer
CELL_VALUES = TENSORS * SHAPE.n_head_kv * SHAPE.head_dim
# Attention reads cells up to the next multiple of this number.
READ_CELLS = 256
ROW_BYTES = {"f16": 2.0, "q8_0": 34 / 32}


@pytest.fixture(scope="module")
def path(library, tmp_path_factory):
    return synthetic.write(tmp_path_factory.mktemp("long") / "long.gguf", SHAPE, tiers=("q8_0",))


@contextmanager
def opened(path, **settings):
    usual = {"policy": "lru", "expert_ram": 2 * MIB, "threads": 1, "ctx": N_CTX, "ubatch": 512}
    with (
        Runtime.open(request_of(model=path, **{**usual, **settings})) as runtime,
        runtime.evaluator() as e,
    ):
        assert e.n_ctx == N_CTX
        yield e


def saved(context):
    """Return the state of a context's first sequence in llama.cpp's format."""
    data = (ctypes.c_uint8 * context.api.llama_state_seq_get_size(context.handle, 0))()
    assert context.api.llama_state_seq_get_data(context.handle, data, len(data), 0) == len(data)
    return bytes(data)


def restored(context, state):
    """Restore the state of a context's first sequence. Return False if llama.cpp cannot."""
    data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
    return context.api.llama_state_seq_set_data(context.handle, data, len(data), 0) > 0


def anonymous_bytes():
    """Return the anonymous resident bytes of this process, as counted by the kernel."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such line")


@pytest.mark.parametrize("kv", ROW_BYTES)
def test_the_resident_kv_cache_follows_its_cells(library, path, kv):
    """The resident bytes of the KV cache follow the number of cells in use."""

    def held(n_cells):
        """Return whether the cache has that many cells in memory."""
        least = n_cells * CELL_VALUES * ROW_BYTES[kv]
        most = (n_cells + READ_CELLS) * CELL_VALUES * ROW_BYTES[kv] + 2 * TENSORS * PAGE
        return least <= touched_memory(library).cache.resident <= most

    with opened(path, kv=kv) as e:
        cache = touched_memory(library).cache
        assert cache.reserved >= N_CTX * CELL_VALUES * ROW_BYTES[kv]
        assert cache.resident == 0
        context = e.inside.context
        e.eval(DRAWN[:10], 0)
        assert held(10)
        assert touched_memory(library).cache.used == 10 * CELL_VALUES * ROW_BYTES[kv]
        e.eval(DRAWN, 0)
        assert held(len(DRAWN))
        kept = saved(context)
        assert held(len(DRAWN))
        e.eval(DRAWN[:1], 1000)
        assert held(1001)
        assert restored(context, kept)
        assert held(len(DRAWN))
        assert not restored(context, kept[: len(kept) // 2])
        assert held(0)
        assert restored(context, kept)
        e.reset()
        assert touched_memory(library).cache[1:] == (0, 0)
    assert touched_memory(library) == ((0, 0, 0), (0, 0, 0), (0, 0, 0))


def test_transposed_values_touch_a_page_per_dimension(library, path, monkeypatch):
    """Without flash attention, each dimension of the values touches its own pages.

    The values of a dimension are contiguous: 2,048 f16 cells per page.
    """
    monkeypatch.setattr(llama_parts, "has_flash", lambda *_: False)
    n_values = SHAPE.n_head_kv * SHAPE.head_dim
    with opened(path) as e:
        assert touched_memory(library).cache.resident == 0
        e.eval(DRAWN[:10], 0)
        few = touched_memory(library).cache.resident
        assert few <= SHAPE.n_layer * (n_values * PAGE + READ_CELLS * n_values * 2 + 2 * PAGE)
        e.eval(DRAWN, 0)
        assert touched_memory(library).cache.resident >= len(DRAWN) * CELL_VALUES * 2
        e.eval(DRAWN[:10], 0)
        assert touched_memory(library).cache.resident <= few + TENSORS * PAGE
        e.reset()
        assert touched_memory(library).cache.resident == 0


def test_a_dropped_sequence_frees_its_pages(library, path):
    """A dropped sequence frees the pages of its cells.

    Several sequences decode together, and each has its own runs of cells.
    """
    with opened(path, sequences=4) as e:
        e.eval(DRAWN[:10], 0)
        for each in range(4):
            e.fork(each)
        for at in range(600):
            e.decode_batch(DRAWN[4 * at : 4 * at + 4], range(4))
        cache = touched_memory(library).cache
        assert cache.used == 2410 * CELL_VALUES * 2
        for n_dropped in (1, 2, 3):
            e.fork(n_dropped)
            left = touched_memory(library).cache
            assert cache.resident - left.resident >= n_dropped * 512 * CELL_VALUES * 2
            assert left.used == (2410 - 600 * n_dropped) * CELL_VALUES * 2
            assert 0 <= left.resident - left.used <= 4 * READ_CELLS * CELL_VALUES * 2


@pytest.mark.parametrize("policy", ["lru", "plain"])
def test_scratch_shrinks_after_a_long_prompt(library, path, policy):
    with opened(path, policy=policy, expert_ram=2 * MIB if policy == "lru" else None) as e:
        e.eval(DRAWN[:10], 0)
        before = touched_memory(library)
        e.eval(DRAWN[:2048], 0)
        prompt = touched_memory(library)
        assert prompt.scratch.resident > 4 * before.scratch.resident
        e.eval(DRAWN[:1], 2048)
        after = touched_memory(library)
        assert after.scratch.resident <= before.scratch.resident
        assert after.work.resident <= before.work.resident + PAGE
        assert after.cache.resident >= prompt.cache.resident


def test_freed_memory_agrees_with_the_kernel(library, path):
    """The bytes that we count as freed agree with the kernel's count within 1 MiB."""
    with opened(path) as e:
        e.eval(DRAWN, 0)
        process, ours = anonymous_bytes(), sum(each.resident for each in touched_memory(library))
        assert ours > 8 * MIB
        e.reset()
        e.eval(DRAWN[:1], 0)
        given_back = ours - sum(each.resident for each in touched_memory(library))
        assert given_back > 8 * MIB
        assert abs(process - anonymous_bytes() - given_back) < MIB


def test_cells_of_a_fork_stay(library, tiny_model):
    """The cells of a dropped prompt stay until its fork is dropped too."""
    prompt, steps = DRAWN[:1000], DRAWN[1000:1006]
    usual = {"policy": "plain", "threads": 1, "ctx": 2048, "sequences": 1}
    rows = []
    for drop in (False, True):
        request = request_of(model=tiny_model("qwen3moe", "q8_0"), **usual)
        with Runtime.open(request) as runtime, runtime.evaluator() as e:
            e.eval(prompt, 0)
            e.fork(0)
            if drop:
                e.eval(DRAWN[2000:2001], 0)
            held = touched_memory(library).cache.resident
            assert held >= len(prompt) * CELL_VALUES * 2
            rows.append(np.stack([e.decode_batch([token], [0])[0] for token in steps]))
            if drop:
                e.fork(0)
                assert touched_memory(library).cache.resident < held / 4
    np.testing.assert_array_equal(*rows)
