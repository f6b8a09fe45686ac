"""A model's file that is written to while it is in use ends every answer with that sentence."""

import os
import shutil

import pytest

from gguf_tools.errors import ChangedError
from orchestrator.config import Config, Sampling
from orchestrator.runtime.engine import Engine

from .conftest import drawn

PROMPT = drawn(24, 5)
RUNS = {
    "plain": {"policy": "plain"},
    "managed": {"policy": "lru", "expert_ram": 1 << 20},
}
CALLS = {
    "generate": lambda engine: list(engine.generate(PROMPT, Sampling(temp=0), 4)),
    "eval": lambda engine: engine.eval(PROMPT, 0),
    "decode_batch": lambda engine: engine.decode_batch([7], [0]),
}


def overwrite(path):
    """Other bytes in the same file, of the same size."""
    data = path.read_bytes()
    with open(path, "r+b") as file:
        file.write(data[:4096] + bytes(len(data) - 4096))


@pytest.fixture(params=[("q4_k",), ("q8_0", "q4_k")], ids=["plain GGUF", "packed"])
def path(request, library, tiny_model, tmp_path):
    copy = tmp_path / "model.gguf"
    shutil.copyfile(tiny_model("qwen3moe", *request.param), copy)
    os.utime(copy, ns=(1, 1))
    return copy


def opened(path, how, progress=None):
    settings = {"ctx": 256, "threads": 1, "sequences": 1, **RUNS[how]}
    return Engine.open(Config.build(model=path, **settings), progress)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", RUNS)
def test_it_is_said(path, how, call):
    with opened(path, how) as engine:
        CALLS[call](engine)
        overwrite(path)
        for _ in range(2):
            with pytest.raises(ChangedError, match=rf"{path} was written to while it is in use"):
                CALLS[call](engine)


def test_in_the_middle_of_an_answer(path):
    with opened(path, "managed") as engine:
        pieces = engine.generate(PROMPT, Sampling(temp=0), 200)
        next(pieces)
        overwrite(path)
        with pytest.raises(ChangedError, match="was written to"):
            list(pieces)


def test_while_it_loads(path):
    def progress(what, _share):
        if what.startswith("Loading"):
            overwrite(path)

    with (
        pytest.raises(ChangedError, match="was written to"),
        opened(path, "managed", progress) as e,
    ):
        e.eval(PROMPT, 0)


def test_another_file_of_its_name_leaves_the_model_alone(path):
    with opened(path, "managed") as engine:
        first = engine.eval(PROMPT, 0)
        path.rename(path.with_name("old"))
        path.write_bytes(b"other")
        assert (engine.eval(PROMPT, 0) == first).all()
