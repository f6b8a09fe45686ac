"""llama.cpp's server on a managed model: the same answers, with every policy, and a clean end."""

from __future__ import annotations

import json
import os
import threading
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from served import DEMO, server_library

from orchestrator.config import Config
from orchestrator.engine.engine import Engine
from orchestrator.errors import ConfigError, NativeError
from orchestrator.events import Phase
from orchestrator.native import ServerLibrary
from orchestrator.serve import backend as backend_module
from orchestrator.serve.backend import Backend, server_config
from orchestrator.serve.settings import ServeSettings

PROMPT = "<|im_start|>user\nTell me about Norway.<|im_end|>\n<|im_start|>assistant\n"
N = 24
HANG_S = 600


@pytest.fixture(scope="module")
def native(library: object) -> ServerLibrary:
    return server_library()


def config_of(policy: str, **more: object) -> Config:
    settings: dict[str, object] = {"ctx": 512, "threads": 1, "policy": policy, "ubatch": 64}
    if policy != "plain":
        settings["expert_ram"] = 12 << 20
    if policy in ("lru", "firm"):
        settings["high_tier"] = "q8_0"
    return Config.build(model=DEMO, use_extra_bufts=False, **settings | more)


def open_backend(native: ServerLibrary, config: Config, **settings: Any) -> Backend:
    return Backend(config, ServeSettings(**settings), native, lambda _done: None)


def ask(backend: Backend, route: str, data: dict[str, Any]) -> tuple[int, Any]:
    """(status, body) of one request; the events of a stream as a list."""
    request = backend.request(route, json.dumps(data).encode())
    status, text = request.whole()
    if not request.is_stream:
        return status, json.loads(text)
    lines = text.decode().splitlines()
    return status, [line.removeprefix("data: ") for line in lines if line]


def greedy(backend: Backend, **more: Any) -> dict[str, Any]:
    data = {"prompt": PROMPT, "temperature": 0, "max_tokens": N, **more}
    status, body = ask(backend, "/v1/completions", data)
    assert status == 200, body
    answer: dict[str, Any] = body
    return answer


@pytest.mark.parametrize("policy", ["plain", "lru", "firm"])
def test_a_lossless_policy_gives_the_probabilities_of_the_engine(
    native: ServerLibrary, policy: str
) -> None:
    config = config_of(policy)
    with Engine.open(server_config(config, 1)) as engine:
        logits = engine.eval(engine.tokenize(PROMPT), 0)[-1].astype(np.float64)
    expected = np.sort(logits - np.logaddexp.reduce(logits))[::-1][:5]
    with closing(open_backend(native, config)) as backend:
        answer = greedy(backend, logprobs=5)
        first = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        assert np.allclose([each["logprob"] for each in first], expected, atol=1e-4)
        again = greedy(backend)
        assert again["choices"][0]["text"] == answer["choices"][0]["text"]
        assert "Oslo" in answer["choices"][0]["text"] or answer["usage"]["completion_tokens"] == N
        # the conversation's tokens are kept
        assert again["timings"]["prompt_n"] < answer["timings"]["prompt_n"]


