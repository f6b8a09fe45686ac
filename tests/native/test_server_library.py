"""llama.cpp's server core on a managed model: equal answers with every policy, and a clean end."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from served import server_library
from waiting import wait_until

from orchestrator.errors import ConfigError, NativeError
from orchestrator.events import ABSENT, Phase
from orchestrator.runtime import runtime as runtime_module
from orchestrator.runtime.driver import Driver
from orchestrator.runtime.load import Loader
from orchestrator.runtime.runtime import Runtime
from orchestrator.serve.bodies import Words
from orchestrator.serve.schemas import GENERATING, QUICK, READ
from orchestrator.serve.served import Served
from orchestrator.serve.settings import ServeSettings
from orchestrator.serve.wire import OLLAMA_CHAT, OLLAMA_GENERATE

from .conftest import HANG_S
from .servers import (
    MIB,
    PROMPT,
    answered,
    ask,
    broken,
    config,
    posted,
    server_request,
    serving,
    whole,
)

N = 24
LRU = {"policy": "lru", "high_tier": "q8_0", "expert_ram": 12 * MIB}
DYMOE = {"policy": "dymoe", "expert_ram": 16 * MIB}
STREAM = {"prompt": PROMPT, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize("settings", [{"policy": "plain"}, LRU, LRU | {"policy": "firm"}])
def test_lossless_policies_give_the_evaluators_probabilities(settings):
    settings = settings | {"use_extra_bufts": False}
    made = server_request(config(**settings))
    with Runtime.open(made) as runtime, runtime.evaluator() as evaluator:
        logits = evaluator.eval(evaluator.tokenize(PROMPT), 0)[-1].astype(np.float64)
    expected = np.sort(logits - np.logaddexp.reduce(logits))[::-1][:5]
    with serving(**settings) as runtime:
        answer = answered(runtime, prompt=PROMPT, max_tokens=N, logprobs=5)
        first = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        assert np.allclose([each["logprob"] for each in first], expected, atol=1e-4)
        again = answered(runtime, prompt=PROMPT, max_tokens=N)
        assert again["choices"][0]["text"] == answer["choices"][0]["text"]
        assert "Oslo" in answer["choices"][0]["text"] or answer["usage"]["completion_tokens"] == N
        # the conversation's tokens are reused
        assert again["timings"]["prompt_n"] < answer["timings"]["prompt_n"]


@pytest.mark.parametrize("policy", ["dymoe", "dynaexq", "context"])
def test_every_policy_decides_for_the_server(policy):
    less = {"low_tier": "q2_k"} if policy == "dymoe" else {}
    with serving(2, policy=policy, expert_ram=16 * MIB, **less) as runtime:
        asked = {"prompt": PROMPT, "max_tokens": N, "temperature": 0}
        answer = posted(runtime, "/v1/completions", **asked)
        assert whole(answer)[0] == 200
        counted = answer.costs()
        assert len(counted["mix"]) > 1 and abs(sum(counted["mix"].values()) - 1) < 1e-6
        assert counted["policy"] == policy and counted["bytes_read"] >= 0
        runtime.inside.store.check()
        results = []

        def one_more():
            results.append(ask(runtime, "/v1/completions", prompt=PROMPT, max_tokens=N)[0])

        threads = [threading.Thread(target=one_more) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [200] * 3
        runtime.inside.store.check()


def test_declared_routes_equal_the_cores():
    declared = GENERATING.keys() | QUICK.keys() | READ.keys()
    declared -= {OLLAMA_CHAT, OLLAMA_GENERATE}  # which are converted to OpenAI's routes
    assert set(server_library().routes()) == declared | {"/metrics"}


def test_a_stream_and_its_usage():
    with serving(**LRU) as runtime:
        wanted = {"max_tokens": 4, "stream_options": {"include_usage": True}}
        status, events = ask(runtime, "/v1/completions", **STREAM, **wanted)
    assert status == 200 and events[-1] == "[DONE]"
    chunks = [json.loads(each) for each in events[:-1]]
    assert any((chunk.get("usage") or {}).get("completion_tokens") == 4 for chunk in chunks)


def test_a_step_that_fails_is_one_error_and_the_next_request_is_fine(monkeypatch):
    with serving(**DYMOE) as runtime:
        with monkeypatch.context() as patched:
            patched.setattr(runtime.inside.policy, "decide", broken)
            answer = posted(runtime, "/v1/completions", prompt=PROMPT, max_tokens=4)
            status, text = whole(answer)
        assert status == 500 and b"Compute error." in text
        assert answer.failure() == "the policy failed: RuntimeError: no idea"
        assert answered(runtime, prompt=PROMPT, max_tokens=4)["choices"]
        assert answer.failure() is None


def test_metrics_are_answered_while_a_prompt_is_read(monkeypatch):
    """`/metrics` answers while a step with a prompt runs.

    Such a step may take a minute, but monitoring polls every few seconds.
    """
    reading, go_on = threading.Event(), threading.Event()
    with serving(**DYMOE) as runtime:
        decide = runtime.inside.policy.decide

        def held(*event):
            reading.set()
            go_on.wait()
            decide(*event)

        monkeypatch.setattr(runtime.inside.policy, "decide", held)
        answer = posted(runtime, "/v1/completions", prompt=PROMPT, max_tokens=1)
        said = []
        metrics = runtime.query("/metrics")
        asking = threading.Thread(target=lambda: said.append(metrics.whole()[0]))
        try:
            assert reading.wait(HANG_S)
            asking.start()
            asking.join(120)
            assert said == [200]
        finally:
            go_on.set()
        assert whole(answer)[0] == 200


def test_a_cancelled_prompt_keeps_its_read_tokens():
    with serving(**LRU) as runtime:
        seen = threading.Event()
        steps = []
        driver = runtime.inside.driver

        def counting(step):
            driver.step_done(step)
            steps.append(step.n_tokens)
            seen.set()

        runtime.inside.store.set_step_done(counting)
        data = {"prompt": "word " * 400, "temperature": 0}
        answer = posted(runtime, "/v1/completions", max_tokens=100, **data)
        assert seen.wait(HANG_S)
        answer.close()
        read = sum(steps)
        usage = answered(runtime, max_tokens=1, **data)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= min(read, 64) - 1


def test_an_unread_stream_ends_early(monkeypatch):
    """A stream ends with an error at 4,000 unread bytes, and its sequence is free afterwards."""
    monkeypatch.setattr(runtime_module, "AHEAD_BYTES", 4000)
    with serving(policy="plain") as runtime:
        answer = posted(runtime, "/v1/completions", max_tokens=200, **STREAM)
        wait_until(lambda: answer.has_ended)
        text, is_all = answer.take()
        answer.close()
        assert isinstance(answer.error, NativeError) and "reads too slowly" in str(answer.error)
        assert is_all and 4000 < len(text) < 8000 and b"[DONE]" not in text
        assert answered(runtime, prompt=PROMPT, max_tokens=1)["choices"]


def test_decode_phase_after_a_warm_up_step(monkeypatch):
    """After a warm-up step, tokens of an answer have the decode phase.

    As on a GPU, the warm-up step has a prompt and comes before the first request.
    """
    real = Loader.load

    def warmed(loader, *args):
        loaded = real(loader, *args)
        loaded.warm_up()
        return loaded

    monkeypatch.setattr(Loader, "load", warmed)
    with serving(**LRU) as runtime:
        answered(runtime, prompt=PROMPT, max_tokens=N)
        assert runtime.inside.store.stats().requests[Phase.DECODE] > 0


@pytest.mark.parametrize(
    "settings",
    [LRU, DYMOE, *(DYMOE | {"policy": name} for name in ("context", "dynaexq", "firm", "floor"))],
    ids=lambda each: each["policy"],
)
def test_starting_the_core_does_not_affect_the_policy(monkeypatch, settings):
    """Starting the server core makes no decision and no request, and counts no step.

    llama.cpp decodes two tokens at the start, which read at most one expert per layer and tier.
    """
    decided = []
    on_route = Driver.on_route

    def watched(driver, event):
        decided.append(event.layer)
        on_route(driver, event)

    monkeypatch.setattr(Driver, "on_route", watched)
    monkeypatch.setattr(Driver, "idle", lambda *_: None)  # idle reads load experts too
    with Runtime.open(server_request(config(**settings))) as runtime:
        at_first = (runtime.inside.store.resident() < ABSENT).sum(axis=1)
    with serving(**settings) as runtime:
        inside, stats = runtime.inside, runtime.inside.store.stats()
        assert decided == []
        assert inside.driver.steps == 0
        assert not inside.driver.used().any()
        assert not any((*stats.requests, *stats.demand_bytes, *stats.prefetch_bytes))
        resident = (inside.store.resident() < ABSENT).sum(axis=1)
        assert (resident <= at_first + len(inside.plan.tier_names)).all()
        steps = []
        inside.store.set_step_done(steps.append)
        answered(runtime, prompt=PROMPT, max_tokens=1)
        assert (steps[0].starts, steps[0].ends) == ((0,), ())


UBATCH = 64
PROMPTS_OF = {
    "a prompt of one token": ([[5]], [1]),
    "a last micro-batch of one token": ([[*range(10, 10 + UBATCH + 1)]], [UBATCH, 1]),
    "a repeated prompt": ([[*range(10, 30)], [*range(10, 30)]], [20, 1]),
    "two prompts of one token": ([[[5], [6]]], [2]),
}


@pytest.mark.parametrize(("prompts", "sizes"), PROMPTS_OF.values(), ids=PROMPTS_OF)
def test_the_core_distinguishes_prompts_from_answers(monkeypatch, prompts, sizes):
    """The core reports the phase of each step and the end of each prompt.

    A step with one prompt token has the same shape as a step of an answer.
    """
    phases_seen, steps, tokens = [], [], []
    settings = {"policy": "context", "placement": "wait", "expert_ram": 16 * MIB, "ubatch": UBATCH}
    with serving(2, **settings) as runtime:
        driver, store = runtime.inside.driver, runtime.inside.store
        on_route = driver.on_route

        def watched(event):
            tokens.append(set(event.phases_array.tolist()))
            on_route(event)

        driver.set_route(watched)
        store.set_step_done(lambda step: (steps.append(step), driver.step_done(step)))
        monkeypatch.setattr(driver, "follow", phases_seen.append)
        for prompt in prompts:
            sequences = [0, 1] if isinstance(prompt[0], list) else [0]
            data = {"prompt": prompt, "max_tokens": 3, "ignore_eos": True, "temperature": 0}
            status, text = whole(posted(runtime, "/v1/completions", sequences, **data))
            assert status == 200, text
    in_prompts = [step for step in steps if step.phase is Phase.PREFILL]
    assert [step.n_tokens for step in in_prompts] == sizes
    n_read = len(sequences) if len(sequences) > 1 else len(prompts)
    assert sum(len(step.prompt_ends) for step in steps) == n_read
    assert len(steps) - len(in_prompts) == 2 * len(prompts)  # the third token is not decoded
    assert phases_seen == [step.phase for step in steps]
    assert all(phases in ({Phase.PREFILL}, {Phase.DECODE}) for phases in tokens)


def served_of(runtime):
    return Served(runtime, ServeSettings(), Words("gpt2", ""), lambda _: None)


def test_a_request_that_runs_alone_may_change_the_policy():
    with serving(**DYMOE, low_tier="q2_k") as runtime:
        policy = runtime.inside.policy
        usual = policy.settings
        served = served_of(runtime)

        def asked(**changes):
            settings = served.settings_for(changes)
            body = json.dumps({"prompt": PROMPT, "max_tokens": 4}).encode()
            return whole(runtime.submit(body, "/v1/completions", settings=settings))[0]

        assert asked(retention=0.25) == 200
        assert policy.settings == replace(usual, retention=0.25)
        assert asked() == 200
        assert policy.settings == usual
        for wrong in ({"retention": 7}, {"high_tier": "q8_0"}, {"nothing": 1}, {"max_loss": 0.1}):
            with pytest.raises(ConfigError):
                served.settings_for(wrong)
    with serving(policy="plain") as plain:
        served = served_of(plain)
        with pytest.raises(ConfigError, match="--policy plain has no settings"):
            served.settings_for({"retention": 0.5})
        assert served.settings_for({}) is None
