"""JSON schemas of clients are rewritten into a form that llama.cpp enforces. Parts that cannot be
enforced are reported with their path."""

import json
import re

import pytest
from asgi import SAID
from fake_served import FakeServed
from paths import CHAT, MESSAGES, RESPONSES

from orchestrator.serve.constraints import rewritten, rewritten_arguments
from orchestrator.serve.patterns import PatternError, of_words, translated
from orchestrator.serve.requests import GRAMMAR_SCHEMA, settle_request
from orchestrator.serve.wire import Refusal


def of(**properties):
    return {"type": "object", "properties": properties}


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
# (schema, rewritten schema)
FORMS = {
    "a property of any kind": (of(p=True), of(p={})),
    "a forbidden property": (of(p=False, q=TEXT), of(q=TEXT)),
    "a type in capitals": (of(p={"type": "STRING"}), of(p=TEXT)),
    "the type any": (of(p={"type": "any"}), of(p={})),
    "floats that are integers": (of(p={**TEXT, "minLength": 2.0}), of(p={**TEXT, "minLength": 2})),
    "only annotations": (
        {"$id": "urn:x", "title": "T", **TEXT},
        {"$id": "urn:x", "title": "T", **TEXT},
    ),
    "OpenAPI's null": ({**TEXT, "nullable": True}, {"anyOf": [TEXT, {"type": "null"}]}),
    "a name that is required alone": (
        {**of(p=TEXT), "required": ["q"]},
        {**of(p=TEXT, q={}), "required": ["q"]},
    ),
    "the schema in itself": (
        of(next={"$ref": "#"}),
        {**of(next={"$ref": "#/$defs/d0"}), "$defs": {"d0": of(next={"$ref": "#/$defs/d0"})}},
    ),
    "an anchor": (
        {**of(p={"$ref": "#here"}), "$defs": {"x": {"$anchor": "here", **WHOLE}}},
        {**of(p={"$ref": "#/$defs/d0"}), "$defs": {"d0": WHOLE}},
    ),
    "a reference with more": (
        {"$ref": "#/$defs/x", "maxLength": 2, "$defs": {"x": TEXT}},
        {**TEXT, "maxLength": 2},
    ),
    "parts of one object": (
        {"allOf": [of(p=TEXT), {**of(q=WHOLE), "required": ["q"]}]},
        {**of(p=TEXT, q=WHOLE), "required": ["q"]},
    ),
    "either of two required": (
        {**of(p=TEXT, q=TEXT), "anyOf": [{"required": ["p"]}, {"required": ["q"]}]},
        {
            "anyOf": [
                {**of(p=TEXT, q=TEXT), "required": ["p"]},
                {**of(p=TEXT, q=TEXT), "required": ["q"]},
            ]
        },
    ),
    "bounds of draft 4": (
        {**WHOLE, "minimum": 0, "exclusiveMinimum": True},
        {**WHOLE, "minimum": 1},
    ),
    "a bound beyond all integers": ({**WHOLE, "maximum": 1e30}, WHOLE),
    "few multiples": ({**WHOLE, "minimum": 1, "maximum": 9, "multipleOf": 4}, {"enum": [4, 8]}),
    "a list of items": (
        {"type": "array", "items": [TEXT, WHOLE]},
        {"type": "array", "prefixItems": [TEXT, WHOLE]},
    ),
    "an enum with a type": ({**TEXT, "enum": ["a", 1]}, {"enum": ["a"]}),
    "one of two that differ": (
        {"oneOf": [{"const": 1}, {"const": "x"}]},
        {"anyOf": [{"const": 1}, {"const": "x"}]},
    ),
}
# (schema, path of the part that is not enforced and a word of the reason)
LOST = {
    "a reference to nothing": (of(p={"$ref": "#/$defs/x"}), "s.properties.p.$ref: "),
    "a reference to another document": (
        of(p={"$ref": "https://a.example/b"}),
        "s.properties.p.$ref: ",
    ),
    "a reference to itself": (
        {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}},
        "$ref: the $ref names itself",
    ),
    "an empty enum": (of(p={"enum": []}), "s.properties.p.enum: "),
    "an unknown type": (of(p={"type": "text"}), "s.properties.p.type: "),
    "a minimum above the maximum": (
        of(p={**TEXT, "minLength": 3, "maxLength": 2}),
        "s.properties.p.minLength: ",
    ),
    "a long minimum": (
        {**TEXT, "maxLength": 5000},
        "s.maxLength: this server enforces maxLength only up to 2000",
    ),
    "numbers": (
        {"type": "number", "maximum": 1},
        "s.maximum: minimum, maximum and multipleOf are enforced for integers",
    ),
    "multiples": ({**WHOLE, "multipleOf": 5}, "s.multipleOf: "),
    "not": (of(p={"not": TEXT}), "s.properties.p.not: "),
    "a condition": ({**of(p=TEXT), "if": {"required": ["p"]}, "then": {}}, "s.if: "),
    "patterns of names": (
        {"type": "object", "patternProperties": {"^x": TEXT}},
        "s.patternProperties: ",
    ),
    "items that differ": ({"type": "array", "items": TEXT, "uniqueItems": True}, "s.uniqueItems: "),
    "one of two that overlap": ({"oneOf": [TEXT, {**TEXT, "maxLength": 2}]}, "s.oneOf: "),
    "parts that differ": ({"allOf": [{**TEXT, "pattern": "^a$"}, {"pattern": "^b$"}]}, "s.allOf: "),
    "a look-ahead": ({**TEXT, "pattern": "^(?=a)a$"}, "s.pattern: "),
    "alternatives in themselves": (
        {"type": "object", "anyOf": [{"$ref": "#"}]},
        "s: the schema is nested",
    ),
    "required as in draft 3": ({**of(p=TEXT), "required": True}, "s.required: "),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_schema_is_rewritten(name):
    schema, wanted = FORMS[name]
    made, lost = rewritten(schema, "s")
    assert (made, lost) == (wanted, [])
    assert json.dumps(made) == json.dumps(wanted)  # 2 and 2.0 are equal in Python