@pytest.mark.parametrize("policy", ["dymoe", "dynaexq", "context"])
def test_every_policy_decides_for_the_server(native: ServerLibrary, policy: str) -> None:
    less = {"low_tier": "q2_k"} if policy == "dymoe" else {}
    backend = open_backend(native, config_of(policy, expert_ram=16 << 20, **less), parallel=2)
    try:
        costs = backend.costs()
        greedy(backend)
        counted = costs()
        assert len(counted["mix"]) > 1 and abs(sum(counted["mix"].values()) - 1) < 1e-6
        assert counted["policy"] == policy and counted["bytes_read"] >= 0
        backend.engine.store.check()
        results: list[tuple[int, Any]] = []
        data = {"prompt": PROMPT, "temperature": 0, "max_tokens": N}
        threads = [
            threading.Thread(target=lambda: results.append(ask(backend, "/v1/completions", data)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [status for status, _ in results] == [200] * 3
        backend.engine.store.check()
    finally:
        backend.close()


def test_experts_come_in_until_the_first_request(native: ServerLibrary) -> None:
    """The first answer is what it is without, and nothing is read for nobody beside it."""
    with closing(open_backend(native, config_of("lru"))) as backend:
        backend.engine.end_idle()
        backend.engine.store.reset_stats()
        expected = greedy(backend)["choices"]
    with closing(open_backend(native, config_of("lru"))) as backend:
        idle = backend.engine.driver._idle
        idle.wait()
        assert backend.engine.driver.brought > 0
        assert backend.engine.store.full
        assert greedy(backend)["choices"] == expected
        assert idle._thread is None
        backend.engine.store.check()


def test_a_stream_its_usage_and_a_grammar(native: ServerLibrary) -> None:
    with closing(open_backend(native, config_of("lru"))) as backend:
        schema = {
            "type": "object",
            "properties": {"capital": {"enum": ["Oslo", "Paris"]}},
            "required": ["capital"],
            "additionalProperties": False,
        }
        status, events = ask(
            backend,
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "What is the capital of Norway?"}],
                "stream": True,
                "stream_options": {"include_usage": True},
                "temperature": 0,
                "max_tokens": 80,
                "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
            },
        )
        assert status == 200 and events[-1] == "[DONE]"
        chunks = [json.loads(each) for each in events[:-1]]
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        text = "".join(
            choice["delta"].get("content") or ""
            for chunk in chunks
            for choice in chunk.get("choices", ())
        )
        assert json.loads(text)["capital"] in ("Oslo", "Paris")
        assert any((chunk.get("usage") or {}).get("completion_tokens") for chunk in chunks)


def test_what_cannot_be_served_is_refused(native: ServerLibrary) -> None:
    backend = open_backend(native, config_of("lru"))
    picture = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}
    try:
        for route, data in (
            ("/v1/completions", {"prompt": "word " * 600, "max_tokens": 1}),
            ("/v1/completions", {"prompt": "word " * 600, "max_tokens": 1, "stream": True}),
            ("/v1/chat/completions", {"messages": "hello"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [picture]}]}),
            ("/v1/completions", {}),
            ("/v1/completions", {"prompt": "x", "temperature": "warm"}),
        ):
            status, body = ask(backend, route, data)
            assert 400 <= status < 502 and body["error"]["message"], (route, body)
            assert status in (400, 501), body
        assert greedy(backend)["choices"]
    finally:
        backend.close()


class Broken(Exception):
    """What a policy raises here."""


def test_a_step_that_fails_is_one_error_and_the_next_request_is_fine(
    native: ServerLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_backend(native, config_of("dymoe", expert_ram=16 << 20))) as backend:
        policy = backend.engine.policy
        good = policy.decide

        def bad(*_: object) -> None:
            raise Broken("no idea")

        monkeypatch.setattr(policy, "decide", bad)
        status, body = ask(backend, "/v1/completions", {"prompt": PROMPT, "max_tokens": 4})
        assert status == 500 and body["error"]["message"] == "Compute error."
        assert backend.failure() == "the policy failed: Broken: no idea"
        monkeypatch.setattr(policy, "decide", good)
        assert greedy(backend)["choices"]
        assert backend.failure() is None


