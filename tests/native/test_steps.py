"""Steps that llama_decode makes: one for each micro-batch, for every caller."""

import ctypes

import numpy as np
import pytest

from orchestrator.errors import NativeError
from orchestrator.events import Phase
from orchestrator.native import FAILED
from orchestrator.native.llama import Bindings

from .conftest import drawn, opened
from .decoder import Decoder, Token, prompt

PROMPT = drawn(41, 3)
P, D = Phase.PREFILL, Phase.DECODE
CANCELLED = 2


class Watched:
    """A model with a small budget, a second context on it, and records of its store.

    steps: copies of the step reports. events: (layer, step, phase, phases of the tokens, sequences
    of the tokens).
    """

    def __init__(self, model):
        self.runtime = opened(model, ubatch=64, policy="lru", expert_ram=1 << 20)
        self.store = self.runtime.inside.store
        self.decoder = Decoder(self.runtime.inside.llama)
        self.events = []
        self.steps = []
        self.store.set_route(self.on_route)
        self.store.set_step_done(self.steps.append)

    def on_route(self, event):
        of_tokens = event.phases_array.tolist(), event.sequences_array.tolist()
        self.events.append((event.layer, event.step, event.phase, *of_tokens))
        self.runtime.inside.driver.on_route(event)

    def read(self, tokens, pos=0, sequence=0):
        """Decode a prompt or a part of one. Return its last step."""
        assert self.decoder.decode(prompt(tokens, pos, sequence)) == 0
        return self.steps[-1]

    def answer(self, token, pos):
        assert self.decoder.decode([Token(token, pos, wanted=True)]) == 0
        return self.steps[-1]

    def forget(self):
        """Drop the sequences and the records."""
        self.decoder.forget()
        self.store.sequence_end()
        self.events.clear()
        self.steps.clear()

    def close(self):
        self.decoder.close()
        self.runtime.close()


@pytest.fixture
def watched(one):
    made = Watched(one)
    yield made
    made.store.check()
    made.close()


def test_micro_batches_are_steps(watched):
    """41 tokens in one call with micro-batches of 8 are six steps, with the logits of six calls."""
    steps = watched.steps
    for start in range(0, 41, 8):
        watched.read(PROMPT[start : start + 8], start)
    expected = watched.decoder.logits()
    watched.forget()
    watched.read(PROMPT)
    np.testing.assert_array_equal(watched.decoder.logits(), expected)

    assert [step.n_tokens for step in steps] == [8, 8, 8, 8, 8, 1]
    assert {step.phase for step in steps} == {P}  # the last step belongs to a prompt
    assert [step.starts for step in steps] == [(0,), *[()] * 5]
    assert [step.prompt_ends for step in steps] == [*[()] * 5, (0,)]
    assert [step.ends for step in steps] == [(0,), *[()] * 5]
    assert all(step.us > 0 for step in steps)
    numbers = [step.number for step in steps]
    assert numbers == list(range(numbers[0], numbers[0] + 6))
    # the last layer only gets tokens with an output
    n_layers = watched.runtime.model.n_layers
    assert [(step, layer) for layer, step, *_ in watched.events] == [
        (number, layer)
        for number in numbers
        for layer in range(n_layers)
        if layer < n_layers - 1 or number == numbers[-1]
    ]


def test_each_token_has_its_phase(watched):
    """Each token has its own phase if a prompt runs in one step with two answers."""
    for sequence in (0, 2):
        watched.read(PROMPT[:5], 0, sequence)
    watched.events.clear()
    watched.steps.clear()
    first, second = Token(7, 5, 0, wanted=True), Token(9, 5, 2, wanted=True)
    assert watched.decoder.decode([first, *prompt(PROMPT[5:8], 0, 1), second]) == 0
    assert watched.events[0][2:] == (P, [D, P, P, P, D], [0, 1, 1, 1, 2])
    assert watched.events[-1][2:] == (P, [D, P, D], [0, 1, 2])
    (step,) = watched.steps
    assert (step.phase, step.n_tokens) == (P, 5)
    assert (step.starts, step.prompt_ends, step.ends) == ((1,), (1,), ())

    answers = [Token(7, 6, 0, wanted=True), Token(9, 6, 2, wanted=True)]
    assert watched.decoder.decode(answers) == 0
    assert watched.events[-1][3] == [D, D]
    assert watched.steps[-1].phase == D


def test_callers_may_set_the_phase(watched):
    """`set_phase` overrides the phase that follows from the batch."""
    store = watched.store
    assert watched.answer(5, 0).phase == D  # derived from the batch
    store.set_phase(P)
    step = watched.answer(6, 1)
    assert (step.phase, step.prompt_ends) == (P, (0,))
    store.set_phase(D)
    assert watched.read(PROMPT[:4], 2).phase == D
    assert watched.events[0][3] == watched.events[-1][3] == [D]
    store.set_phase(None)
    assert watched.read(PROMPT[:4], 6).phase == P


def set_prompts(watched, *sequences):
    given = (ctypes.c_int32 * len(sequences))(*sequences)
    function = Bindings.load().api._lib.moe_edge_set_prompts
    function.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32]
    function(watched.decoder.handle, given, len(sequences))


