"""Answers in the format of each chat template, scripted without a model.

Constraints hold in every format. An answer that does not match its template's format is returned as
text.
"""

import json
from pathlib import Path

import pytest
from served import server_library

from orchestrator.serve.constraints import rewritten, rewritten_arguments
from orchestrator.serve.requests import GRAMMAR_SCHEMA

from .servers import ask, serving

TOOLS = Path(__file__).parents[1] / "unit/serve/tools.jinja"
CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "Hello"}]
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 3}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": OBJECT}}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}


def function(parameters, name="weather", **more):
    described = {"name": name, "description": "The weather.", "parameters": parameters, **more}
    return {"type": "function", "function": described}


@pytest.fixture(scope="session")
def tried(library, llama_source):
    """tried(template, *answers, **request): the case, with a result for each answer."""

    def try_one(name, *answers, **request):
        template = (llama_source / "models/templates" / f"{name}.jinja").read_text("utf-8")
        case = {"request": {"messages": QUESTION, **request}, "answers": list(answers)}
        (found,) = server_library().try_template(template, [case], "<s>", "</s>")
        return found

    return try_one


END_OF_REASONING = "Well.</think>"
# Templates whose parsers in llama.cpp ignore schemas or allow reasoning instead of the answer, with
# the text before an answer.
SCHEMAS = {
    "moonshotai-Kimi-K2": "",
    "Kimi-K2-Instruct": "",
    "Kimi-K2-Thinking": "<think>Well.</think>",
    "Kimi-K3": "Well.<|close|>think<|sep|><|open|>response<|sep|>",
    "GigaChat3-10B-A1.8B": "",
    "GigaChat3.1-10B-A1.8B": "",
    "inclusionai-ling-3.0-flash": END_OF_REASONING,
    "meetkai-functionary-medium-v3.2": "all\n",
    "Qwen3.5-4B": f"{END_OF_REASONING}\n\n",
    "StepFun3.5-Flash": f"{END_OF_REASONING}\n",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": END_OF_REASONING,
    "LFM2-8B-A1B": "",
}


