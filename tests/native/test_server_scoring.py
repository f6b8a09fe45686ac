"""Prompts that llama.cpp's server does not score, scored on its context by the evaluator."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from orchestrator.events import Phase
from orchestrator.lab.eval.judge import Judge
from orchestrator.plan.footprint import SCORING_BYTES, output_tokens
from orchestrator.runtime.evaluator import log_softmax
from orchestrator.runtime.runtime import Runtime
from orchestrator.serve.admission import Body
from orchestrator.serve.bodies import Words
from orchestrator.serve.scoring import _logits, score
from orchestrator.serve.served import SCORED_TOKENS, Served
from orchestrator.serve.settings import ServeSettings
from orchestrator.serve.state import State, Stopped
from orchestrator.serve.wire import Refusal

from .servers import MIB, answered, broken, config, server_request, serving

SETTINGS = {"ctx": 256, "ram": 150 * MIB, "policy": "lru", "high_tier": "q4_k", "exact": True}
TEXT = "The fox sat by the river and looked at the stars. A star, they said, is hot and far away. "
OTHERS = ("What is the capital of Norway?", "How many legs does a spider have?")


@pytest.fixture(scope="module")
def runtime(library):
    with serving(2, **SETTINGS) as made:
        yield made


@pytest.fixture
def deciding():
    """A server whose policy is asked in each layer of a prompt."""
    with serving(**SETTINGS | {"policy": "dymoe"}) as made:
        yield made


def tokens_of(runtime, text):
    return runtime.vocabulary.tokenize(text, add_special=True, parse_special=True)


def scored(runtime, prompt, top=1, n_more=0):
    data = {"prompt": prompt, "logprobs": top, "max_tokens": n_more}

    async def whole():
        state = State(ServeSettings())
        served = Served(runtime, state.settings, Words("gpt2", ""), lambda _: None)
        body = Body(state.bodies, 2**17)
        body.data = json.dumps(data).encode()
        return b"".join(await score(state, served, body))

    answer = json.loads(asyncio.run(whole()))
    return answer


def choice_of(runtime, prompt, **more):
    (choice,) = scored(runtime, prompt, **more)["choices"]
    found = choice["logprobs"]
    return found


def said(runtime, prompt, **more):
    """How many tokens were read for an answer, and that answer."""
    answer = answered(runtime, prompt=prompt, max_tokens=8, ignore_eos=True, **more)
    return answer["timings"]["prompt_n"], answer["choices"][0]["text"]


def test_scores_are_those_of_eval_to_the_bit(runtime):
    """Where eval computes as many tokens at once: sums have another order otherwise, by which a
    router's close choices go."""
    tokens = tokens_of(runtime, TEXT * 5)
    assert SCORED_TOKENS == runtime.inside.context.outputs < len(tokens)
    found = choice_of(runtime, tokens, top=3, n_more=1)
    made = config(**SETTINGS, ubatch=SCORED_TOKENS, logits_all=True)
    with Runtime.open(made) as other, other.evaluator() as evaluator:
        rows = Judge(evaluator, prefill=True).rows([*tokens, 0])
        expected = [log_softmax(row) for row in rows]
    following = [*tokens[1:], int(expected[-1].argmax())]
    ours = [float(row[token]) for row, token in zip(expected, following, strict=True)]
    assert found["token_logprobs"] == [None, *ours]
    for named, row, logp in zip(found["top_logprobs"][1:], expected, ours, strict=True):
        best = np.sort(row)[::-1][:3].tolist()
        assert list(named.values()) == best + [logp] * (logp not in best)


def test_there_is_room_for_the_longest_prompt_whatever_is_kept(runtime):
    """Both sequences hold whole contexts, and lose them."""
    room = runtime.about.n_ctx
    words = tokens_of(runtime, TEXT * 20)
    prompts = [[*tokens_of(runtime, other), *words][: room - 8] for other in OTHERS]
    first = choice_of(runtime, words[:room])
    for seat, prompt in enumerate(prompts):
        assert said(runtime, prompt, id_slot=seat)[0] == room - 8
    assert choice_of(runtime, words[:room]) == first
    scored(runtime, "a")  # gives the context back, for the other tests


def test_what_is_answered_is_the_same_before_and_behind(runtime):
    before = said(runtime, OTHERS[0], cache_prompt=False)
    scored(runtime, TEXT)
    runtime.inside.store.reset_stats()
    assert said(runtime, OTHERS[0], cache_prompt=False) == before
    assert runtime.inside.store.stats().requests[Phase.DECODE] > 0  # tokens have their own phase


def test_it_ends_between_parts_and_leaves_nothing(runtime):
    tokens, goes_on = tokens_of(runtime, TEXT * 5), iter((True, True, False))
    with runtime.evaluator() as evaluator:
        parts = _logits(evaluator, tokens, lambda: next(goes_on))
        assert [len(next(parts)) for _ in range(2)] == [SCORED_TOKENS] * 2
        with pytest.raises(Stopped):
            next(parts)
    context = runtime.inside.context
    memory = context.api.llama_get_memory(context.handle)
    assert context.api.llama_memory_seq_pos_max(memory, 0) == -1
    assert said(runtime, OTHERS[0])[1]


def test_a_policy_that_fails_fails_the_request_alone(deciding, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(deciding.inside.policy, "decide", broken)
        with pytest.raises(Refusal, match="the policy failed: RuntimeError: no idea"):
            scored(deciding, TEXT)
    assert scored(deciding, TEXT)["choices"]
    assert said(deciding, OTHERS[0])[1]


def test_a_stop_ends_the_part_that_runs(deciding, monkeypatch):
    """As SIGTERM does, from another thread."""
    decide, layers = deciding.inside.policy.decide, []

    def stopping(*event):
        layers.append(event)
        deciding.stop()
        decide(*event)

    monkeypatch.setattr(deciding.inside.policy, "decide", stopping)
    with pytest.raises(Stopped), deciding.evaluator() as evaluator:
        list(_logits(evaluator, [*range(200)], lambda: not layers))
    assert len(layers) == 1


@pytest.mark.parametrize(
    ("n_vocab", "n_ubatch", "expected"),
    [(6144, 512, SCORED_TOKENS), (6144, 8, 8), (151_936, 512, 13), (10**8, 512, 1)],
)
def test_logits_of_a_part_are_in_the_plan(n_vocab, n_ubatch, expected):
    scoring = server_request(config(**SETTINGS))
    found = output_tokens(scoring, n_vocab, n_ubatch)
    assert found == expected
    assert found == 1 or 2 * 4 * found * n_vocab <= SCORING_BYTES
    assert output_tokens(unscored(scoring), n_vocab, n_ubatch) == 1


def unscored(request):
    return replace(request, needs=replace(request.needs, scored=0))


def planned(request):
    with Runtime.open(request) as runtime:
        return runtime.plan


def test_experts_give_up_what_the_logits_take():
    """The experts' memory is whole slots, so that they give up a little less or more."""
    scoring = server_request(config(**SETTINGS))
    with_them, without = planned(scoring), planned(unscored(scoring))
    assert with_them.scratch_bytes - without.scratch_bytes >= 4 * (SCORED_TOKENS - 1) * 6144
    assert with_them.budget_bytes < without.budget_bytes