@pytest.mark.parametrize(
    ("prompts", "phases", "ends"),
    [
        ((), [D, D, D], ()),
        ((1,), [D, P, D], (1,)),
        ((0, 2), [P, D, P], (0, 2)),
        ((3,), [D] * 3, ()),
    ],
)
def test_callers_may_name_the_sequences_with_prompts(watched, prompts, phases, ends):
    """Tokens of the named sequences have the prefill phase, all others the decode phase."""
    for sequence in range(3):
        watched.read(PROMPT[:2], 0, sequence)
    watched.events.clear()
    set_prompts(watched, *prompts)
    tokens = [Token(7, 2, sequence, wanted=True) for sequence in range(3)]
    assert watched.decoder.decode(tokens) == 0
    assert watched.events[0][3] == watched.events[-1][3] == phases
    assert watched.steps[-1].phase == (P if P in phases else D)
    assert watched.steps[-1].prompt_ends == ends


def test_the_latest_declaration_of_phases_counts(watched):
    watched.store.set_phase(P)
    set_prompts(watched, 1)
    assert watched.read(PROMPT[:4]).phase == D
    watched.store.set_phase(None)
    assert watched.read(PROMPT[:4], 4).phase == P
    set_prompts(watched, 1)
    watched.store.set_phase(P)
    assert watched.answer(5, 8).phase == P


def test_steps_without_a_callback_start_no_sequence(watched):
    """Sequences of steps without a callback are not reported as ended.

    Earlier ends are reported later.
    """
    watched.read(PROMPT[:2], 0, 1)
    watched.store.sequence_end(1)
    watched.store.set_step_done(None)
    watched.read(PROMPT[:2], 0, 2)
    watched.store.sequence_end(2)
    watched.store.set_step_done(watched.steps.append)
    assert watched.read(PROMPT[:2]).ends == (1,)


def test_ends_are_reported_once(watched):
    store = watched.store
    for sequence in range(3):
        watched.read(PROMPT[:2], 0, sequence)
    store.sequence_end(1)
    store.sequence_end(3)  # none of its tokens was computed
    assert watched.answer(1, 2).ends == (1,)
    store.sequence_end()
    assert watched.answer(1, 3).ends == (0, 2)
    assert watched.answer(1, 4).ends == ()


def test_a_read_error_fails_the_step(one, tmp_path):
    """The step fails with its own status and a message.

    Its micro-batch is dropped, and the next step works.
    """
    path, data = tmp_path / "cut.gguf", one.read_bytes()
    path.write_bytes(data)
    watched = Watched(path)
    decoder, store = watched.decoder, watched.store
    try:
        watched.read(PROMPT)
        expected = decoder.logits()
        watched.forget()
        watched.read(PROMPT[:8])
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
        watched.read(PROMPT[8:], 8)
        store.check_step()
        np.testing.assert_array_equal(decoder.logits(), expected)
    finally:
        watched.close()


def test_a_cancel_has_its_own_status(watched):
    """A cancelled step returns status 2 and keeps the earlier tokens.

    This holds for the store's cancel and for the context's own abort callback, which stays
    installed.
    """
    decoder, store = watched.decoder, watched.store
    asked = [False]

    @decoder.api.ggml_abort_callback
    def stop(_data):
        return asked[0]

    decoder.stop_when(stop)
    watched.read(PROMPT[:8])
    for its, ours in ((True, False), (False, True)):
        asked[0] = its
        store.cancel(ours)
        assert decoder.decode(prompt(PROMPT[8:24], 8)) == CANCELLED
        store.check_step()
        assert decoder.last_pos() == 7 and len(watched.steps) == 1
    store.cancel(False)
    watched.read(PROMPT[8:24], 8)


@pytest.mark.parametrize("where", ["route", "step"])
def test_a_callback_may_fail_the_step(watched, where):
    """An exception in a callback fails the step, and `check_step` raises it.

    Earlier micro-batches stay.
    """
    decoder, store = watched.decoder, watched.store
    error, n = KeyError("odd"), [0]

    def fail(_seen):
        n[0] += 1
        if len(watched.steps) == 2:
            raise error

    def step_done(step):
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
    watched.read(PROMPT[16:], 16)


def test_a_callback_for_prefill_only(watched):
    """Without a callback, decode steps request the default tier.

    Logits equal those with a callback.
    """
    store = watched.store

    def answer():
        watched.read(PROMPT[:8])
        for pos in range(8, 12):
            watched.answer(pos, pos)
        return watched.decoder.logits()

    expected = answer()
    assert {phase for _, _, phase, *_ in watched.events} == {P, D}
    watched.forget()
    store.reset_stats()
    store.set_route(watched.on_route, 0, (P,))
    np.testing.assert_array_equal(answer(), expected)
    assert {phase for _, _, phase, *_ in watched.events} == {P}
    stats = store.stats()
    assert stats.callbacks[P] > 0 and stats.callbacks[D] == 0
    assert stats.routed[D][0] > 0
    assert [step.phase for step in watched.steps] == [P, *[D] * 4]
