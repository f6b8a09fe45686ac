"""What llama.cpp gets to see of a request: the fields of the declaration, within their bounds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="starlette is missing: run `make build`")

from asgi import FakeBackend, FakeRequest, ask, state_with
from real_cache import REAL_CACHE

from orchestrator.serve import fields
from orchestrator.serve.app import GENERATING, QUICK, application
from orchestrator.serve.fields import request_schema
from orchestrator.serve.requests import INNER, LEFT_OUT
from orchestrator.serve.wire import Refusal

CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SAID = [{"role": "user", "content": "a"}]
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID},
    COMPLETIONS: {"prompt": "a"},
    NATIVE: {"prompt": "a"},
    RESPONSES: {"input": "a"},
    MESSAGES: {"messages": SAID},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/tokenize": {"content": "a"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": SAID},
}
# What clients send to any server, and what changes nothing here.
USUAL = {
    "user": "u",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "cache_control": {"type": "ephemeral"},
    "betas": ["a"],
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "verbosity": "low",
    "id_slot": 7,
    "sse_ping_interval": 1,
    "temperature": None,
}


def asked(path: str, data: dict[str, Any]) -> tuple[int, Any]:
    """(status, what llama.cpp got, or else the sentence)."""
    backend = FakeBackend(FakeRequest(200, False, [b"{}"]))
    reply = ask(application(state_with(backend, parallel=2), lambda _line: None), path, data)
    if not backend.asked:
        return reply.status, reply.json()["error"]["message"]
    got = json.loads(backend.asked[0][1])
    got.pop("id_slot", None)  # the server names it
    return reply.status, got


@pytest.mark.parametrize("path", NEEDED)
def test_what_means_nothing_here_is_left_out_without_a_word(path: str) -> None:
    assert asked(path, {**NEEDED[path], **USUAL}) == (200, NEEDED[path])


@pytest.mark.parametrize("path", NEEDED)
def test_what_steers_llama_cpp_from_inside_is_refused(path: str) -> None:
    for name in INNER:
        status, said = asked(path, {**NEEDED[path], name: [{"type": 9, "value": "a"}]})
        assert status == 400 and said.startswith(f"{name} cannot be set")
    assert asked(path, {**NEEDED[path], "lora": [], "chat_parser": None}) == (200, NEEDED[path])


@pytest.mark.parametrize(
    ("path", "data", "says"),
    [
        *[
            (path, {"messages": messages}, "messages")
            for path in (CHAT, MESSAGES, "/v1/messages/count_tokens", "/apply-template")
            for messages in ("x", 5, {}, [], None, ["x"], [{}], [{"role": "user", "content": []}])
        ],
        (MESSAGES, {"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        (MESSAGES, {"messages": SAID, "max_tokens": 0}, "max_tokens must be a whole number from 1"),
        (CHAT, {"messages": SAID, "max_tokens": 0}, "max_tokens must be -1 or a whole number"),
        (CHAT, {"messages": SAID, "stream": "yes"}, "stream must be true or false"),
        (CHAT, {"messages": SAID, "logprobs": 1}, "logprobs must be true or false"),
        (CHAT, {"messages": SAID, "logprobs": True, "top_logprobs": 21}, "from 0 to 20"),
        (CHAT, {"messages": SAID, "logprobs": True, "top_logprobs": True}, "from 0 to 20"),
        (CHAT, {"messages": SAID, "top_logprobs": 2}, "needs logprobs"),
        (CHAT, {"messages": SAID, "logit_bias": {str(n): 1 for n in range(4097)}}, "logit_bias"),
        (CHAT, {"messages": SAID, "stop": ["a"] * 257}, "stop must be"),
        (CHAT, {"messages": SAID * 200}, "200 messages exceed"),
        (CHAT, {"messages": SAID, "grammar": {"a": 1}}, "grammar must be a text"),
        (CHAT, {"messages": SAID, "response_format": "json"}, "response_format must be an object"),
        (
            COMPLETIONS,
            {"prompt": "a", "logprobs": 6},
            "logprobs must be a whole number from 0 to 5",
        ),
        (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs must be"),
        (COMPLETIONS, {"prompt": ["a"] * 65}, "prompt must be"),
        (COMPLETIONS, {}, "prompt is missing"),
        (NATIVE, {"prompt": "a", "n_probs": "many"}, "n_probs must be a whole number"),
        (NATIVE, {"prompt": "a", "n_probs": 10**6}, "n_probs is 1000000"),
        (NATIVE, {"prompt": "a", "n_probs": 100, "n_predict": 400}, "no room in memory"),
        (RESPONSES, {"input": []}, "input must be"),
        ("/tokenize", {"content": {"a": 1}}, "content must be"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0] must be"),
    ],
)
def test_what_is_no_request_gets_a_sentence(path: str, data: dict[str, Any], says: str) -> None:
    status, said = asked(path, data)
    assert status == 400 and says in said


def test_a_list_of_numbers_is_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one by one, which took a third of a second for 128 KiB of them."""
    looks = []
    usual = fields._is_kind

    def is_kind(schema: Any, value: Any) -> bool:
        looks.append(value)
        return usual(schema, value)

    monkeypatch.setattr(fields, "_is_kind", is_kind)
    many = list(range(10_000))
    for route, data in (
        ("/tokenize", {"content": many}),
        ("/detokenize", {"tokens": many}),
        (NATIVE, {"prompt": many}),
        (NATIVE, {"prompt": [many, many]}),
        (COMPLETIONS, {"prompt": [many] * 3}),
    ):
        looks.clear()
        fields.settle_fields(route, data, 512)
        assert 0 < len(looks) < 100, (route, len(looks))
    for wrong in (-1, 2**31, True):
        with pytest.raises(Refusal, match=r"tokens\[10000\] must be a whole number"):
            fields.settle_fields("/detokenize", {"tokens": [*many, wrong]}, 512)


def test_last_tokens_are_those_of_the_context() -> None:
    last = {"repeat_last_n": 2**31 - 1, "dry_penalty_last_n": -1}
    assert asked(NATIVE, {"prompt": "a", **last})[1] == {
        "prompt": "a",
        "repeat_last_n": 512,
        "dry_penalty_last_n": 512,
    }


def test_an_answer_with_probabilities_is_as_long_as_memory_has_room_for() -> None:
    most = asked(CHAT, {"messages": SAID, "logprobs": True, "top_logprobs": 20})[1]
    assert 100 <= most["max_tokens"] < 512
    streamed = {"messages": SAID, "logprobs": True, "top_logprobs": 20, "stream": True}
    assert "max_tokens" not in asked(CHAT, streamed)[1]
    assert "max_tokens" not in asked(COMPLETIONS, {"prompt": "a", "logprobs": 1})[1]


def test_each_path_that_takes_a_body_has_a_declaration() -> None:
    for path in (*GENERATING, *QUICK):
        assert request_schema(path)["properties"]


def test_the_declaration_knows_each_field_of_upstreams() -> None:
    """A field that upstream adds is served, refused or left out on purpose."""
    if not sorted(REAL_CACHE.glob("source/*/vendor/llama.cpp/tools/server/server-schema.cpp")):
        pytest.skip("upstream's source is not unpacked: run `make serve` once")
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fuzz"))
    from fields import declared

    ours = {name for path in GENERATING for name in request_schema(path)["properties"]}
    assert not set(declared(REAL_CACHE)) - {"include_usage"} - ours - set(INNER) - set(LEFT_OUT)
    assert not ours & set(INNER) and not ours & set(LEFT_OUT)
