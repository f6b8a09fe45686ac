"""If a model file is written to while in use, every answer fails with a message that says so."""

import os
import shutil
from contextlib import closing
from itertools import count

import pytest
from answering import answered, submitted
from asking import request_of

from gguf_tools.errors import ChangedError
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.runtime import Runtime

from .conftest import drawn

PROMPT = drawn(24, 5)
RUNS = {
    "plain": {"policy": "plain"},
    "managed": {"policy": "lru", "expert_ram": 1 << 20},
}


def evaluate(runtime):
    with runtime.evaluator() as e:
        e.eval(PROMPT, 0)


def decode_batch(runtime):
    with runtime.evaluator() as e:
        e.decode_batch([7], [0])


def answer(runtime):
    answered(runtime, PROMPT, 4)


CALLS = (answer, evaluate, decode_batch)


def overwrite(path):
    """Write other bytes of the same size into the same file."""
    data = path.read_bytes()
    with open(path, "r+b") as file:
        file.write(data[:4096] + bytes(len(data) - 4096))


@pytest.fixture(params=[("q4_k",), ("q8_0", "q4_k")], ids=["plain GGUF", "packed"])
def path(request, library, tiny_model, tmp_path):
    copy = tmp_path / "model.gguf"
    shutil.copyfile(tiny_model("qwen3moe", *request.param), copy)
    os.utime(copy, ns=(1, 1))
    return copy


def opened(path, how, progress=None, answering=None):
    settings = {"ctx": 256, "threads": 1, "sequences": 1, **RUNS[how]}
    return Runtime.open(request_of(model=path, **settings), progress, answering)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", RUNS)
def test_every_call_fails_after_a_write(path, how, call):
    answering = Answering() if call is answer else None
    with opened(path, how, answering=answering) as runtime:
        call(runtime)
        overwrite(path)
        for _ in range(2):
            with pytest.raises(ChangedError, match=rf"{path} was written to while it is in use"):
                call(runtime)


def test_a_write_during_an_answer(path):
    with opened(path, "managed", answering=Answering()) as runtime:
        inside, calls = runtime.inside, count()

        def route(event):
            if next(calls) == 40:
                overwrite(path)
            inside.driver.on_route(event)

        inside.store.set_route(route)
        with (
            closing(submitted(runtime, PROMPT, 200, stream=True, ignore_eos=True)) as answer,
            pytest.raises(ChangedError, match="was written to"),
        ):
            list(answer)
        assert next(calls) > 40


def test_a_write_during_the_load(path):
    def progress(what, _share):
        if what.startswith("Loading"):
            overwrite(path)

    with (
        pytest.raises(ChangedError, match="was written to"),
        opened(path, "managed", progress) as runtime,
    ):
        evaluate(runtime)


def test_a_new_file_of_the_same_name_changes_nothing(path):
    with opened(path, "managed") as runtime, runtime.evaluator() as e:
        first = e.eval(PROMPT, 0)
        path.rename(path.with_name("old"))
        path.write_bytes(b"other")
        assert (e.eval(PROMPT, 0) == first).all()
