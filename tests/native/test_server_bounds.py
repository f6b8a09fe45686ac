"""Grammars, schemas and chat templates that would crash llama.cpp's server or run without end.

Each is refused with one sentence, and the next request is answered.
"""

import resource

import pytest

from orchestrator.errors import NativeError

from .servers import MIB, ask, posted, serving, whole

DEEP, MUCH = "nested too deeply", "takes too much work"
REPEATED, LARGE = "a minimum above its maximum", "expand to more than"
REFUSED = "the grammar is refused"


@pytest.fixture(scope="module")
def runtime(library):
    with serving(policy="plain") as made:
        yield made


def completed(runtime, **data):
    """Return (status, text or error message)."""
    usual = {"prompt": "One two", "n_predict": 40, "temperature": 1}
    status, answer = ask(runtime, "/completion", **(usual | data))
    return status, answer["content"] if status == 200 else answer["error"]["message"]


def rules(*lines):
    return "\n".join(lines)


GRAMMARS = {
    "parentheses": ("root ::= " + "(" * 20_000, DEEP),
    "a chain of rules": (
        rules("root ::= r0", *(f"r{n} ::= r{n + 1}" for n in range(30_000)), 'r30000 ::= "a"'),
        DEEP,
    ),
    "left alternatives that double": (
        rules("root ::= r0", *(f'r{n} ::= r{n + 1} | r{n + 1} "x"' for n in range(40)), "r40 ::= "),
        MUCH,
    ),
    "right alternatives that double": ('root ::= [^x] root "b" | [^x] root "c" | "x"', MUCH),
    "a maximum below the minimum": ('root ::= "a"{3,1}', REPEATED),
    "copies of a long text": ('root ::= "' + "a" * 60_000 + '"{2000}', LARGE),
    "many repetitions": ("root ::= " + '"a"{0,2000} ' * 3000, LARGE),
    "a group that is repeated": ('root ::= ("a"?){5000}', REFUSED),
    "left recursion": ("root ::= root", "left recursion"),
    "no grammar": ("root ::= (", "expecting ')'"),
    "no root": ('x ::= "a"', "does not contain a 'root'"),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_an_excessive_grammar_is_refused(runtime, name, capfd):
    grammar, said = GRAMMARS[name]
    status, message = completed(runtime, grammar=grammar, logit_bias=[["x", -100]])
    assert status in (400, 500) and said in message and "the grammar" in message
    assert len(message) < 300 and message.isprintable()
    assert "samplers" not in message  # the decode thread would report samplers
    assert capfd.readouterr().err == ""  # upstream would print the grammar
    assert completed(runtime, grammar='root ::= ("yes" | "no") "."')[1] in ("yes.", "no.")


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
    "nested lists of types": (types(30), MUCH),
    "a reference to itself in allOf": ({"allOf": [ITSELF], "definitions": {"a": ITSELF}}, DEEP),
    "a reference to itself": ({**ITSELF, "definitions": {"a": ITSELF}}, "left recursion"),
    "a maximum below the minimum": ({"type": "string", "minLength": 5, "maxLength": 3}, REPEATED),
    "many words": ({"enum": [f"{n:x} {n}" for n in range(20_000)]}, MUCH),
    "a very long list": (
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
        "number of repetitions",
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_excessive_schema_is_refused(runtime, name):
    schema, said = SCHEMAS[name]
    status, message = completed(runtime, json_schema=schema)
    assert status == 400 and said in message
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    data = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "max_tokens": 4}
    status, answer = ask(runtime, "/v1/chat/completions", **data, tool_choice="required")
    assert status == 400 and (said in str(answer) or "context size" in str(answer))


USUAL = {
    "optional properties": properties(100),
    "an enum": {"enum": [f"value {n}" for n in range(1000)]},
    "long strings": properties(20, maxLength=2000) | {"required": [f"p{n}" for n in range(20)]},
    "types": types(4),
    "a pattern": {"type": "string", "pattern": "^[a-z]{2,30}(-[a-z]+)*$"},
    # terminal escapes do not appear in the log
    "a forged line": {"type": "string", "pattern": "\x1b[31mforged\n"},
}


@pytest.mark.parametrize("name", USUAL)
def test_an_ordinary_schema_is_accepted(runtime, name, capfd):
    status, text = completed(runtime, json_schema=USUAL[name], n_predict=12)
    assert status == 200, text
    assert capfd.readouterr().err == ""


def test_a_cancelled_request_ends_the_conversion_of_its_schema(runtime):
    """A cancelled request ends the conversion of its schema.

    400 prompts need 400 conversions, which would take a minute.
    """
    many = {"prompt": ["One"] * 400, "n_predict": 1, "json_schema": properties(60)}
    answer = posted(runtime, "/completion", **many)
    answer.cancel()
    status, text = whole(answer)
    assert status == 400 and b"given up" in text


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def repeated(n, body):
    return "{% for i in range(" + str(n) + ") %}" + body + "{% endfor %}"


TEXT, VALUES, PARTS = (
    "makes too much text",
    "makes too many values",
    "more than 4096 parts in line 1",
)
LISTED = "{% set l = [1] %}{% set _ = l.append(l) %}"  # a list that contains itself
KEPT = "{% set kept = namespace(it=[1], text='x') %}"
TEMPLATES = {
    "loops in loops": (repeated(30_000, repeated(30_000, "")), MUCH),
    "a long range": (repeated(10**12, "x"), VALUES),
    "parentheses": ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", PARTS),
    "brackets": ("{{ " + "[" * 2000 + "1" + "]" * 2000 + " }}", DEEP),
    "not": ("{{ " + "not " * 4000 + "1 }}", DEEP),
    "a long sum": ("{{ 1" + "+1" * 2000 + " }}", DEEP),
    "blocks": ("{% if 1 %}" * 2000 + "{% endif %}" * 2000, DEEP),
    "other cases": ("{% if 0 %}" + "{% elif 0 %}" * 20_000 + "{% endif %}", DEEP),
    "a macro that calls itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", DEEP),
    "a text that doubles": (
        KEPT + repeated(40, "{% set kept.text = kept.text ~ kept.text %}"),
        TEXT,
    ),
    "a list that doubles": (KEPT + repeated(40, "{% set kept.it = kept.it + kept.it %}"), MUCH),
    "a text that is repeated": ("{{ 'x' * 1000000000000 }}", TEXT),
    "lists in lists": (KEPT + repeated(100_000, "{% set kept.it = [kept.it] %}"), MUCH),
    "tuples in tuples": (
        KEPT + repeated(200, "{% set kept.it = (kept.it, 1) %}") + "{% set d = {kept.it: 1} %}",
        DEEP,
    ),
    "a list in itself": (LISTED + "{{ l }}", DEEP),
    "a list in itself, as JSON": (LISTED + "{{ l | tojson }}", DEEP),
    "a list in itself, as a text": (LISTED + "{{ l | string }}", DEEP),
    "an indentation": ("{{ 'a' | indent(100000000000, true) }}", "a width of at most 1024"),
    "an indentation of JSON": ("{{ [1] | tojson(indent=2000000000) }}", "a width of at most 1024"),
    "a division by zero": ("{% if 3 is divisibleby(0) %}{% endif %}", "other than 0 and -1"),
    "a text that is replaced": ("{{ ('ab' * 300000) | replace('a', 'xyz') }}", MUCH),
    "a text that grows with itself": (
        "{% set s = 'ab' * 50000 %}{{ s | replace('a', s) }}",
        TEXT,
    ),
    "searches in a list": (
        "{% set l = range(50000) | list %}" + repeated(50_000, "{% if 'a' in l %}{% endif %}"),
        MUCH,
    ),
    "an open block": ("{% for m in messages %}", "is not valid: a block is not closed"),
    "no template": ("{{ a b }}", "is not valid: Expected }} (Got b)"),
    "its own error": ("{{ raise_exception('Not here.') }}", "failed: Jinja Exception: Not here."),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_excessive_chat_template_is_refused(library, tmp_path, name, capfd):
    """The template is refused in seconds, and the peak RSS grows by less than 150 MiB."""
    text, said = TEMPLATES[name]
    path = tmp_path / "chat.jinja"
    path.write_text(text)
    before = peak_bytes()
    with (
        pytest.raises(NativeError, match=r"^the chat template .* \(--chat-template FILE") as caught,
        serving(template=path, policy="plain"),
    ):
        pass
    assert said in str(caught.value) and str(caught.value).isprintable()
    assert peak_bytes() < before + 150 * MIB
    assert capfd.readouterr().err == ""


def test_an_excessive_rendering_is_refused(library, tmp_path):
    """A request whose rendering exceeds the limits is refused.

    The limits grow with the conversation, and the next request is answered.
    """
    path = tmp_path / "chat.jinja"
    path.write_text(
        "{% for m in messages %}{{ m.content }}{% if 'loop' in m.content %}"
        + repeated(3000, repeated(3000, ""))
        + "{% endif %}{% endfor %}"
    )
    with serving(template=path, policy="plain") as made:
        for content, expected in (("loop", 400), ("Hello", 200), ("Hello " * 40_000, 200)):
            messages = [{"role": "user", "content": content}]
            status, answer = ask(made, "/apply-template", messages=messages)
            assert status == expected, answer
            assert expected == 200 or MUCH in answer["error"]["message"]
