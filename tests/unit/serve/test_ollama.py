"""Ollama's form of requests, answers and errors."""

import json
from datetime import datetime, timezone

import pytest
from asgi import SAID, ask
from fake_served import FakeServed, app_for, reply_of, streaming, whole
from tables import cases

CALL = {"function": {"name": "f", "arguments": {"x": "ø"}}}
TIMINGS = {"prompt_n": 3, "cache_n": 4, "prompt_ms": 2.0, "predicted_n": 5, "predicted_ms": 1.5}
FAILED = b'{"error": {"message": "Compute error."}}'


def event(reason=None, **delta):
    timings = {"timings": TIMINGS} if reason else {}
    said = {"choices": [{"finish_reason": reason, "index": 0, "delta": delta}], **timings}
    return b"data: " + json.dumps(said).encode() + b"\n\n"


def call(arguments, **name):
    return {"tool_calls": [{"index": 0, "function": {**name, "arguments": arguments}}]}


def lines(path, *parts, **more):
    """The lines that a client gets if llama.cpp streams these events."""
    asked = {"messages": SAID, "prompt": "a", "model": "m", **more}
    reply = reply_of(streaming(*parts, b"data: [DONE]\n\n"), path, asked)
    assert reply.status == 200 and reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in b"".join(reply.parts).splitlines()]


def test_a_stream_is_lines_and_a_call_of_a_tool_is_whole():
    pieces = call('{"x"', name="f"), call(': "ø"}')
    said = event(reasoning_content="hm"), event(content="so"), *(event(**piece) for piece in pieces)
    thought, text, last = lines("/api/chat", *said, event("tool_calls"))
    assert thought["message"] == {"role": "assistant", "content": "", "thinking": "hm"}
    assert text["message"]["content"] == "so" and text["done"] is False and text["model"] == "m"
    assert last["message"]["tool_calls"] == [CALL]
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert (last["prompt_eval_count"], last["prompt_eval_duration"]) == (7, 2_000_000)
    assert (last["eval_count"], last["eval_duration"]) == (5, 1_500_000)
    assert last["timings"]["hit_rate"] == 0.5
    # A call that was cut off is left out.
    (cut,) = lines("/api/chat", event(**pieces[0]), event("length"))
    assert "tool_calls" not in cut["message"] and cut["done_reason"] == "length"


def test_api_generate_has_its_own_form():
    raw = json.dumps({"choices": [{"text": "b", "index": 0, "finish_reason": "stop"}]}).encode()
    said, _ = lines("/api/generate", event(content="b"), event("stop"))
    assert said["response"] == "b" and "message" not in said
    said, _ = lines("/api/generate", b"data: " + raw + b"\n\n", raw=True)
    assert said["response"] == "b"
    asked = {"prompt": "a", "raw": True, "stream": False}
    said = reply_of(whole(raw), "/api/generate", asked).json()
    assert (said["response"], said["done"]) == ("b", True)


CHATTED, PROMPTED = "/api/chat", "/api/generate"
SCHEMA = {"type": "object"}
FORM = {"type": "json_schema", "json_schema": {"name": "format", "schema": SCHEMA}}
CALLED = [
    {"role": "assistant", "thinking": "hm", "tool_calls": [CALL, CALL]},
    *({"role": "tool", "content": each} for each in "12"),
]
AS_TEXT = {"name": "f", "arguments": '{"x": "ø"}'}
CALLS = [{"id": f"call_{n}", "type": "function", "function": AS_TEXT} for n in (0, 1)]
TRANSLATED = [
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": CALLS},
    {"role": "tool", "content": "1", "tool_call_id": "call_0", "name": "f"},
    {"role": "tool", "content": "2", "tool_call_id": "call_1", "name": "f"},
]
OPTIONS = {"num_predict": 7, "top_p": 0.5, "stop": ["x"]}


