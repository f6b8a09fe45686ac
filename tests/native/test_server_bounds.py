"""Grammars and schemas that would end llama.cpp's server, or keep it for ever: one sentence each,
and the next request is answered."""

from threading import Thread

import pytest

from .conftest import HANG_S
from .servers import ask, posted, serving

DEEP, MUCH = "nested too deeply", "takes too much work"
REPEATED, LARGE, REFUSED = "more often than it may", "come to too much", "the grammar is refused"


@pytest.fixture(scope="module")
def backend(library):
    with serving(policy="plain") as made:
        yield made


def completed(backend, **data):
    """(status, the text or the sentence)"""
    usual = {"prompt": "One two", "n_predict": 40, "temperature": 1}
    status, answer = ask(backend, "/completion", **(usual | data))
    return status, answer["content"] if status == 200 else answer["error"]["message"]


def rules(*lines):
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
    "ways on that double with each token": ('root ::= [^x] root "b" | [^x] root "c" | "x"', MUCH),
    "a maximum below the minimum": ('root ::= "a"{3,1}', REPEATED),
    "copies of a long text": ('root ::= "' + "a" * 60_000 + '"{2000}', LARGE),
    "many repetitions": ("root ::= " + '"a"{0,2000} ' * 3000, LARGE),
    "a group that is repeated": ('root ::= ("a"?){5000}', REFUSED),
    "left recursion": ("root ::= root", "left recursion"),
    "what is no grammar": ("root ::= (", "expecting ')'"),
    "no root": ('x ::= "a"', "does not contain a 'root'"),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_that_is_too_much_is_refused(backend, name, capfd):
    grammar, said = GRAMMARS[name]
    status, message = completed(backend, grammar=grammar, logit_bias=[["x", -100]])
    assert status in (400, 500) and said in message and "the grammar" in message
    assert len(message) < 300 and message.isprintable()
    assert "samplers" not in message  # where the thread that decodes would read a grammar
    assert capfd.readouterr().err == ""  # upstream prints the grammar
    assert completed(backend, grammar='root ::= ("yes" | "no") "."')[1] in ("yes.", "no.")


def types(levels):
    made = {"type": "string"}
    for _ in range(levels):
        made = {"type": ["object", "object"], "properties": {"a": made}}
    return made


def properties(n, **each):
    named = {f"p{number}": {"type": "string", **each} for number in range(n)}
    return {"type": "object", "properties": named}


ITSELF = {"$ref": "#/definitions/a"}
SCHEMAS = {
    "optional properties": (properties(2000), DEEP),
    "lists of types in each other": (types(30), MUCH),
    "a reference to itself in allOf": ({"allOf": [ITSELF], "definitions": {"a": ITSELF}}, DEEP),
    "a reference to itself": ({**ITSELF, "definitions": {"a": ITSELF}}, "left recursion"),
    "a maximum below the minimum": ({"type": "string", "minLength": 5, "maxLength": 3}, REPEATED),
    "many words": ({"enum": [f"{n:x} {n}" for n in range(20_000)]}, MUCH),
    "a list without end": (
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
        "number of repetitions",
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_that_is_too_much_is_refused(backend, name):
    schema, said = SCHEMAS[name]
    status, message = completed(backend, json_schema=schema)
    assert status == 400 and said in message
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    data = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "max_tokens": 4}
    status, answer = ask(backend, "/v1/chat/completions", **data, tool_choice="required")
    assert status == 400 and (said in str(answer) or "context size" in str(answer))


USUAL = {
    "optional properties": properties(100),
    "an enum": {"enum": [f"value {n}" for n in range(1000)]},
    "long strings": properties(20, maxLength=2000) | {"required": [f"p{n}" for n in range(20)]},
    "types": types(4),
    "a pattern": {"type": "string", "pattern": "^[a-z]{2,30}(-[a-z]+)*$"},
    # an escape of a terminal is not in the log
    "a forged line": {"type": "string", "pattern": "\x1b[31mforged\n"},
}


@pytest.mark.parametrize("name", USUAL)
def test_a_usual_schema_is_kept(backend, name, capfd):
    status, text = completed(backend, json_schema=USUAL[name], n_predict=12)
    assert status == 200, text
    assert capfd.readouterr().err == ""


def test_a_client_that_leaves_ends_the_work_on_its_schema(backend):
    """400 prompts are as many conversions; without an end they take a minute."""
    many = {"prompt": ["One"] * 400, "n_predict": 1, "json_schema": properties(60)}
    request = posted(backend, "/completion", **many)
    request.cancel()
    thread = Thread(target=request.run)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive()
    text, is_all = request.take()
    assert is_all and request.status == 400 and b"given up" in text
