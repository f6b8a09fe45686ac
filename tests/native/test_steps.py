"""Steps that llama_decode itself makes: one around each micro-batch, whoever calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from orchestrator.config import Config
from orchestrator.engine.engine import Engine
from orchestrator.errors import NativeError
from orchestrator.events import ComputedStep, Phase, RouteEvent
from orchestrator.native import FAILED

from .copies import copied
from .decoder import Decoder, Seen, Token, prompt

pytestmark = pytest.mark.usefixtures("library_folder")

PROMPT = [int(t) for t in np.random.default_rng(3).integers(0, 250, 41)]
P, D = int(Phase.PREFILL), int(Phase.DECODE)
CANCELLED = 2


class Watched:
    """An engine with a small budget, a context beside its own, and what its store says."""

    def __init__(self, model: Path) -> None:
        config = Config.build(
            model=model, ctx=256, ubatch=64, threads=1, policy="lru", expert_ram=1 << 20
        )
        self.engine = Engine.open(config)
        self.store = self.engine.store
        self.decoder = Decoder(self.engine._loaded.model)
        self.events: list[Seen] = []
        self.steps: list[ComputedStep] = []
        self.store.set_route(self.on_route)
        self.store.set_step_done(self.steps.append)

    def on_route(self, event: RouteEvent) -> None:
        self.events.append(Seen.of(event))
        self.engine.driver.on_route(event)

    def forget(self) -> None:
        """Drops what was read and what was seen."""
        self.decoder.forget()
        self.store.sequence_end()
        self.events.clear()
        self.steps.clear()

    def close(self) -> None:
        self.decoder.close()
        self.engine.close()


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3moe", "q4_k")


@pytest.fixture
def watched(model: Path) -> Iterator[Watched]:
    made = Watched(model)
    yield made
    made.store.check()
    made.close()


def test_micro_batches_are_steps(watched: Watched) -> None:
    """41 tokens in one call, 8 at a time, are six steps, and compute what six calls do."""
    decoder, steps = watched.decoder, watched.steps
    for start in range(0, 41, 8):
        assert decoder.decode(prompt(PROMPT[start : start + 8], start)) == 0
    expected = decoder.logits()
    watched.forget()
    assert decoder.decode(prompt(PROMPT)) == 0
    np.testing.assert_array_equal(decoder.logits(), expected)

    assert [step.n_tokens for step in steps] == [8, 8, 8, 8, 8, 1]
    assert {step.phase for step in steps} == {Phase.PREFILL}  # the last one belongs to a prompt
    assert [step.starts for step in steps] == [(0,), *[()] * 5]
    assert [step.prompt_ends for step in steps] == [*[()] * 5, (0,)]
    assert [step.ends for step in steps] == [(0,), *[()] * 5]
    assert all(step.us > 0 for step in steps)
    numbers = [step.number for step in steps]
    assert numbers == list(range(numbers[0], numbers[0] + 6))
    # the last layer sees tokens with an output alone
    n_layers = watched.engine.model.n_layers
    assert [(seen.step, seen.layer) for seen in watched.events] == [
        (number, layer)
        for number in numbers
        for layer in range(n_layers)
        if layer < n_layers - 1 or number == numbers[-1]
    ]


def test_each_token_has_its_phase(watched: Watched) -> None:
    """A prompt comes in beside the answers of two other sequences."""
    decoder = watched.decoder
    for sequence in (0, 2):
        assert decoder.decode(prompt(PROMPT[:5], 0, sequence)) == 0
    watched.events.clear()
    watched.steps.clear()
    mixed = [
        Token(7, 5, 0, wanted=True),
        *prompt(PROMPT[5:8], 0, 1),
        Token(9, 5, 2, wanted=True),
    ]
    assert decoder.decode(mixed) == 0
    first, *_, last = watched.events
    assert (first.phase, first.phases, first.sequences) == (P, [D, P, P, P, D], [0, 1, 1, 1, 2])
    assert (last.phase, last.phases, last.sequences) == (P, [D, P, D], [0, 1, 2])
    (step,) = watched.steps
    assert (step.phase, step.n_tokens) == (Phase.PREFILL, 5)
    assert (step.starts, step.prompt_ends, step.ends) == ((1,), (1,), ())

    answers = [Token(7, 6, 0, wanted=True), Token(9, 6, 2, wanted=True)]
    assert decoder.decode(answers) == 0
    assert watched.events[-1].phases == [D, D]
    assert watched.steps[-1].phase == Phase.DECODE


def test_callers_may_know_the_phase(watched: Watched) -> None:
    decoder, store = watched.decoder, watched.store
    assert decoder.decode([Token(5, 0, wanted=True)]) == 0
    assert watched.steps[-1].phase == Phase.DECODE  # by what the batch shows
    store.set_phase(Phase.PREFILL)
    assert decoder.decode([Token(6, 1, wanted=True)]) == 0
    assert watched.steps[-1].phase == Phase.PREFILL
    assert watched.steps[-1].prompt_ends == (0,)
    store.set_phase(Phase.DECODE)
    assert decoder.decode(prompt(PROMPT[:4], 2)) == 0
    assert watched.steps[-1].phase == Phase.DECODE
    assert watched.events[0].phases == [D] and watched.events[-1].phases == [D]
    store.set_phase(None)
    assert decoder.decode(prompt(PROMPT[:4], 6)) == 0
    assert watched.steps[-1].phase == Phase.PREFILL


def test_ends_are_told_once(watched: Watched) -> None:
    decoder, store = watched.decoder, watched.store
    for sequence in range(3):
        assert decoder.decode(prompt(PROMPT[:2], 0, sequence)) == 0
    store.sequence_end(1)
    store.sequence_end(3)  # no token of it was computed
    assert decoder.decode([Token(1, 2, 0, wanted=True)]) == 0
    assert watched.steps[-1].ends == (1,)
    store.sequence_end()
    assert decoder.decode([Token(1, 3, 0, wanted=True)]) == 0
    assert watched.steps[-1].ends == (0, 2)
    assert decoder.decode([Token(1, 4, 0, wanted=True)]) == 0
    assert watched.steps[-1].ends == ()


def test_a_read_error_fails_the_step(model: Path, tmp_path: Path) -> None:
    """It has a code of its own and a sentence, nothing stays of the micro-batch, and the next
    step is good."""
    path = copied(model, tmp_path / "cut.gguf", arch="qwen3moe")
    data = path.read_bytes()
    watched = Watched(path)
    decoder, store = watched.decoder, watched.store
    try:
        assert decoder.decode(prompt(PROMPT)) == 0
        expected = decoder.logits()
        watched.forget()
        assert decoder.decode(prompt(PROMPT[:8])) == 0
        first = min(piece.offset for _, each in store.spec.layers for piece in each.values())
        with path.open("r+b") as file:
            file.truncate(first)
        n_steps = len(watched.steps)
        assert decoder.decode(prompt(PROMPT[8:], 8)) == FAILED
        assert len(watched.steps) == n_steps
        assert decoder.last_pos() == 7
        for _ in range(2):
            with pytest.raises(NativeError, match=r"cut\.gguf: expert .* was truncated"):
                store.check_step()
        path.write_bytes(data)
        assert decoder.decode(prompt(PROMPT[8:], 8)) == 0
        store.check_step()
        np.testing.assert_array_equal(decoder.logits(), expected)
    finally:
        watched.close()


def test_a_cancel_is_told_apart(watched: Watched) -> None:
    decoder, store = watched.decoder, watched.store
    assert decoder.decode(prompt(PROMPT[:8])) == 0
    store.cancel(True)
    assert decoder.decode(prompt(PROMPT[8:24], 8)) == CANCELLED
    store.check_step()
    assert decoder.last_pos() == 7
    assert len(watched.steps) == 1
    store.cancel(False)
    assert decoder.decode(prompt(PROMPT[8:24], 8)) == 0


def test_the_contexts_own_abort_callback_stays(watched: Watched) -> None:
    decoder = watched.decoder
    asked: list[bool] = [False]

    @decoder.api.ggml_abort_callback
    def stop(_data: object) -> bool:
        return asked[0]

    decoder.stop_when(stop)
    assert decoder.decode(prompt(PROMPT[:8])) == 0
    asked[0] = True
    assert decoder.decode(prompt(PROMPT[8:16], 8)) == CANCELLED
    watched.store.check_step()
    asked[0] = False
    watched.store.cancel(True)
    assert decoder.decode(prompt(PROMPT[8:16], 8)) == CANCELLED
    watched.store.cancel(False)
    assert decoder.decode(prompt(PROMPT[8:16], 8)) == 0


@pytest.mark.parametrize("where", ["route", "step"])
def test_a_callback_may_fail_the_step(watched: Watched, where: str) -> None:
    """What it raised comes back, whichever micro-batch it was; those before it stay."""
    decoder, store = watched.decoder, watched.store
    error, n = KeyError("odd"), [0]

    def fail(_seen: object) -> None:
        n[0] += 1
        if len(watched.steps) == 2:
            raise error

    def step_done(step: ComputedStep) -> None:
        if where == "step":
            fail(step)
        watched.steps.append(step)

    store.set_step_done(step_done)
    if where == "route":
        store.set_route(fail)
    assert decoder.decode(prompt(PROMPT)) == FAILED
    assert n[0] > 0
    assert decoder.last_pos() == 15
    with pytest.raises(KeyError) as caught:
        store.check_step()
    assert caught.value is error
    store.set_step_done(watched.steps.append)
    store.set_route(watched.on_route)
    assert decoder.decode(prompt(PROMPT[16:], 16)) == 0


def test_prefill_may_be_watched_alone(watched: Watched) -> None:
    """Without a callback, decode steps ask for the default tier; the logits are those of steps
    that are watched."""
    decoder, store = watched.decoder, watched.store

    def answer() -> np.ndarray:
        assert decoder.decode(prompt(PROMPT[:8])) == 0
        for pos in range(8, 12):
            assert decoder.decode([Token(pos, pos, wanted=True)]) == 0
        return decoder.logits()

    expected = answer()
    assert {seen.phase for seen in watched.events} == {P, D}
    watched.forget()
    store.reset_stats()
    store.set_route(watched.on_route, 0, (Phase.PREFILL,))
    np.testing.assert_array_equal(answer(), expected)
    assert {seen.phase for seen in watched.events} == {P}
    stats = store.stats()
    assert stats.callbacks[Phase.PREFILL] > 0 and stats.callbacks[Phase.DECODE] == 0
    assert stats.routed[Phase.DECODE][0] > 0
    assert [step.phase for step in watched.steps] == [Phase.PREFILL, *[Phase.DECODE] * 4]


def test_the_engine_goes_on_after_a_failed_step(model: Path) -> None:
    with Engine.open(
        Config.build(model=model, ctx=256, threads=1, policy="lru", expert_ram=1 << 20)
    ) as engine:
        expected = engine.eval(PROMPT, 0)
        original, error = engine.policy.step_done, RuntimeError("not this one")

        def fail(_report: object) -> None:
            raise error

        engine.policy.step_done = fail  # type: ignore[method-assign, assignment]
        with pytest.raises(RuntimeError) as caught:
            engine.eval(PROMPT[:3], 41)
        assert caught.value is error
        engine.policy.step_done = original  # type: ignore[method-assign]
        np.testing.assert_array_equal(engine.eval(PROMPT, 0), expected)
