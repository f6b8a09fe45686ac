"""What a request may make llama.cpp compute: one sentence for what is more."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("starlette", reason="starlette is missing: run `make build`")

from asgi import FakeBackend, FakeRequest, ask, state_with

from orchestrator.serve.app import application
from orchestrator.serve.requests import MOST_PROMPTS
from orchestrator.serve.wire import MOST_DEPTH

CHAT, COMPLETION = "/v1/chat/completions", "/completion"


def nested(levels: int) -> Any:
    made: Any = 1
    for _ in range(levels):
        made = [made]
    return made


def schema(n: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{each}": {} for each in range(n)}}


def tool(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


LONG = "!" * 300
MESSAGES = [{"role": "user", "content": "One"}]
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "nesting": ({"x": nested(MOST_DEPTH)}, "nests more than 100 deep"),
    "nesting that passes": ({"x": nested(MOST_DEPTH - 2)}, ""),
    "biases": ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias must be"),
    "biases that pass": ({"logit_bias": [[n, 1] for n in range(1024)]}, ""),
    "texts of biases": ({"logit_bias": [["word " * 4000, 1]]}, "texts of logit_bias: 20000"),
    "stops": ({"stop": ["x"] * 129}, "stop must be a list of at most 128 items"),
    "one long stop": ({"stop": "x" * 200}, ""),
    "samplers": ({"samplers": ["top_k"] * 33}, "samplers must be"),
    "samplers in short": ({"samplers": "k" * 33}, "samplers must be"),
    "breakers": ({"dry_sequence_breakers": ["x"] * 17}, "dry_sequence_breakers must be"),
    "prompts": ({"prompt": ["One"] * (MOST_PROMPTS + 1)}, "prompt must be"),
    "a prompt of tokens": ({"prompt": [1] * 1000}, ""),
    "a grammar": ({"grammar": "x" * (2**18 + 1)}, "grammar must be a text of at most 262144"),
    "properties": ({"json_schema": schema(513)}, "an object in json_schema: 513 properties"),
    "properties that pass": ({"json_schema": schema(512)}, ""),
    "a form": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema(513)}}},
        "an object in response_format: 513 properties",
    ),
    "a tool": ({"tools": tool(schema(513))}, "an object in tools: 513 properties"),
    "a name": ({"tools": tool({"properties": {LONG: {}}})}, "a name in tools: 300 characters"),
    "a reference": ({"json_schema": {"$ref": LONG}}, "a name in json_schema: 300 characters"),
    "a description": ({"tools": tool({"description": LONG})}, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_more_is_one_sentence(name: str) -> None:
    data, said = CASES[name]
    backend = FakeBackend(FakeRequest(200, False, [b"{}"]))
    backend.most_body_bytes = 2**20
    app = application(state_with(backend), lambda _line: None)
    path = COMPLETION if "prompt" in data else CHAT
    reply = ask(app, path, {"messages": MESSAGES, **data})
    assert reply.status == (400 if said else 200), reply.body
    assert said in (reply.json()["error"]["message"] if said else "")
    assert bool(said) != bool(backend.asked)
