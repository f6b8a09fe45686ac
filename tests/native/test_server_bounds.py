"""Grammars and schemas that would end llama.cpp's server, or keep it for ever: one sentence each,
and the next request is answered."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from served import DEMO, server_library

from orchestrator.config import Config
from orchestrator.serve.backend import Backend
from orchestrator.serve.settings import ServeSettings

HANG_S = 600
DEEP, MUCH = "nested too deeply", "takes too much work"


@pytest.fixture(scope="module")
def backend(library: object) -> Iterator[Backend]:
    config = Config.build(model=DEMO, ctx=512, threads=1, policy="plain", ubatch=64)
    with closing(Backend(config, ServeSettings(), server_library(), lambda _: None)) as made:
        yield made


def ask(backend: Backend, **data: Any) -> tuple[int, str]:
    body = json.dumps({"prompt": "One two", "n_predict": 40, "temperature": 1, **data})
    status, text = backend.request("/completion", body.encode()).whole()
    answer = json.loads(text)
    return status, answer["content"] if status == 200 else answer["error"]["message"]


def rules(*lines: str) -> str:
    return "\n".join(lines)


GRAMMARS = {
    "parentheses": ("root ::= " + "(" * 20_000, DEEP),
    "a chain of rules": (
        rules("root ::= r0", *(f"r{n} ::= r{n + 1}" for n in range(30_000)), 'r30000 ::= "a"'),
        DEEP,
    ),
    "ways to the left that double with each rule": (
        rules("root ::= r0", *(f'r{n} ::= r{n + 1} | r{n + 1} "x"' for n in range(40)), "r40 ::= "),
        MUCH,
    ),
    "ways on that double with each token": (
        'root ::= [^x] root "b" | [^x] root "c" | "x"',
        MUCH,
    ),
    "a maximum below the minimum": ('root ::= "a"{3,1}', "more often than it may"),
    "copies of a long text": ('root ::= "' + "a" * 60_000 + '"{2000}', "come to too much"),
    "many repetitions": ("root ::= " + '"a"{0,2000} ' * 3000, "come to too much"),
    "a group that is repeated": ('root ::= ("a"?){5000}', "the grammar is refused"),
    "left recursion": ("root ::= root", "left recursion"),
    "what is no grammar": ("root ::= (", "expecting ')'"),
    "no root": ('x ::= "a"', "does not contain a 'root'"),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_that_is_too_much_is_refused(
    backend: Backend, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    grammar, said = GRAMMARS[name]
    status, message = ask(backend, grammar=grammar, logit_bias=[["x", -100]])
    assert status in (400, 500) and said in message and "the grammar" in message
    assert len(message) < 300 and message.isprintable()
    assert capfd.readouterr().err == ""  # upstream prints the grammar
    assert ask(backend, grammar='root ::= ("yes" | "no") "."')[1] in ("yes.", "no.")


def types(levels: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        made = {"type": ["object", "object"], "properties": {"a": made}}
    return made


def properties(n: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{each}": {"type": "string"} for each in range(n)}}


SCHEMAS = {
    "optional properties": (properties(2000), DEEP),
    "lists of types in each other": (types(30), MUCH),
    "a reference to itself in allOf": (
        {
            "allOf": [{"$ref": "#/definitions/a"}],
            "definitions": {"a": {"$ref": "#/definitions/a"}},
        },
        DEEP,
    ),
    "a reference to itself": (
        {"$ref": "#/definitions/a", "definitions": {"a": {"$ref": "#/definitions/a"}}},
        "left recursion",
    ),
    "a maximum below the minimum": (
        {"type": "string", "minLength": 5, "maxLength": 3},
        "more often than it may",
    ),
    "a list without end": (
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
        "number of repetitions",
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_that_is_too_much_is_refused(backend: Backend, name: str) -> None:
    schema, said = SCHEMAS[name]
    status, message = ask(backend, json_schema=schema)
    assert status == 400 and said in message
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    data = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "max_tokens": 4}
    route = "/v1/chat/completions"
    body = json.dumps({**data, "tool_choice": "required"}).encode()
    status, text = backend.request(route, body).whole()
    assert status == 400 and (said in text.decode() or "context size" in text.decode())


USUAL = {
    "optional properties": properties(100),
    "an enum": {"enum": [f"value {n}" for n in range(1000)]},
    "long strings": {
        "type": "object",
        "properties": {f"p{n}": {"type": "string", "maxLength": 2000} for n in range(20)},
        "required": [f"p{n}" for n in range(20)],
    },
    "types": types(4),
    "a pattern": {"type": "string", "pattern": "^[a-z]{2,30}(-[a-z]+)*$"},
}


@pytest.mark.parametrize("name", USUAL)
def test_a_usual_schema_is_kept(backend: Backend, name: str) -> None:
    status, text = ask(backend, json_schema=USUAL[name], n_predict=12)
    assert status == 200, text


def test_a_pattern_of_a_client_is_not_in_the_log(
    backend: Backend, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ask(backend, json_schema={"type": "string", "pattern": "\x1b[31mforged\n"})[0] == 200
    assert capfd.readouterr().err == ""


def test_a_client_that_leaves_ends_the_work_on_its_schema(backend: Backend) -> None:
    """400 prompts are as many conversions; without an end they take a minute."""
    data = {"prompt": ["One"] * 400, "n_predict": 1, "json_schema": properties(60)}
    request = backend.request("/completion", json.dumps(data).encode())
    request.cancel()
    thread = threading.Thread(target=request.run)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive()
    text, is_all = request.take()
    assert is_all and request.status == 400 and b"given up" in text