@pytest.mark.parametrize("name", LOST)
def test_parts_that_are_not_enforced_are_named_by_path(name):
    schema, said = LOST[name]
    _, lost = rewritten(schema, "s")
    assert lost and said in lost[0]


def test_arguments_of_a_tool_become_one_object():
    schema = {
        "anyOf": [{**of(p=TEXT), "required": ["p"]}, {**of(p=WHOLE, q=TEXT), "required": ["p"]}]
    }
    made, lost = rewritten_arguments(schema, "s")
    assert made == {**of(p={"anyOf": [TEXT, WHOLE]}, q=TEXT), "required": ["p"]}
    assert len(lost) == 1
    assert rewritten_arguments({"$ref": "#/$defs/x", "$defs": {"x": of(p=TEXT)}}, "s")[0][
        "properties"
    ]


PATTERNS = {
    "digits": (r"^\d{3}$", (), "^[0-9]{3,3}$"),
    "words": (r"^\w+$", (), r"^[0-9A-Z\x5Fa-z]+$"),
    "another escape": (r"^a\!b$", (), r"^a[\x21]b$"),
    "a quote and a line feed": ('^"\\n$', (), r"^\\[\x22]\\[n]$"),
    "groups": ("^(?:ab|(?<n>c))?$", (), "^(ab|(c)){0,1}$"),
    "with maxLength": ("^a+$", (0, 3), "^(a){1,3}$"),
    "with minLength": ("^[a-c]*-$", (4,), r"^[a-c]{3,}[\x2D]$"),
    "within its lengths": ("^a{2}$", (1, 5), "^(a){2,2}$"),
}
NO_PATTERNS = {
    "a look-behind": ("(?<=a)b", ()),
    "a reference back": (r"^(a)\1$", ()),
    "a border": (r"^a\b$", ()),
    "an anchor inside": ("^(a$|b)$", ()),
    "an invalid regular expression": ("([", ()),
    "nothing to repeat": ("^*$", ()),
    "a reversed range": ("^[z-a]$", ()),
    "two lengths": ("^a+b+$", (0, 3)),
    "too many": ("^a{3000}$", ()),
    "deep": ("(" * 60 + "a" + ")" * 60, ()),
    "the end of an escape": ("^\\", ()),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_translated(name):
    pattern, lengths, wanted = PATTERNS[name]
    assert translated(pattern, *lengths) == wanted


@pytest.mark.parametrize("name", NO_PATTERNS)
def test_a_pattern_that_is_not_enforced(name):
    pattern, lengths = NO_PATTERNS[name]
    with pytest.raises(PatternError):
        translated(pattern, *lengths)


def test_many_words_share_their_beginnings():
    assert of_words(["ab", "abc", "abd", "x"]) == "^(ab(c|d)?|x)$"
    words = [f"word {number}" for number in range(200)]
    made, lost = rewritten({"enum": words}, "s")
    assert made["type"] == "string" and not lost
    found = re.compile(made["pattern"])
    assert all(map(found.fullmatch, words)) and not found.fullmatch("word 200")
    chain = {"enum": ["a" * number for number in range(1, 200)]}
    assert rewritten(chain, "s")[0] == chain


ODD = of(p={"type": "number", "maximum": 1})


def tool_of(route, schema, **more):
    """(request with this tool, path of its arguments in the request)."""
    if route == CHAT:
        tool = {"type": "function", "function": {"name": "f", "parameters": schema, **more}}
        return {"messages": SAID, "tools": [tool]}, "tools[0].function.parameters"
    if route == MESSAGES:
        tool = {"name": "f", "input_schema": schema, **more}
        return {"messages": SAID, "max_tokens": 9, "tools": [tool]}, "tools[0].input_schema"
    tool = {"type": "function", "name": "f", "parameters": schema, **more}
    return {"input": "a", "tools": [tool]}, "tools[0].parameters"


@pytest.mark.parametrize("route", [CHAT, MESSAGES, RESPONSES])
def test_a_tool_is_served_and_noted_or_strict(route):
    served = FakeServed()
    data, where = tool_of(route, ODD)
    settle_request(route, data, 0, served)
    (note,) = served.notes
    assert f"{where}.properties.p.maximum" in note and "'f'" in note
    tool = data["tools"][0]
    parameters = tool.get("function", tool).get("parameters", tool.get("input_schema"))
    # the chat template gets the original schema
    assert parameters == {**ODD, GRAMMAR_SCHEMA: of(p={"type": "number"})}
    data, where = tool_of(route, ODD, strict=True)
    with pytest.raises(Refusal, match="is strict") as refused:
        settle_request(route, data, 0, served)
    assert refused.value.message.startswith(f"{where}.properties.p.maximum")


FORMATS = {
    "response_format.json_schema.schema": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": ODD}}
    },
    "response_format.schema": {"response_format": {"type": "json_object", "schema": ODD}},
    "json_schema": {"json_schema": ODD},
}


@pytest.mark.parametrize("where", FORMATS)
def test_a_format_is_enforced_or_refused(where):
    text = json.dumps({"messages": SAID, **FORMATS[where]})
    with pytest.raises(Refusal) as refused:
        settle_request(CHAT, json.loads(text), 0, FakeServed())
    assert refused.value.message.startswith(f"{where}.properties.p.maximum")
    good = text.replace('"number"', '"integer"')
    assert settle_request(CHAT, json.loads(good), 0, FakeServed()) == {}
