"""Scores of prompts (log probabilities), which llama.cpp's server lacks.

The evaluator computes them on its context.
"""

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
    """A server whose policy decides in each layer of a prompt."""
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
    """Return (tokens read, text of the answer)."""
    answer = answered(runtime, prompt=prompt, max_tokens=8, ignore_eos=True, **more)
    return answer["timings"]["prompt_n"], answer["choices"][0]["text"]


def test_scores_equal_evals_bit_for_bit(runtime):
    """Scores equal those of `eval` bit for bit, with the same number of tokens per micro-batch.

    With another number, sums have another order, which decides close choices of a router.
    """
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


def test_the_longest_prompt_evicts_kept_conversations(runtime):
    """A prompt as long as the context is scored although both sequences hold full contexts.

    The sequences lose their tokens.
    """
    n_ctx = runtime.about.n_ctx
    words = tokens_of(runtime, TEXT * 20)
    prompts = [[*tokens_of(runtime, other), *words][: n_ctx - 8] for other in OTHERS]
    first = choice_of(runtime, words[:n_ctx])
    for slot, prompt in enumerate(prompts):
        assert said(runtime, prompt, id_slot=slot)[0] == n_ctx - 8
    assert choice_of(runtime, words[:n_ctx]) == first
    scored(runtime, "a")  # frees the context for the other tests


def test_scoring_does_not_change_later_answers(runtime):
    before = said(runtime, OTHERS[0], cache_prompt=False)
    scored(runtime, TEXT)
    runtime.inside.store.reset_stats()
    assert said(runtime, OTHERS[0], cache_prompt=False) == before
    assert runtime.inside.store.stats().requests[Phase.DECODE] > 0  # tokens have their own phase


def test_scoring_stops_between_parts_and_leaves_no_tokens(runtime):
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


def test_a_failing_policy_fails_only_its_request(deciding, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(deciding.inside.policy, "decide", broken)
        with pytest.raises(Refusal, match="the policy failed: RuntimeError: no idea"):
            scored(deciding, TEXT)
    assert scored(deciding, TEXT)["choices"]
    assert said(deciding, OTHERS[0])[1]


def test_a_stop_ends_the_running_part(deciding, monkeypatch):
    """A stop from another thread, as with SIGTERM, ends the running part."""
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
def test_the_plan_reserves_the_logits_of_a_part(n_vocab, n_ubatch, expected):
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


def test_scoring_takes_its_logits_from_the_expert_budget():
    """The expert budget shrinks by whole slots."""
    scoring = server_request(config(**SETTINGS))
    with_them, without = planned(scoring), planned(unscored(scoring))
    assert with_them.scratch_bytes - without.scratch_bytes >= 4 * (SCORED_TOKENS - 1) * 6144
    assert with_them.budget_bytes < without.budget_bytes
