"""What llama.cpp's server keeps of prompts within our plan, and answers that wait for a policy."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest
from served import DEMO, server_library

from orchestrator.config import Config
from orchestrator.events import Phase
from orchestrator.native import ServerLibrary
from orchestrator.policy.base import WaitsBeforeAnswer
from orchestrator.serve.backend import Backend, kept_prompts
from orchestrator.serve.settings import ServeSettings

MIB = 2**20
COUNTRIES = ("Norway", "Peru", "Japan", "Kenya", "Spain", "Chile")


@pytest.fixture(scope="module")
def native(library: object) -> ServerLibrary:
    return server_library()


def open_backend(native: ServerLibrary, parallel: int = 1, **settings: Any) -> Backend:
    usual = {"ctx": 512, "threads": 1, "ubatch": 64, "ram": 140 * MIB}
    config = Config.build(model=DEMO, **usual | settings)
    return Backend(config, ServeSettings(parallel=parallel), native, lambda _done: None)


def ask(backend: Backend, country: str) -> dict[str, Any]:
    # Nothing of one prompt is the beginning of another one.
    prompt = f"{country}! " * 40 + f"What is the capital of {country}?"
    data = {"prompt": prompt, "temperature": 0, "max_tokens": 4, "ignore_eos": True}
    status, text = backend.request("/v1/completions", json.dumps(data).encode()).whole()
    answer: dict[str, Any] = json.loads(text)
    assert status == 200, answer
    return answer


def read_of(answer: dict[str, Any]) -> int:
    return int(answer["timings"]["prompt_n"])


def test_a_conversation_that_another_one_drove_out_comes_back(native: ServerLibrary) -> None:
    backend = open_backend(native, policy="lru", high_tier="q4_k", cache_ram=8 * MIB)
    try:
        first = ask(backend, "Norway")
        assert read_of(first) > 40
        for country in COUNTRIES[1:4]:
            assert read_of(ask(backend, country)) > 40
        again = ask(backend, "Norway")
        assert read_of(again) < 5
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
    finally:
        backend.close()


def test_what_is_kept_stays_within_what_was_asked_for(native: ServerLibrary) -> None:
    # Of each token 4 KiB: the memory holds one of these conversations and no second one.
    with closing(open_backend(native, policy="lru", high_tier="q4_k", cache_ram=MIB)) as backend:
        assert backend.engine.plan.prompt_bytes == MIB
        for country in COUNTRIES:
            ask(backend, country)
        assert read_of(ask(backend, COUNTRIES[0])) > 40
    with closing(open_backend(native, policy="lru", high_tier="q4_k", cache_ram=0)) as backend:
        ask(backend, "Norway"), ask(backend, "Peru")
        assert read_of(ask(backend, "Norway")) > 40


def test_memory_for_prompts_is_set_aside_without_being_asked_for(native: ServerLibrary) -> None:
    with closing(open_backend(native, policy="lru", high_tier="q4_k")) as backend:
        assert backend.engine.plan.prompt_bytes > 0


@pytest.mark.parametrize(
    ("n_bytes", "part", "parallel", "expected"),
    [
        (8 * MIB, 0, 1, (8, 0)),
        (0, 0, 1, (0, 0)),
        (0, MIB, 1, (0, 0)),
        (8 * MIB, MIB, 1, (4, 4)),
        (8 * MIB, MIB, 4, (4, 1)),
        (8 * MIB, MIB, 8, (8, 0)),
    ],
)
def test_copies_and_places_share_the_memory(
    n_bytes: int, part: int, parallel: int, expected: tuple[int, int]
) -> None:
    cache_mib, places = kept_prompts(n_bytes, part, parallel)
    assert (cache_mib, places) == expected
    assert cache_mib * MIB + places * part * parallel <= n_bytes


def test_an_answer_waits_for_where_its_experts_are_placed(
    native: ServerLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend(native, policy="context", placement="wait", expert_ram=16 * MIB)
    try:
        driver = backend.engine.driver
        asked: list[Phase] = []
        follow, wait = driver.follow, driver.before_answer
        waited: list[bool] = []

        def following(phase: Phase) -> None:
            asked.append(phase)
            follow(phase)

        def waiting() -> None:
            before = driver.store.states()[0].copy()
            wait()
            resident, target = driver.store.states()
            assert (resident == target).all()  # nothing is under way when the answer begins
            waited.append(bool((resident != before).any()))

        monkeypatch.setattr(driver, "follow", following)
        monkeypatch.setattr(driver, "before_answer", waiting)
        ask(backend, "Norway")
        # A prompt of more than 64 tokens comes in two steps, and one answer follows it.
        assert asked[:2] == [Phase.PREFILL] * 2 and set(asked[2:]) == {Phase.DECODE}
        assert waited == [True]
        assert driver.report()["placements"] == 1
    finally:
        backend.close()


def test_a_policy_that_fails_before_an_answer_fails_that_answer(
    native: ServerLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend(native, policy="context", placement="wait", expert_ram=16 * MIB)
    try:
        with monkeypatch.context() as broken:

            def bad(*_: object) -> None:
                raise RuntimeError("no idea")

            broken.setattr(backend.engine.driver, "before_answer", bad)
            data = json.dumps({"prompt": "Tell me about Norway, please.", "max_tokens": 4}).encode()
            status, _ = backend.request("/v1/completions", data).whole()
            assert status == 500
            assert backend.failure() == "the policy failed: RuntimeError: no idea"
        assert ask(backend, "Norway")["choices"]
        assert backend.failure() is None
    finally:
        backend.close()


def test_only_a_policy_that_may_wait_is_asked(native: ServerLibrary) -> None:
    with closing(open_backend(native, policy="dymoe")) as backend:
        assert not isinstance(backend.engine.policy, WaitsBeforeAnswer)
        assert not backend.engine.driver.may_wait
