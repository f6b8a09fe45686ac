"""Which store serves which model, and the error if no store does."""

import ctypes
import os
from dataclasses import replace

import numpy as np
import pytest

from orchestrator.errors import NativeError
from orchestrator.native import Store, context_memory
from orchestrator.native.llama import EXPERT_PATTERN, Bindings, BufferTypeOverride, Model

from .conftest import opened
from .decoder import Decoder, prompt

TOKENS = [3, 1, 4, 1, 5]


@pytest.fixture
def spec(one):
    """The specification of a loaded model's store."""
    with opened(one, policy="lru", expert_ram=1 << 20) as runtime, runtime.evaluator() as e:
        return e.inside.store.spec


@pytest.fixture
def serve(one):
    """serve(): load the model and check that it computes the same logits as a runtime."""
    with opened(one, policy="lru", expert_ram=1 << 20) as runtime, runtime.evaluator() as e:
        expected = e.eval(TOKENS, 0)[-1]

    def loaded():
        model = load(one)
        decoder = Decoder(model)
        assert decoder.decode(prompt(TOKENS)) == 0
        np.testing.assert_array_equal(decoder.logits(), expected)
        decoder.close()
        return model

    return loaded


def load(path):
    return Model(Bindings.load(), path, managed=True, use_extra_bufts=False, use_mmap=False)


def is_refused(path, said=r"no store waits for a model: create a store"):
    with pytest.raises(NativeError, match=said):
        load(path)


def test_a_model_without_a_store_is_refused(library, one, spec):
    """A model without a store is refused. A simulated store does not count."""
    is_refused(one)
    assert library.load_error() is None  # the error was taken when it was raised
    with Store.create(library, replace(spec, simulated=True)):
        is_refused(one)


def test_a_model_takes_the_newest_waiting_store(library, one, spec, serve):
    """A model takes the newest store without a model, the next model the older one."""
    with Store.create(library, spec) as older, Store.create(library, spec) as newer:
        loaded = serve()
        assert newer.stats().requests[0] > 0 and older.stats().requests[0] == 0
        second = serve()
        assert older.stats().requests[0] > 0
        is_refused(one)
        second.close()
        loaded.close()


def test_a_store_outlives_its_model(library, one, spec, serve):
    """A store serves a second model after the first is freed, and keeps its experts in memory."""
    with Store.create(library, spec) as store:
        for _ in range(2):
            serve().close()
            store.check()
        loaded = load(one)
    loaded.close()


def test_a_refused_store_of_another_model_waits_on(library, spec, serve, tiny_model):
    """A load with the store of another model fails, and the store then serves its own model."""
    with Store.create(library, spec):
        is_refused(tiny_model("deepseek2-fused", "q4_k"), r"blk\.0\.ffn_.*_exps|layer|expert")
        serve().close()


def test_a_load_without_memory_takes_no_store(library, one, spec, serve):
    """A load with no_alloc, which llama.cpp uses to fit memory, does not take the store."""
    api = Bindings.load().api
    params = api.llama_model_default_params()
    overrides = (BufferTypeOverride * 2)()
    overrides[0].pattern, overrides[0].buffer_type = EXPERT_PATTERN, library.buffer_type()
    params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    params.load_mode, params.no_alloc = api.LLAMA_LOAD_MODE_NONE, True
    with Store.create(library, spec) as store:
        handle = api.llama_model_load_from_file(os.fsencode(one), params)
        assert handle
        wanted = api.llama_context_default_params()
        wanted.n_ctx = 256
        context = api.llama_init_from_model(handle, wanted)
        assert context
        assert context_memory(library, context)[0] > 0
        api.llama_free(context)
        api.llama_model_free(handle)
        serve().close()
        assert store.stats().requests[0] > 0
