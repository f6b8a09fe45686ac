"""Which store serves which model, and what is said where none does."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from orchestrator.config import Config
from orchestrator.engine.engine import Engine
from orchestrator.errors import NativeError
from orchestrator.native import Library, Store, StoreSpec, context_memory
from orchestrator.native.llama import EXPERT_PATTERN, Bindings, BufferTypeOverride, Model

from .decoder import Decoder, prompt

TOKENS = [3, 1, 4, 1, 5]


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3moe", "q4_k")


def spec_of(path: Path) -> tuple[StoreSpec, np.ndarray]:
    """What an engine's store was made of, and the logits behind TOKENS."""
    config = Config.build(model=path, ctx=256, threads=1, policy="lru", expert_ram=1 << 20)
    with Engine.open(config) as engine:
        return engine.store.spec, engine.eval(TOKENS, 0)[-1]


def load(path: Path) -> Model:
    return Model(Bindings.load(), path, managed=True, use_extra_bufts=False, use_mmap=False)


def decoded(model: Model) -> np.ndarray:
    decoder = Decoder(model)
    assert decoder.decode(prompt(TOKENS)) == 0
    logits = decoder.logits()
    decoder.close()
    return logits


def test_a_model_without_a_store_is_refused(library: Library, model: Path) -> None:
    with pytest.raises(NativeError, match=r"no expert store waits for it: create one"):
        load(model)
    assert library.load_error() is None  # it was told


def test_the_latest_store_that_waits_is_taken(library: Library, model: Path) -> None:
    spec, expected = spec_of(model)
    with Store.create(library, spec) as older, Store.create(library, spec) as newer:
        loaded = load(model)
        np.testing.assert_array_equal(decoded(loaded), expected)
        assert newer.stats().requests[0] > 0 and older.stats().requests[0] == 0
        second = load(model)
        np.testing.assert_array_equal(decoded(second), expected)
        assert older.stats().requests[0] > 0
        with pytest.raises(NativeError, match="no expert store waits"):
            load(model)
        second.close()
        loaded.close()


def test_a_store_outlives_its_model(library: Library, model: Path) -> None:
    """What it has in memory serves the next one."""
    spec, expected = spec_of(model)
    with Store.create(library, spec) as store:
        for _ in range(2):
            loaded = load(model)
            np.testing.assert_array_equal(decoded(loaded), expected)
            loaded.close()
            store.check()
        loaded = load(model)
    loaded.close()


def test_a_store_of_another_model_is_refused_and_waits_on(
    library: Library, model: Path, tiny_model: Callable[..., Path]
) -> None:
    other = tiny_model("deepseek2-fused", "q4_k")
    spec, expected = spec_of(model)
    with Store.create(library, spec):
        with pytest.raises(NativeError, match=r"blk\.0\.ffn_.*_exps|layer|expert"):
            load(other)
        loaded = load(model)
        np.testing.assert_array_equal(decoded(loaded), expected)
        loaded.close()


def test_a_simulated_store_waits_for_no_model(library: Library, model: Path) -> None:
    from dataclasses import replace

    spec, _ = spec_of(model)
    with (
        Store.create(library, replace(spec, simulated=True)),
        pytest.raises(NativeError, match="no expert store waits"),
    ):
        load(model)


def test_a_load_without_memory_takes_no_store(library: Library, model: Path) -> None:
    """Memory fitting loads a model so, makes a context, and asks what they would take."""
    spec, expected = spec_of(model)
    api = Bindings.load().api
    params = api.llama_model_default_params()
    overrides = (BufferTypeOverride * 2)()
    overrides[0].pattern, overrides[0].buffer_type = EXPERT_PATTERN, library.buffer_type()
    params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    params.load_mode, params.no_alloc = api.LLAMA_LOAD_MODE_NONE, True
    with Store.create(library, spec) as store:
        handle = api.llama_model_load_from_file(os.fsencode(model), params)
        assert handle
        wanted = api.llama_context_default_params()
        wanted.n_ctx = 256
        context = api.llama_init_from_model(handle, wanted)
        assert context
        assert context_memory(library, context)[0] > 0
        api.llama_free(context)
        api.llama_model_free(handle)

        loaded = load(model)
        np.testing.assert_array_equal(decoded(loaded), expected)
        assert store.stats().requests[0] > 0
        loaded.close()
