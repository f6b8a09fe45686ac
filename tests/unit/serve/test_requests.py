"""The body that llama.cpp gets for a request, and requests that are refused with a message."""

import json
import sys
from pathlib import Path

import pytest
from asgi import SAID, ask
from fake_served import FakeServed, app_for, whole
from paths import CHAT, COMPLETIONS, COUNT, INFILL, MESSAGES, NATIVE, RESPONSES
from real_cache import REAL_CACHE
from tables import cases

from orchestrator.serve.requests import request_schema
from orchestrator.serve.schemas import GENERATING, INNER, MOST_PROMPTS, QUICK
from orchestrator.serve.wire import MOST_DEPTH

ASK = {"messages": SAID}
NEEDED = {
    **dict.fromkeys((CHAT, MESSAGES, COUNT, "/apply-template"), ASK),
    **{each: {"prompt": "a"} for each in (COMPLETIONS, NATIVE)},
    RESPONSES: {"input": "a"},
    INFILL: {"input_prefix": "a", "input_suffix": "b"},
    "/tokenize": {"content": "a"},
    "/detokenize": {"tokens": [1]},
}
# Fields that clients send to any server and that have no effect here.
USUAL = {
    **{"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
    **{"cache_control": {"type": "ephemeral"}, "betas": ["a"], "prompt_cache_key": "k"},
    **{"safety_identifier": "s", "verbosity": "low", "id_slot": 7, "sse_ping_interval": 1},
    "temperature": None,
}
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "a"}}
TEXT, INPUT = {"type": "text", "text": "a"}, {"type": "input_text", "text": "a"}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
OUTPUT = {"type": "function_call_output", "call_id": "a"}


def asked(path, data, most_body_bytes=2**20):
    """(status, body that llama.cpp gets, or the error message)."""
    served = FakeServed(whole())
    served.most_body_bytes = most_body_bytes
    reply = ask(app_for(served, parallel=2), path, data)
    if not served.asked:
        return reply.status, reply.json()["error"]["message"]
    got = json.loads(served.asked[0][1])
    got.pop("id_slot", None)  # set by the server
    return reply.status, got


def said(*blocks):
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def nested(levels):
    made = 1
    for _ in range(levels):
        made = [made]
    return made


def schema(n):
    return {"type": "object", "properties": {f"p{each}": {} for each in range(n)}}


def tool(name, parameters=None):
    return {"type": "function", "function": {"name": name, "parameters": parameters or {}}}


def plain_tool(name):
    return {"type": "function", "name": name, "parameters": {}}


def choice(name):
    return {"type": "function", "function": {"name": name}}


def allowed(tools, mode="auto"):
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


def chosen(tools, tool_choice, **more):
    return {"tools": tools, "tool_choice": tool_choice, **more}


@pytest.mark.parametrize("path", NEEDED)
def test_fields_without_effect_are_removed_and_internal_ones_refused(path):
    needed = NEEDED[path]
    assert asked(path, {**needed, **USUAL}) == (200, needed)
    for name in INNER:
        status, why = asked(path, {**needed, name: [{"type": 9, "value": "a"}]})
        assert status == 400 and why.startswith(f"{name} cannot be set")
    assert asked(path, {**needed, "lora": [], "chat_parser": None}) == (200, needed)


LONG_NAME, WIDE, MANY = "!" * 300, schema(513), "an object in {} has 513 properties"
FORM, OBJECT = {"type": "json_schema"}, "schema must be an object"
ONE, TWO = [tool("a")], [tool("a"), tool("b")]