# (path, fields of the request, fields that llama.cpp gets), next to the message or prompt.
@cases(
    "path, asked, got",
    (CHATTED, {}, {"messages": SAID, "stream": True}),
    (CHATTED, {"stream": False}, {"stream": False}),
    (CHATTED, {"keep_alive": "5m", "options": {"num_ctx": 9}}, {}),
    (CHATTED, {"options": OPTIONS}, {"max_tokens": 7, "top_p": 0.5, "stop": ["x"]}),
    (CHATTED, {"options": {"num_predict": -1}}, {"max_tokens": None}),
    (CHATTED, {"options": {"num_predict": 64.0, "seed": 1.0}}, {"max_tokens": 64, "seed": 1}),
    (CHATTED, {"format": SCHEMA}, {"response_format": FORM}),
    (CHATTED, {"format": "json"}, {"response_format": {"type": "json_object"}}),
    (CHATTED, {"think": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
    (CHATTED, {"think": "low"}, {"reasoning_effort": "low"}),
    (CHATTED, {"messages": CALLED}, {"messages": TRANSLATED}),
    (PROMPTED, {"system": "s"}, {"messages": [{"role": "system", "content": "s"}, *SAID]}),
    (PROMPTED, {"raw": True}, {"prompt": "a", "messages": None}),
)
def test_requests_are_translated_to_openais_form(path, asked, got):
    served = FakeServed(streaming(b"data: [DONE]\n\n"))
    needed = {"messages": SAID} if path == CHATTED else {"prompt": "a"}
    ask(app_for(served), path, needed | asked)
    ((route, body),) = served.asked
    assert route == ("/v1/completions" if asked.get("raw") else "/v1/chat/completions")
    assert {name: json.loads(body).get(name) for name in got} == got


def calls(*names, **more):
    return {
        "role": "assistant",
        "tool_calls": [{"function": {"name": name, "arguments": {}}, **more} for name in names],
    }


def result(content, **more):
    return {"role": "tool", "content": content, **more}


# (messages, id and name of the result "x")
@cases(
    "messages, id, name",
    # Matched by the tool's name, even if an earlier call has no result.
    ([calls("f", "g"), result("x", tool_name="g")], "call_1", "g"),
    ([calls("f", "g", "f"), result("1", tool_name="f"), result("x", tool_name="f")], "call_2", "f"),
    ([calls("f"), calls("g"), result("x")], "call_1", "g"),
    ([calls("f"), *SAID, calls("f"), result("x", tool_name="f")], "call_1", "f"),
    # Matched by id.
    ([calls("f", id="own"), result("x", tool_call_id="own")], "own", "f"),
    ([calls("f", id="a"), calls("g", id="b"), result("x", tool_call_id="a")], "a", None),
    # Matched by order.
    ([calls("f", "g"), result("1"), result("x")], "call_1", "g"),
    ([calls("f"), result("x", tool_name="other")], "call_0", "f"),
    ([result("x")], "", None),
    ([result("x", tool_name="f")], "", "f"),
)
def test_a_result_of_a_tool_belongs_to_its_call(messages, id, name):
    got = translated([*SAID, *messages])
    (found,) = [each for each in got if each["content"] == "x"]
    assert (found["tool_call_id"], found.get("name")) == (id, name)


@cases(
    "arguments, text",
    ({"x": "ø"}, '{"x": "ø"}'),
    ('{"x":1}', '{"x":1}'),
    ('{"x": "cut o', '{"x": "cut o"}'),
    ("", "{}"),
)
def test_arguments_may_be_a_text(arguments, text):
    sent = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }
    ((made,),) = [each["tool_calls"] for each in translated([*SAID, sent]) if "tool_calls" in each]
    assert made["function"]["arguments"] == text


def translated(messages):
    served = FakeServed(streaming(b"data: [DONE]\n\n"))
    assert (
        ask(app_for(served), "/api/chat", {"messages": messages, "truncate": False}).status == 200
    )
    return json.loads(served.asked[0][1])["messages"]


MODEL = {"id": "m", "meta": {"size": 5, "n_params": 7_000_000_000, "ftype": "Q8_0"}}


def test_the_model_is_described_as_ollama_does():
    """The description has every field that Ollama's clients read, including times that they
    parse."""
    listing = json.dumps({"data": [MODEL]}).encode()
    served = FakeServed(
        whole(listing), whole(listing), whole(listing), whole(b'{"chat_template": "t"}')
    )
    app = app_for(served)
    (tagged,) = ask(app, "/api/tags").json()["models"]
    (loaded,) = ask(app, "/api/ps").json()["models"]
    shown = ask(app, "/api/show", {}).json()
    details = {
        "parent_model": "",
        "format": "gguf",
        "family": "qwen3moe",
        "families": ["qwen3moe"],
        "parameter_size": "7.0B",
        "quantization_level": "Q8_0",
    }
    both = {"name": "m", "model": "m", "size": 5, "digest": "ab" * 32, "details": details}
    assert tagged == {**both, "modified_at": "2001-09-09T01:46:40+00:00"}
    assert loaded.pop("expires_at") > datetime.now(timezone.utc).isoformat()
    assert loaded == {**both, "size_vram": 3, "context_length": 512}
    assert shown["modified_at"] == tagged["modified_at"] and shown["details"] == details


@cases(
    "path, asked, status, says",
    ("/api/chat", {"messages": "a"}, 400, "messages must be a list of at most 4096 items"),
    ("/api/chat", {"messages": SAID, "options": {"top_p": 2}}, 400, "options.top_p must be"),
    (
        "/api/chat",
        {"messages": SAID, "template": "x"},
        400,
        "start the server with --chat-template FILE",
    ),
    ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "use /infill"),
    ("/api/generate", {"prompt": "a", "images": ["b"]}, 400, "this model reads text only"),
    ("/api/chat", {"messages": [{**SAID[0], "images": ["b"]}]}, 400, "--mmproj FILE"),
    ("/api/generate", {"prompt": "a", "images": ["b"], "raw": True}, 400, "the field raw"),
    ("/api/chat", {"messages": [{**SAID[0], "images": [1]}]}, 400, "images[0] must be a text"),
    ("/api/chat", {"messages": SAID, "moe_edge": {"bad": 1}}, 400, "bad is no setting"),
    ("/api/embed", {"input": "a"}, 404, "/api/embed is not a path of this server"),
)
def test_an_error_is_a_sentence(path, asked, status, says):
    reply = ask(app_for(FakeServed()), path, asked)
    assert reply.status == status and list(reply.json()) == ["error"]
    assert says in reply.json()["error"]


def test_errors_during_and_before_an_answer():
    said, failed = lines("/api/chat", event(content="b"), b"data: " + FAILED + b"\n\n")
    assert said["message"]["content"] == "b" and failed == {"error": "the disk is gone"}
    refused = whole(b'{"error": {"message": "too long"}}', 400)
    reply = reply_of(refused, "/api/chat", {"messages": SAID, "stream": False})
    assert (reply.status, reply.json()) == (400, {"error": "too long"})
    reply = ask(app_for(FakeServed(), api_key="k"), "/api/tags")
    assert reply.status == 401 and "API key is missing" in reply.json()["error"]


@pytest.mark.parametrize(("path", "name"), [("/api/chat", "messages"), ("/api/generate", "prompt")])
def test_a_request_without_a_prompt_reports_a_loaded_model(path, name):
    for asked in ({}, {name: type(SAID)() if name == "messages" else ""}):
        said = ask(app_for(FakeServed()), path, asked).json()
        assert (said["done"], said["done_reason"]) == (True, "load")
