"""Requests that are cancelled or fail within a step: the server keeps the tokens read before."""

import json
import threading

import pytest

from .conftest import HANG_S
from .servers import MIB, answered, ask, broken, posted, serving, whole

DYMOE = {"policy": "dymoe", "expert_ram": 16 * MIB, "ubatch": 64, "ctx": 1024}
WORDS = "Norway Peru Japan Kenya Spain Chile Egypt India".split()


def text_of(n_words, first=0):
    """Return a prompt without repetitions."""
    return " ".join(f"{WORDS[i % 8]} {first + i}," for i in range(n_words))


def on_sequence(runtime, sequence, **data):
    """Submit a greedy request on a sequence and return its running answer."""
    body = {"temperature": 0, "ignore_eos": True, **data}
    return posted(runtime, "/v1/completions", [sequence], **body)


class Held:
    """A wrapper of a policy that blocks a chosen call of `decide` until `go_on` is set."""

    def __init__(self, policy, monkeypatch):
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.calls, self.at = 0, 0
        self._is_there = lambda _event: False
        decide = policy.decide

        def held(event, *others):
            self.calls += 1
            if self._is_there(event):
                self._is_there = lambda _event: False
                go_on = self.go_on
                self.reached.set()
                go_on.wait(HANG_S)
            decide(event, *others)

        monkeypatch.setattr(policy, "decide", held)

    def hold(self, in_calls):
        """Block the call after the next `in_calls` calls."""
        at = self.at = self.calls + in_calls + 1
        self.hold_where(lambda _event: self.calls == at)

    def hold_where(self, is_there):
        """Block the first call for whose event is_there returns True."""
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._is_there = is_there


def cancel_at_hold(held, answer):
    """Cancel an answer while the policy is blocked within a step."""
    assert held.reached.wait(HANG_S)
    answer.cancel()
    held.go_on.set()
    answer.close()


def empty(runtime):
    """Empty all sequences."""
    with runtime.evaluator():
        pass


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_cancel_ends_the_micro_batch_and_keeps_earlier_ones(monkeypatch):
    with serving(**DYMOE) as runtime:
        n_layers = runtime.model.n_layers
        held = Held(runtime.inside.policy, monkeypatch)
        held.hold(2 * n_layers + 1)  # in the third micro-batch of 64 tokens
        prompt = text_of(120)
        cancel_at_hold(held, on_sequence(runtime, 0, prompt=prompt, max_tokens=4))
        assert held.calls == held.at  # no further layer of that micro-batch was computed
        answer = answered(runtime, prompt=prompt, max_tokens=4)
        assert cached(answer) == 128
    with serving(**DYMOE) as fresh:
        assert answered(fresh, prompt=prompt, max_tokens=4)["choices"] == answer["choices"]


def test_a_cancelled_answer_keeps_its_prompt(monkeypatch):
    with serving(**DYMOE) as runtime:
        n_layers = runtime.model.n_layers
        held = Held(runtime.inside.policy, monkeypatch)
        prompt = text_of(10)
        n_steps = -(-answered(runtime, prompt=prompt, max_tokens=1)["usage"]["prompt_tokens"] // 64)
        empty(runtime)
        held.hold(n_layers * (n_steps + 4))
        data = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
        cancel_at_hold(held, on_sequence(runtime, 0, **data))
        assert held.calls == held.at
        answer = answered(runtime, **data)
        n_prompt = answer["usage"]["prompt_tokens"]
        assert cached(answer) == n_prompt - 1  # the last token is read again for its logits
    with serving(**DYMOE) as fresh:
        assert answered(fresh, **data)["choices"] == answer["choices"]


@pytest.mark.parametrize("is_answer", [False, True])
def test_a_step_that_fails_keeps_the_conversation(monkeypatch, is_answer):
    with serving(**DYMOE) as runtime:
        first = answered(runtime, prompt=text_of(40), max_tokens=4)["usage"]
        policy = runtime.inside.policy
        prompt = text_of(40) + text_of(1 if is_answer else 60, 900)
        with monkeypatch.context() as patched:
            patched.setattr(policy, "decide", broken)
            assert ask(runtime, "/v1/completions", prompt=prompt, max_tokens=4)[0] == 500
        assert cached(answered(runtime, prompt=prompt, max_tokens=1)) >= first["prompt_tokens"] - 2


@pytest.mark.parametrize("cancelled_first", [True, False])
def test_other_requests_of_a_cancelled_step_continue(monkeypatch, cancelled_first):
    """Their answers equal those without the cancelled request."""
    settings = DYMOE | {"ubatch": 256}
    texts = text_of(50), text_of(50, 500)
    data = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with serving(2, **settings) as runtime:
        alone = [answered(runtime, prompt=text, **data)["choices"][0]["text"] for text in texts]
        empty(runtime)
        held = Held(runtime.inside.policy, monkeypatch)
        held.hold(0)
        # the step of the opening request is blocked, so that both other requests run in one step
        opening = on_sequence(runtime, 0, prompt="Hello", max_tokens=1)
        assert held.reached.wait(HANG_S)
        requests = [on_sequence(runtime, n, prompt=text, **data) for n, text in enumerate(texts)]
        opened = held.go_on
        held.hold_where(lambda event: event.layer == 1 and event.n_tokens > 16)
        opened.set()
        whole(opening)
        gone, stays = (0, 1) if cancelled_first else (1, 0)
        assert held.reached.wait(HANG_S)
        requests[gone].cancel()
        held.go_on.set()
        requests[gone].close()
        status, text = whole(requests[stays])
        assert status == 200
        assert json.loads(text)["choices"][0]["text"] == alone[stays]
        runtime.inside.store.check()


@pytest.mark.parametrize("cancelled", ["the computed one", "the waiting one"])
def test_two_requests_on_one_sequence(monkeypatch, cancelled):
    """A cancel affects only its own request, not another request on its sequence or in its step."""
    with serving(2, **DYMOE) as runtime:
        held = Held(runtime.inside.policy, monkeypatch)
        held.hold(0)
        computed = on_sequence(runtime, 0, prompt="Hello", max_tokens=4)
        assert held.reached.wait(HANG_S)
        waits = on_sequence(runtime, 0, prompt="Hello you", max_tokens=4)
        other = on_sequence(runtime, 1, prompt="Good day", max_tokens=4)
        gone, stays = (computed, waits) if cancelled.endswith("computed one") else (waits, computed)
        gone.cancel()
        held.go_on.set()
        gone.close()
        assert whole(stays)[0] == 200
        assert whole(other)[0] == 200
        runtime.inside.store.check()
