"""With how many threads a context decodes, and that their number changes no bits."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gguf_tools.process import default_threads
from orchestrator.config import Config
from orchestrator.engine import load
from orchestrator.engine.engine import Engine
from patches.upstream import PATCHES

from .conftest import HERE, run_program

TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 250, 40)]
PATHS = {
    "plain": {"policy": "plain"},
    "managed": {"policy": "lru", "force_managed": True},
    "as in the file": {"policy": "lru", "force_managed": True, "exact": True},
    "two tiers": {"policy": "dymoe", "low_tier": "skip", "force_managed": True},
}


def test_as_many_as_find_a_core(tmp_path: Path) -> None:
    program = tmp_path / "threads_test"
    command = ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1"]
    command += [f"-I{PATCHES / 'native'}", str(HERE / "threads_test.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    assert "as many threads as find a core" in run_program(program, timeout_s=60)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tier", ["q4_k", "q4_0", "q8_0"])
def test_their_number_changes_no_bits(
    path: str, tier: str, tiny_model: Callable[..., Path], library: object
) -> None:
    """Behind less than 256 tokens: beyond that upstream's attention sums by thread."""
    config = Config.build(model=tiny_model("olmoe", tier), ctx=256, ubatch=16, **PATHS[path])

    def logits(numbers: list[int]) -> np.ndarray:
        with Engine.open(config.with_changes(threads=max(numbers))) as engine:
            set_threads = engine.context.api.llama_set_n_threads
            found = []
            for at, token in enumerate(TOKENS):
                n = numbers[at % len(numbers)]
                set_threads(engine.context.handle, n, n)
                found.append(engine.eval([token], at))
            found.append(engine.eval(TOKENS * 3, len(TOKENS)))
        return np.concatenate(found)

    expected = logits([3])
    for numbers in ([1], [3, 1, 2]):
        np.testing.assert_array_equal(logits(numbers), expected)


def test_who_keeps_a_number(
    tiny_model: Callable[..., Path], library: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Seen(load.FreeCores):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(load, "FreeCores", Seen)
    config = Config.build(model=tiny_model("olmoe", "q8_0"), ctx=256)
    for settings in ({"threads": 1}, {"exact": True}):
        with Engine.open(config.with_changes(**settings)):
            assert not made
    with Engine.open(config) as engine:
        assert len(made) == 1
        assert engine.context.api.llama_n_threads(engine.context.handle) == default_threads()
    assert made[0]._context == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody says who waits for a core")
@pytest.mark.skipif(default_threads() < 2, reason="needs two cores")
def test_beside_busy_loops(tiny_model: Callable[..., Path], library: object) -> None:
    """With more processes than cores a token is soon computed by fewer threads."""
    config = Config.build(model=tiny_model("olmoe", "q4_k"), ctx=256, policy="plain")
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(3 * default_threads())
    ]
    try:
        with Engine.open(config) as engine:
            number = engine.context.api.llama_n_threads
            end = time.perf_counter() + 600
            engine.eval(TOKENS, 0)
            seen = default_threads()
            while seen == default_threads() and time.perf_counter() < end:
                engine.eval([TOKENS[0]], len(TOKENS))
                seen = number(engine.context.handle)
            assert seen < default_threads()
            engine.eval(TOKENS, 0)  # a part of a prompt takes all of them
            assert number(engine.context.handle) == default_threads()
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