def test_figures_are_given_while_a_prompt_is_read(
    native: ServerLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with a prompt may take a minute, and who watches the server asks every few seconds."""
    backend = open_backend(native, config_of("dymoe", expert_ram=16 << 20))
    reading, go_on = threading.Event(), threading.Event()
    try:
        decide = backend.engine.policy.decide

        def held(*event: Any) -> None:
            reading.set()
            go_on.wait()
            decide(*event)

        monkeypatch.setattr(backend.engine.policy, "decide", held)
        data = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
        request = backend.request("/v1/completions", data)
        thread = threading.Thread(target=request.run)
        thread.start()
        assert reading.wait(HANG_S)
        said: list[int] = []
        metrics = backend.request("/metrics", b"")
        asking = threading.Thread(target=lambda: said.append(metrics.whole()[0]))
        asking.start()
        asking.join(120)
        assert said == [200] and not go_on.is_set()
        go_on.set()
        thread.join(HANG_S)
        assert request.take()[1] and request.status == 200
        asking.join()
    finally:
        go_on.set()
        backend.close()


def test_a_cancel_ends_the_work_and_keeps_what_was_read(native: ServerLibrary) -> None:
    with closing(open_backend(native, config_of("lru"))) as backend:
        seen = threading.Event()
        store = backend.engine.store
        steps: list[int] = []
        driver = backend.engine.driver

        def counting(step: Any) -> None:
            driver.step_done(step)
            steps.append(step.n_tokens)
            seen.set()

        store.set_step_done(counting)
        data = {"prompt": "word " * 400, "max_tokens": 100, "temperature": 0}
        request = backend.request("/v1/completions", json.dumps(data).encode())
        thread = threading.Thread(target=request.run)
        thread.start()
        assert seen.wait(HANG_S)
        request.cancel()
        thread.join(HANG_S)
        assert not thread.is_alive()
        read = sum(steps)
        status, body = ask(backend, "/v1/completions", {**data, "max_tokens": 1})
        assert status == 200
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= min(read, 64) - 1


def test_stopping_ends_what_runs(native: ServerLibrary) -> None:
    backend = open_backend(native, config_of("plain", ctx=4096))
    data = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    request = backend.request("/v1/completions", json.dumps(data).encode())
    ready, tell = os.pipe()
    thread = threading.Thread(target=request.run, args=(tell,))
    try:
        assert request.take() == (b"", False)
        thread.start()
        assert os.read(ready, 1)
        first, is_all = request.take()
        assert first.startswith(b"data: ") and not is_all
        assert (request.status, request.is_stream) == (200, True)
        backend.stop()
        thread.join(HANG_S)
        rest, is_all = request.take()
        assert is_all and rest.count(b"\n\n") < 4000
        assert request.take() == (b"", True)
    finally:
        backend.close()
        os.close(ready)
        os.close(tell)


def test_a_stream_that_nobody_takes_ends_early(
    native: ServerLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it makes is in memory until then; the sequence is free afterwards."""
    monkeypatch.setattr(backend_module, "AHEAD_BYTES", 4000)
    with closing(open_backend(native, config_of("plain"))) as backend:
        data = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
        request = backend.request("/v1/completions", json.dumps(data).encode())
        with pytest.raises(NativeError, match="too far behind"):
            request.run()
        text, is_all = request.take()
        assert is_all and 4000 < len(text) < 8000 and b"[DONE]" not in text
        assert greedy(backend)["choices"]


def test_answers_are_answers_behind_kernels_that_were_tried(
    native: ServerLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where a step with a prompt comes before the first request."""
    real = Engine.__init__

    def warmed(engine: Engine, *args: Any) -> None:
        real(engine, *args)
        engine._loaded.warm_up()

    monkeypatch.setattr(Engine, "__init__", warmed)
    with closing(open_backend(native, config_of("lru"))) as backend:
        greedy(backend)
        assert backend.engine.store.stats().requests[Phase.DECODE] > 0


def test_who_finds_nothing_is_told_once(native: ServerLibrary) -> None:
    """A byte for each time that nothing was there, and one at the end: else the event loop would be
    woken for each token."""
    backend = open_backend(native, config_of("plain"))
    data = {"prompt": PROMPT, "max_tokens": N, "ignore_eos": True, "stream": True}
    try:
        request = backend.request("/v1/completions", json.dumps(data).encode())
        ready, tell = os.pipe()
        assert request.take() == (b"", False)
        request.run(tell)
        assert os.read(ready, 100) == b"\0\0"
        text, is_all = request.take()
        assert is_all and text.count(b"\n\n") > N and text.endswith(b"data: [DONE]\n\n")
        os.close(ready)
        os.close(tell)
    finally:
        backend.close()


def test_a_request_that_runs_alone_may_change_the_policy(native: ServerLibrary) -> None:
    config = config_of("dymoe", expert_ram=16 << 20, low_tier="q2_k")
    with closing(open_backend(native, config)) as backend:
        policy = backend.engine.policy
        usual = policy.settings
        backend.go_by(backend.settings_for({"retention": 0.25}))
        assert policy.settings == replace(usual, retention=0.25)  # type: ignore[type-var]
        greedy(backend)
        backend.go_by(backend.settings_for({}))
        assert policy.settings == usual
        for wrong in ({"retention": 7}, {"high_tier": "q8_0"}, {"nothing": 1}, {"max_loss": 0.1}):
            with pytest.raises(ConfigError):
                backend.settings_for(wrong)
    with closing(open_backend(native, config_of("plain"))) as plain:
        with pytest.raises(ConfigError, match="no policy"):
            plain.settings_for({"retention": 0.5})
        plain.go_by(plain.settings_for({}))