# (path, fields next to those that the path needs, part of the error message)
@cases(
    "path, data, says",
    # Wrong types and values.
    *[
        (path, {"messages": messages}, "messages")
        for path in (CHAT, MESSAGES, COUNT, "/apply-template")
        for messages in ("x", 5, {}, [], None, ["x"], [{}], [{"role": "user", "content": 5}])
    ],
    (MESSAGES, {"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    (MESSAGES, {"max_tokens": 0}, "max_tokens must be a whole number from 1"),
    (CHAT, {"max_tokens": 64.5}, "max_tokens must be -1 or a whole number"),
    (CHAT, {"max_tokens": 1e300}, "max_tokens must be -1 or a whole number"),
    (CHAT, {"seed": 0.5}, "seed must be a whole number"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt"),
    (CHAT, {"max_tokens": 0}, "max_tokens must be -1 or a whole number"),
    (CHAT, {"stream": "yes"}, "stream must be true or false"),
    (CHAT, {"logprobs": 1}, "logprobs must be true or false"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "from 0 to 20"),
    (CHAT, {"logprobs": True, "top_logprobs": True}, "from 0 to 20"),
    (CHAT, {"top_logprobs": 2}, "needs logprobs"),
    (CHAT, {"messages": SAID * 200}, "200 messages exceed"),
    (MESSAGES, said(RESULT | {"content": [TEXT] * 500}, TEXT), "501 parts of messages exceed"),
    (COUNT, {"system": [TEXT] * 500}, "501 parts of messages exceed"),
    (RESPONSES, {"input": [OUTPUT | {"output": [INPUT] * 500}] * 2}, "1000 parts of messages"),
    (CHAT, {"grammar": {"a": 1}}, "grammar must be a text"),
    (CHAT, {"response_format": "json"}, "response_format must be an object"),
    (CHAT, {"response_format": FORM | {"json_schema": 3}}, "json_schema"),
    (RESPONSES, {"text": {"format": 3}}, "must be an object"),
    (RESPONSES, {"text": {"format": FORM | {"schema": 3}}}, OBJECT),
    (MESSAGES, {"output_config": {"format": {"type": "text"}}}, "must be json_schema"),
    (MESSAGES, {"output_config": {"format": FORM | {"schema": "x"}}}, OBJECT),
    (COMPLETIONS, {"logprobs": 6}, "logprobs must be a whole number from 0 to 5"),
    (COMPLETIONS, {"logprobs": True}, "logprobs must be"),
    (COMPLETIONS, {"prompt": None}, "prompt is missing"),
    (NATIVE, {"n_probs": "many"}, "n_probs must be a whole number"),
    (NATIVE, {"n_probs": 10**6}, "n_probs is 1000000"),
    (
        NATIVE,
        {"n_probs": 100, "n_predict": 400},
        "an answer of 400 tokens with n_probs 100",
    ),
    (RESPONSES, {"input": []}, "input must be"),
    ("/tokenize", {"content": {"a": 1}}, "content must be"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0] must be"),
    *[
        ("/detokenize", {"tokens": [*range(10_000), wrong]}, "tokens[10000] must be a whole number")
        for wrong in (-1, 2**31, True)
    ],
    # More than the server computes for one request.
    (CHAT, {"x": nested(MOST_DEPTH)}, "nested more than 100 levels deep"),
    (CHAT, {"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias must be"),
    (CHAT, {"logit_bias": [["word " * 4000, 1]]}, "texts of logit_bias has 20000"),
    # Tokens that the model does not have.
    (
        CHAT,
        {"logit_bias": {"4096": -100}},
        "logit_bias names token 4096, but the model's token ids are",
    ),
    (CHAT, {"logit_bias": {"9" * 9000: 1}}, "logit_bias names token 99999999999999999999, but"),
    (CHAT, {"logit_bias": {" -1": -100}}, "logit_bias names token -1"),
    (COMPLETIONS, {"logit_bias": [[5, 1], [99_999_999, False]]}, "logit_bias names token 99999999"),
    (MESSAGES, {"logit_bias": [[10**15, 1]]}, "logit_bias"),
    (NATIVE, {"logit_bias": {"": 1}}, "logit_bias has an empty text"),
    (CHAT, {"logit_bias": [[False, 1]]}, "logit_bias has false: give a token id or a text"),
    (CHAT, {"logit_bias": [[-37.5, 1]]}, "logit_bias has -37.5: give a token id or a text"),
    (CHAT, {"stop": ["x"] * 129}, "stop must be a list of at most 128 items"),
    (CHAT, {"samplers": ["top_k"] * 33}, "samplers must be"),
    (CHAT, {"samplers": "k" * 33}, "samplers must be"),
    (CHAT, {"dry_sequence_breakers": ["x"] * 17}, "dry_sequence_breakers must be"),
    (NATIVE, {"prompt": ["One"] * (MOST_PROMPTS + 1)}, "prompt must be"),
    (CHAT, {"grammar": "x" * (2**18 + 1)}, "grammar must be a text of at most 262144"),
    (CHAT, {"json_schema": WIDE}, MANY.format("json_schema")),
    (
        CHAT,
        {"response_format": FORM | {"json_schema": {"schema": WIDE}}},
        MANY.format("response_format"),
    ),
    (CHAT, {"tools": [tool("f", WIDE)]}, MANY.format("tools")),
    (
        CHAT,
        {"tools": [tool("f", {"properties": {LONG_NAME: {}}})]},
        "a name in tools has 300 characters",
    ),
    (CHAT, {"json_schema": {"$ref": LONG_NAME}}, "a name in json_schema has 300 characters"),
    # Pieces of tokens take a hundred times the memory of their text.
    ("/tokenize", {"content": "a" * 140_000, "with_pieces": True}, "at most 128 KiB"),
    # Fields that llama.cpp's server would ignore without an error.
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    (CHAT, {"functions": [{"name": "a"}]}, "tools"),
    (CHAT, {"web_search_options": {"a": 1}}, "web_search_options"),
    (COMPLETIONS, {"best_of": 3}, "best_of"),
    (COMPLETIONS, {"suffix": "b"}, INFILL),
    (COMPLETIONS, {"echo": True}, "echo"),
    *[
        (each, {"echo": True}, "echo is not supported")
        for each in (INFILL, NATIVE, RESPONSES, MESSAGES)
    ],
    (RESPONSES, {"conversation": "conv_1"}, "conversation"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "prompt"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "cannot run tools"),
    (MESSAGES, said(DOCUMENT), "document"),
    (MESSAGES, said({"type": "tool_result", "content": [DOCUMENT]}), "document"),
    (COUNT, said(DOCUMENT), "document"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "cannot run tools"),
    (MESSAGES, {"mcp_servers": [{"url": "https://mcp.example"}]}, "mcp_servers"),
    # tool_choice that no tool can satisfy.
    (CHAT, {"tool_choice": "required"}, "has no tools"),
    (CHAT, {"tools": {}, "tool_choice": "auto"}, "tools must be a list"),
    (CHAT, {"tools": ONE, "tool_choice": choice("b")}, "'b', but tools has no"),
    *[
        (CHAT, {"tools": ONE, "tool_choice": wrong}, "must be")
        for wrong in ("sometimes", 3, {"type": "function"}, allowed(3))
    ],
)
def test_refused_fields_have_a_message(path, data, says):
    status, why = asked(path, {**NEEDED[path], **data})
    assert status == 400 and says in why


OWN, PLAIN = {"type": "function", "name": "read"}, [plain_tool("a"), plain_tool("b")]
NAMED = {"tools": PLAIN[1:], "tool_choice": "required", "parallel_tool_calls": False}
AMONG = {"mode": "auto", "tools": [tool("b"), tool("x")]}
SERIAL = {"type": "auto", "disable_parallel_tool_use": True}
AS_SENT = None


# (path, fields next to those that the path needs, fields that llama.cpp gets). AS_SENT: unchanged.
@cases(
    "path, data, seen",
    (CHAT, {"logit_bias": [[n, 1] for n in range(1024)]}, AS_SENT),
    (CHAT, {"logit_bias": {"4095": -100, "0": 1, "4096 words": 1}}, AS_SENT),
    (CHAT, {"x": nested(MOST_DEPTH - 2)}, {}),
    (CHAT, {"stop": "x" * 200}, AS_SENT),
    (CHAT, {"stop": ""}, {}),
    (CHAT, {"stop": ["", "x"]}, {"stop": ["x"]}),
    # Some clients send whole numbers as floats.
    *[
        (each, {"max_tokens": 64.0, "seed": 1.0}, {"max_tokens": 64, "seed": 1})
        for each in (CHAT, MESSAGES, COMPLETIONS, NATIVE, INFILL)
    ],
    (RESPONSES, {"max_output_tokens": 64.0}, {"max_output_tokens": 64}),
    (CHAT, {"max_tokens": -1.0, "temperature": 1.0}, {"max_tokens": -1, "temperature": 1.0}),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9.0}}, AS_SENT),
    ("/detokenize", {"tokens": [1.0, 2]}, {"tokens": [1, 2]}),
    (COMPLETIONS, {"prompt": [[1.0], "a"]}, {"prompt": [[1], "a"]}),
    *[(each, {"stop": [""]}, {"stop": []}) for each in (CHAT, COMPLETIONS, NATIVE)],
    (MESSAGES, {"stop_sequences": [""]}, {"stop_sequences": []}),
    (MESSAGES, said(RESULT | {"content": [TEXT] * 64}), AS_SENT),
    (NATIVE, {"prompt": [1] * 1000}, AS_SENT),
    ("/tokenize", {"content": "a" * 120_000, "with_pieces": True}, AS_SENT),
    ("/tokenize", {"content": [1] * 140_000}, AS_SENT),
    (CHAT, {"json_schema": schema(512)}, AS_SENT),
    (CHAT, {"tools": [tool("f", {"type": "object", "description": LONG_NAME})]}, AS_SENT),
    (CHAT, {"modalities": ["text"], "audio": None, "functions": [], "store": 1}, {}),
    (COMPLETIONS, {"best_of": 1, "suffix": ""}, {}),
    (RESPONSES, {"background": False, "conversation": None, "store": False}, {}),
    (MESSAGES, said({"type": "text", "text": "a"}, {"type": "thinking"}), AS_SENT),
    # Agents offer tools that a server would run. They are left out.
    (RESPONSES, {"tools": [{"type": "web_search"}, OWN]}, {"tools": [OWN]}),
    (MESSAGES, {"tools": [{"type": "web_search_20250305"}, OWN]}, {"tools": [OWN]}),
    # llama.cpp would allocate memory for larger values.
    (NATIVE, {"repeat_last_n": 2**31 - 1}, {"repeat_last_n": 512}),
    (NATIVE, {"dry_penalty_last_n": -1}, {"dry_penalty_last_n": 512}),
    # A named tool becomes the only one.
    (CHAT, chosen(TWO, choice("b")), {**NAMED, "tools": TWO[1:]}),
    (RESPONSES, chosen(PLAIN, {"type": "function", "name": "b"}), NAMED),
    (MESSAGES, chosen(PLAIN, {"type": "tool", "name": "b"}), chosen(PLAIN[1:], {"type": "any"})),
    (CHAT, chosen(TWO, {"type": "allowed_tools", "allowed_tools": AMONG}), chosen(TWO[1:], "auto")),
    (RESPONSES, chosen(PLAIN, allowed([plain_tool("b")], "required")), NAMED),
    *[(CHAT, chosen(ONE, word), AS_SENT) for word in ("auto", "none", "required")],
    (CHAT, {"tool_choice": "auto"}, AS_SENT),
    # Anthropic's values of tool_choice. llama.cpp would read unknown ones as "auto".
    (MESSAGES, chosen(PLAIN, {"type": "none"}), {}),
    (MESSAGES, chosen(PLAIN, {"type": "any"}), AS_SENT),
    (MESSAGES, chosen(PLAIN, SERIAL), chosen(PLAIN, {"type": "auto"}, parallel_tool_calls=False)),
)
def test_the_body_that_llama_cpp_gets(path, data, seen):
    expected = {**NEEDED[path], **(data if seen is AS_SENT else seen)}
    assert asked(path, {**NEEDED[path], **data}) == (200, expected)


def test_probabilities_limit_the_length_of_an_answer():
    asks = {**ASK, "logprobs": True, "top_logprobs": 20}
    assert 100 <= asked(CHAT, asks)[1]["max_tokens"] < 512
    assert "max_tokens" not in asked(CHAT, {**asks, "stream": True})[1]
    assert "max_tokens" not in asked(COMPLETIONS, {"prompt": "a", "logprobs": 1})[1]


def test_every_field_of_upstream_is_declared():
    """Every field that upstream adds must be accepted, refused or ignored on purpose."""
    for path in (*GENERATING, *QUICK):
        assert request_schema(path)["properties"]
    if not sorted(REAL_CACHE.glob("source/*/vendor/llama.cpp/tools/server/server-schema.cpp")):
        pytest.skip("upstream's source is not unpacked: run `make build` once")
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fuzz"))
    from fields import declared

    ours = {name for path in GENERATING for name in request_schema(path)["properties"]}
    # Fields without an effect here, or set by the server.
    left_out = {"backend_sampling", "n_cache_reuse", "n_discard", "reasoning_control"}
    left_out |= {"sse_ping_interval", "id_slot"}
    assert not set(declared(REAL_CACHE)) - {"include_usage"} - ours - set(INNER) - left_out
    assert not ours & set(INNER) and not ours & left_out
