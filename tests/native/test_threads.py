"""ggml's compute threads: their barrier, their number, and equal bits for every number."""

import subprocess
import sys

import numpy as np
import pytest
from answering import answered

from gguf_tools.process import default_threads
from orchestrator.config import Config
from orchestrator.lab.check.checking import CheckOptions, _Check
from orchestrator.lab.eval.run import EvalOptions, eval_config
from orchestrator.native.llama import Bindings
from orchestrator.runtime import load
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.runtime import Runtime

from .conftest import HERE, build, drawn, opened, run_program, until

TOKENS = drawn(40, 3)
PATHS = {
    "plain": {"policy": "plain"},
    "managed": {"policy": "lru", "force_managed": True},
    "as in the file": {"policy": "lru", "force_managed": True, "exact": True},
    "two tiers": {"policy": "dymoe", "low_tier": "skip", "force_managed": True},
}


def test_number_of_threads_follows_the_free_cores(compile_native):
    program = compile_native(
        "threads_test", [HERE / "threads_test.cpp"], "-std=c++17", libraries=()
    )
    assert "the number of threads follows the free cores" in run_program(program, timeout_s=60)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems use upstream's barrier")
@pytest.mark.parametrize("flag", ["-O2", "-fsanitize=thread"])
def test_barrier(flag, compile_native):
    sources = [HERE / "barrier_test.c"]
    program = compile_native(f"barrier{flag}", sources, "-std=gnu11", flag, libraries=())
    assert "all passed together" in run_program(program, timeout_s=120)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tier", ["q4_k", "q4_0", "q8_0"])
def test_the_number_of_threads_changes_no_bits(path, tier, tiny_model):
    """Up to 256 tokens, logits are equal bit for bit for every number of threads.

    Beyond that, upstream's attention sums per thread.
    """
    model = tiny_model("olmoe", tier)

    def logits(numbers):
        with (
            opened(model, ubatch=16, threads=1, **PATHS[path]) as runtime,
            runtime.evaluator() as e,
        ):
            set_threads = e.inside.context.api.llama_set_n_threads
            found = []
            for at, token in enumerate(TOKENS):
                n = numbers[at % len(numbers)]
                set_threads(e.inside.context.handle, n, n)
                found.append(e.eval([token], at))
            found.append(e.eval(TOKENS * 3, len(TOKENS)))
        return np.concatenate(found)

    expected = logits([3])
    for numbers in ([1], [3, 1, 2]):
        np.testing.assert_array_equal(logits(numbers), expected)


def test_settings_that_fix_the_number_of_threads(one, monkeypatch):
    made = []

    class Recording(load.FreeCores):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(load, "FreeCores", Recording)
    for settings in ({"threads": 1}, {"exact": True}, {"seed": 7}):
        with opened(one, **{"threads": None, **settings}):
            assert not made, settings
    with opened(one, threads=None) as runtime, runtime.evaluator() as e:
        assert len(made) == 1
        assert e.inside.context.api.llama_n_threads(e.inside.context.handle) == default_threads()
    assert made[0]._context == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not report waiting threads")
@pytest.mark.skipif(default_threads() < 2, reason="needs two cores")
def test_busy_cores_reduce_the_number_of_threads(one):
    """With busy cores, fewer threads compute a token. Prompts use all threads."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(3 * default_threads())
    ]
    try:
        with opened(one, threads=None, policy="plain") as runtime, runtime.evaluator() as e:
            number, context = e.inside.context.api.llama_n_threads, e.inside.context.handle
            e.eval(TOKENS, 0)
            until(
                lambda: number(context) < default_threads(),
                lambda: e.eval([TOKENS[0]], len(TOKENS)),
            )
            e.eval(TOKENS, 0)  # a part of a prompt takes all of them
            assert number(context) == default_threads()
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def answer_with_advice(model, advice, monkeypatch, **settings):
    """Return a long answer. advice: the number of threads that the load suggests."""

    class Advised(load.FreeCores):
        def __init__(self, library, context):
            super().__init__(library, context)
            self.close()  # the number stays until the next run sets another
            Bindings.load().api.llama_set_n_threads(context, advice, advice)

    monkeypatch.setattr(load, "FreeCores", Advised)
    options = {"policy": "plain", "threads": None, "ctx": 1024, "ubatch": 512, "temp": 0.8}
    config = build(model, **options, **settings)
    with Runtime.open(config, answering=Answering()) as runtime:
        return answered(runtime, drawn(600, 3), 200, temperature=0.8)["content"]


def test_a_seed_gives_one_answer_under_changing_load(tiny_model, monkeypatch):
    """With a seed, answers are equal although the load suggests different numbers of threads.

    Beyond about 512 tokens, the number of threads changes the order of sums in attention.
    """
    model = tiny_model("olmoe", "q8_0")
    answers = [
        answer_with_advice(model, 1 + run % 3, monkeypatch, seed=7, ram=1 << 30)
        for run in range(10)
    ]
    assert all(each == answers[0] for each in answers)


@pytest.mark.parametrize("made", ["eval", "check"])
def test_measurements_fix_the_number_of_threads(one, made):
    config = Config.build(model=one)
    assert config.adapts_threads
    measured = (
        eval_config(config, EvalOptions())
        if made == "eval"
        else _Check(config, CheckOptions(), lambda *_: None).config
    )
    assert measured.threads == default_threads() and not measured.adapts_threads