@pytest.mark.parametrize("with_tool", [False, True], ids=["alone", "with a tool"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_keeps_its_schema(tried, name, with_tool):
    start = SCHEMAS[name]
    texts = ['{"a": "xyz"}', '{"a": "wxyz"}', "Hello"]
    more = {"tools": [function(CITY)]} if with_tool else {}
    found = tried(name, *(start + text for text in texts), response_format=FORMAT, **more)
    assert [each["matches"] for each in found["answers"]] == [True, False, False]
    for kind in ("message", "streamed"):
        message = found["answers"][0][kind]
        assert message["content"].strip() == texts[0], message
        assert message.get("reasoning_content") == ("Well." if "Well." in start else None)
    if "</think>" in start or "think<|sep|>" in start:
        (unclosed,) = tried(name, texts[0], response_format=FORMAT)["answers"]
        assert unclosed["matches"] is name.startswith("Kimi-K2")  # its reasoning is optional


def valued(**properties):
    return {"type": "object", "properties": properties, "required": [*properties]}


# A schema that llama.cpp does not enforce as written, a valid value, and invalid values.
ENFORCED = {
    "a property of any kind": (valued(a=True), '{"a": [1]}', ["{}"]),
    "a recursive schema": (
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        '{"a": {"a": {}}}',
        ['{"a": 1}', '{"b": {}}'],
    ),
    "an anchor": (
        {**valued(a={"$ref": "#x"}), "$defs": {"b": {"$anchor": "x", "type": "integer"}}},
        '{"a": 12}',
        ['{"a": "b"}'],
    ),
    "digits": (valued(a={"type": "string", "pattern": r"^\d{2}$"}), '{"a": "12"}', ['{"a": "1"}']),
    "words": (valued(a={"type": "string", "pattern": r"^\w+$"}), '{"a": "b_1"}', ['{"a": "b-"}']),
    "no anchors": (
        valued(a={"type": "string", "pattern": "bc"}),
        '{"a": "abcé"}',
        ['{"a": "b c"}', '{"a": "bc"d"}', '{"a": "bc\n"}'],
    ),
    "quotes": (
        valued(a={"type": "string", "pattern": '^"[^"]*"$'}),
        r'{"a": "\"b\""}',
        ['{"a": ""b""}', r'{"a": "\"b"}'],
    ),
    "letters of two bytes": (
        valued(a={"type": "string", "pattern": "^é{2}[à-ü]?$"}),
        '{"a": "ééü"}',
        ['{"a": "é"}', '{"a": "ééz"}'],
    ),
    "a pattern with maxLength": (
        valued(a={"type": "string", "pattern": "^b+$", "maxLength": 2}),
        '{"a": "bb"}',
        ['{"a": "bbb"}'],
    ),
    "either of two required": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        '{"b": 1}',
        ["{}"],
    ),
    "bounds that are excluded": (
        valued(a={"type": "integer", "minimum": 0, "exclusiveMinimum": True}),
        '{"a": 1}',
        ['{"a": 0}'],
    ),
    "a name that is required alone": (
        {"type": "object", "properties": {"a": True}, "required": ["b"]},
        '{"b": 1}',
        ['{"a": 1}'],
    ),
    "parts of a text": (
        valued(a={"allOf": [{"type": "string"}, {"maxLength": 2}]}),
        '{"a": "bc"}',
        ['{"a": "bcd"}', '{"a": {}}'],
    ),
}


@pytest.mark.parametrize("name", ENFORCED)
def test_a_schema_is_enforced(tried, name):
    schema, good, bad = ENFORCED[name]
    made, lost = rewritten(schema, "s")
    assert not lost
    wanted = {"type": "json_schema", "json_schema": {"schema": made}}
    found = tried("Qwen-Qwen2.5-7B-Instruct", good, *bad, response_format=wanted)
    assert [each["matches"] for each in found["answers"]] == [True, *[False] * len(bad)]
    (answer, *_) = found["answers"]
    assert json.loads(answer["message"]["content"]) == json.loads(good)


def test_the_prompt_has_the_clients_schema(tried):
    """The prompt has the client's schema, while the grammar uses a rewritten one.

    llama.cpp fails on the client's schema.
    """
    schema = {"type": "object", "properties": {"a": True}, "required": ["a"]}
    made, _ = rewritten_arguments(schema, "s")
    tool = function({**schema, GRAMMAR_SCHEMA: made})
    calls = [
        f'<tool_call>\n{{"name": "weather", "arguments": {each}}}\n</tool_call>'
        for each in ('{"a": 1}', "{}")
    ]
    for choice in ("auto", "required", "none"):
        found = tried("Qwen-Qwen2.5-7B-Instruct", *calls, tools=[tool], tool_choice=choice)
        assert '"properties": {"a": true}' in found["prompt"]
        assert GRAMMAR_SCHEMA not in found["prompt"]
    found = tried("Qwen-Qwen2.5-7B-Instruct", *calls, tools=[tool], tool_choice="required")
    assert [each["matches"] for each in found["answers"]] == [True, False]


MINICPM = 'Hm.</think>\n\n<function name="weather">{}</function>'
GEMMA = "<|tool_call>call:weather{}<tool_call|>"
LFM = "<|tool_call_start|>[weather({})]<|tool_call_end|>"
GLM = (
    "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n{}</tool_call>"
)
CITY_ALONE, DAYS_ALONE = '<param name="city">Oslo</param>', '<param name="days">3</param>'
# Calls in formats whose grammars in llama.cpp are looser than a schema or than their parser: valid
# ones and invalid ones.
CALLS = {
    "openbmb-MiniCPM5-1B": (
        MINICPM,
        [CITY_ALONE, CITY_ALONE + "\n" + DAYS_ALONE],
        ["", DAYS_ALONE],
    ),
    "google-gemma-4-31B-it": (
        GEMMA,
        ['{city:<|"|>Oslo<|"|>}', '{city:<|"|>Oslo<|"|>,days:3}'],
        ["{}", "{town:3}", "{city:3}"],
    ),
    "LFM2-8B-A1B": (LFM, ['city="Oslo"', 'city="Oslo", days=3'], ["", "days=3"]),
    "GLM-4.6": (GLM, [""], [" ", "\n"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_required_call_has_its_arguments(tried, name):
    form, right, wrong = CALLS[name]
    answers = [form.format(each) for each in (*right, *wrong)]
    found = tried(name, *answers, tools=[function(CITY)], tool_choice="required")["answers"]
    assert [each["matches"] for each in found] == [True] * len(right) + [False] * len(wrong)
    for answer in found[: len(right)]:
        (call,) = answer["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] == "Oslo"


@pytest.mark.parametrize("name", ["openbmb-MiniCPM5-1B", "google-gemma-4-31B-it", "LFM2-8B-A1B"])
def test_a_call_may_have_any_of_its_optional_arguments(tried, name):
    """A call may have any of its optional arguments.

    The function's name may have characters other than letters.
    """
    form, right, wrong = CALLS[name]
    free = {**CITY, "required": []}
    answers = [form.format(each).replace("weather", "get_weather") for each in (*right, wrong[-1])]
    tool = function(free, "get_weather")
    found = tried(name, *answers, tools=[tool], tool_choice="required")["answers"]
    is_gemma = name.startswith("google")
    assert [each["matches"] for each in found] == [True, True, not is_gemma]


BROKEN = {
    "a call without its end": ("Qwen3-Coder", 'Now. <tool_call>\n{"name": "weather"}'),
    "a call of an unknown tool": ("Qwen-Qwen2.5-7B-Instruct", '<tool_call>\n{"name": "other"}'),
    "a call that is no JSON": ("GLM-4.6", "\n<tool_call>weather\n<arg_key>town</arg_key>"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_answer_in_another_format_is_text(tried, name):
    template, text = BROKEN[name]
    (answer,) = tried(template, text, tools=[function(CITY)])["answers"]
    for kind in ("message", "streamed"):
        assert "error" not in answer[kind], answer[kind]
        assert answer[kind]["content"].strip() == text.strip()
    assert not answer["message"].get("tool_calls")


def test_a_call_that_breaks_off_is_text_in_a_stream_too(tried):
    """A call that breaks off becomes text, in a stream too.

    The parts of the call that were already sent remain, and the text follows.
    """
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</call>"
    (answer,) = tried("Qwen3-Coder", text, tools=[function(CITY)])["answers"]
    assert answer["message"]["content"].strip() == text
    assert not answer["message"].get("tool_calls")
    assert answer["streamed"]["content"].strip() == text


def pieces_of(answer):
    """Return (content, finish reason) of a chat's answer, complete or as events."""
    events = [json.loads(each) for each in answer if each.startswith("{")]
    choices = [choice for event in events for choice in event.get("choices", ())]
    messages = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    text = "".join(message.get("content") or "" for message in messages)
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert not any("error" in event for event in events), events
    return text, reasons[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_reports_an_answer_in_another_format(library, stream):
    """The log reports an answer that is not in the template's format.

    The client begins a call in the assistant's message, and the model does not continue it.
    """
    notes = []
    begun = [*QUESTION, {"role": "assistant", "content": "<tool_call>\n{"}]
    data = {
        "messages": begun,
        "tools": [function(CITY)],
        "max_tokens": 1,
        "stream": stream,
        "temperature": 0,
    }
    with serving(policy="plain", template=TOOLS, note=notes.append) as runtime:
        status, answer = ask(runtime, CHAT, **data)
    assert status == 200, answer
    text, reason = pieces_of(answer if stream else [json.dumps(answer)])
    assert text.strip()
    assert reason == "length"
    assert [note for note in notes if "not in the form of the chat template" in note]


STRINGS = {
    "a line feed": ("Oslo\nNorway", "Oslo\nNorway"),
    "an escape of JSON's": (r"\u00e9\n", "é\n"),
    "a quote": (r"a \" b", 'a " b'),
    "a tab and a bell": ("a\tb\x07", "a\tb\x07"),
}


@pytest.mark.parametrize("name", STRINGS)
def test_arguments_are_json(tried, name):
    written, meant = STRINGS[name]
    text = f'<|tool_call_start|>[weather(city="{written}")]<|tool_call_end|>'
    (answer,) = tried("LFM2-8B-A1B", text, tools=[function(CITY)])["answers"]
    for kind in ("message", "streamed"):
        (call,) = answer[kind]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": meant}
