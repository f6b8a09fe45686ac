"""What llama.cpp gets to see of a request, in which words, and what is refused in a sentence."""

import json
import sys
from pathlib import Path

import pytest
from asgi import FakeBackend, app_for, ask, whole
from real_cache import REAL_CACHE

from orchestrator.serve import requests
from orchestrator.serve.requests import request_schema
from orchestrator.serve.schemas import GENERATING, INNER, MOST_PROMPTS, QUICK
from orchestrator.serve.wire import MOST_DEPTH, Refusal

CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT, INFILL = "/v1/messages/count_tokens", "/infill"
SAID = [{"role": "user", "content": "a"}]
ASK = {"messages": SAID}
NEEDED = {
    CHAT: ASK,
    COMPLETIONS: {"prompt": "a"},
    NATIVE: {"prompt": "a"},
    RESPONSES: {"input": "a"},
    MESSAGES: ASK,
    INFILL: {"input_prefix": "a", "input_suffix": "b"},
    "/tokenize": {"content": "a"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": ASK,
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
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "a"}}


def asked(path, data, most_body_bytes=2**20):
    """(status, what llama.cpp got, or else the sentence)."""
    backend = FakeBackend(whole())
    backend.most_body_bytes = most_body_bytes
    reply = ask(app_for(backend, parallel=2), path, data)
    if not backend.asked:
        return reply.status, reply.json()["error"]["message"]
    got = json.loads(backend.asked[0][1])
    got.pop("id_slot", None)  # the server names it
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


@pytest.mark.parametrize("path", NEEDED)
def test_what_means_nothing_here_is_left_out_and_what_steers_llama_cpp_is_refused(path):
    needed = NEEDED[path]
    assert asked(path, {**needed, **USUAL}) == (200, needed)
    for name in INNER:
        status, why = asked(path, {**needed, name: [{"type": 9, "value": "a"}]})
        assert status == 400 and why.startswith(f"{name} cannot be set")
    assert asked(path, {**needed, "lora": [], "chat_parser": None}) == (200, needed)


LONG_NAME = "!" * 300
FORM, OBJECT = {"type": "json_schema"}, "schema must be an object"
REFUSED = [
    # No request of its path.
    *[
        (path, {"messages": messages}, "messages")
        for path in (CHAT, MESSAGES, COUNT, "/apply-template")
        for messages in ("x", 5, {}, [], None, ["x"], [{}], [{"role": "user", "content": []}])
    ],
    (MESSAGES, {"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    (MESSAGES, {**ASK, "max_tokens": 0}, "max_tokens must be a whole number from 1"),
    (CHAT, {**ASK, "max_tokens": 0}, "max_tokens must be -1 or a whole number"),
    (CHAT, {**ASK, "stream": "yes"}, "stream must be true or false"),
    (CHAT, {**ASK, "logprobs": 1}, "logprobs must be true or false"),
    (CHAT, {**ASK, "logprobs": True, "top_logprobs": 21}, "from 0 to 20"),
    (CHAT, {**ASK, "logprobs": True, "top_logprobs": True}, "from 0 to 20"),
    (CHAT, {**ASK, "top_logprobs": 2}, "needs logprobs"),
    (CHAT, {"messages": SAID * 200}, "200 messages exceed"),
    (CHAT, {**ASK, "grammar": {"a": 1}}, "grammar must be a text"),
    (CHAT, {**ASK, "response_format": "json"}, "response_format must be an object"),
    (CHAT, {**ASK, "response_format": FORM | {"json_schema": 3}}, "json_schema"),
    *[
        (RESPONSES, {"input": "a", "text": {"format": wrong}}, says)
        for wrong, says in ((3, "must be an object"), (FORM | {"schema": 3}, OBJECT))
    ],
    *[
        (MESSAGES, {**ASK, "output_config": {"format": wrong}}, says)
        for wrong, says in (
            ({"type": "text"}, "must be a json_schema"),
            (FORM | {"schema": "x"}, OBJECT),
        )
    ],
    (COMPLETIONS, {"prompt": "a", "logprobs": 6}, "logprobs must be a whole number from 0 to 5"),
    (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs must be"),
    (COMPLETIONS, {}, "prompt is missing"),
    (NATIVE, {"prompt": "a", "n_probs": "many"}, "n_probs must be a whole number"),
    (NATIVE, {"prompt": "a", "n_probs": 10**6}, "n_probs is 1000000"),
    (NATIVE, {"prompt": "a", "n_probs": 100, "n_predict": 400}, "no room in memory"),
    (RESPONSES, {"input": []}, "input must be"),
    ("/tokenize", {"content": {"a": 1}}, "content must be"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0] must be"),
    # More than is computed for one request.
    (CHAT, {**ASK, "x": nested(MOST_DEPTH)}, "nests more than 100 deep"),
    (CHAT, {**ASK, "logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias must be"),
    (CHAT, {**ASK, "logit_bias": [["word " * 4000, 1]]}, "texts of logit_bias: 20000"),
    (CHAT, {**ASK, "stop": ["x"] * 129}, "stop must be a list of at most 128 items"),
    (CHAT, {**ASK, "samplers": ["top_k"] * 33}, "samplers must be"),
    (CHAT, {**ASK, "samplers": "k" * 33}, "samplers must be"),
    (CHAT, {**ASK, "dry_sequence_breakers": ["x"] * 17}, "dry_sequence_breakers must be"),
    (NATIVE, {"prompt": ["One"] * (MOST_PROMPTS + 1)}, "prompt must be"),
    (CHAT, {**ASK, "grammar": "x" * (2**18 + 1)}, "grammar must be a text of at most 262144"),
    (CHAT, {**ASK, "json_schema": schema(513)}, "an object in json_schema: 513 properties"),
    (
        CHAT,
        {**ASK, "response_format": FORM | {"json_schema": {"schema": schema(513)}}},
        "an object in response_format: 513 properties",
    ),
    *[
        (CHAT, {**ASK, "tools": [tool("f", wrong)]}, says)
        for wrong, says in (
            (schema(513), "an object in tools: 513 properties"),
            ({"properties": {LONG_NAME: {}}}, "a name in tools: 300 characters"),
        )
    ],
    (CHAT, {**ASK, "json_schema": {"$ref": LONG_NAME}}, "a name in json_schema: 300 characters"),
    # Pieces of tokens take a hundred times the memory of their text.
    ("/tokenize", {"content": "a" * 140_000, "with_pieces": True}, "at most 128 KiB"),
    # What llama.cpp's server would leave out without a word.
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    (CHAT, {"functions": [{"name": "a"}]}, "tools"),
    (CHAT, {"web_search_options": {"a": 1}}, "web_search_options"),
    (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, INFILL),
    (COMPLETIONS, {"prompt": "a", "echo": True}, "echo"),
    *[
        (path, {**NEEDED[path], "echo": True}, "echo is not served")
        for path in (INFILL, NATIVE, RESPONSES, MESSAGES)
    ],
    (RESPONSES, {"input": "a", "conversation": "conv_1"}, "conversation"),
    (RESPONSES, {"input": "a", "background": True}, "background"),
    (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "prompt"),
    (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}, "runs no tools"),
    (MESSAGES, said(DOCUMENT), "document"),
    (MESSAGES, said({"type": "tool_result", "content": [DOCUMENT]}), "document"),
    (COUNT, said(DOCUMENT), "document"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "runs no tools"),
    (MESSAGES, {"mcp_servers": [{"url": "https://mcp.example"}]}, "mcp_servers"),
    # A choice of tools that cannot be met.
    (CHAT, {**ASK, "tool_choice": "required"}, "has no tools"),
    (CHAT, {**ASK, "tools": {}, "tool_choice": "auto"}, "tools must be a list"),
    *[
        (CHAT, {**ASK, "tools": [tool("a")], "tool_choice": choice}, says)
        for choice, says in (
            ({"type": "function", "function": {"name": "b"}}, "'b', which is none"),
            ("sometimes", "must be"),
            (3, "must be"),
            ({"type": "function"}, "must be"),
            ({"type": "allowed_tools", "mode": "auto", "tools": 3}, "must be"),
        )
    ],
]


@pytest.mark.parametrize(("path", "data", "says"), REFUSED)
def test_what_is_refused_gets_a_sentence(path, data, says):
    status, why = asked(path, data)
    assert status == 400 and says in why


OWN = {"type": "function", "name": "read"}
ONE, TWO = [tool("a")], [tool("a"), tool("b")]
NAMED_B = {"type": "function", "function": {"name": "b"}}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [plain_tool("b")]}
AMONG = {"mode": "auto", "tools": [tool("b"), tool("x")]}
PLAIN = [plain_tool("a"), plain_tool("b")]
ONCE = {"parallel_tool_calls": False}
AS_SENT = None
# What a path's request becomes, without what the path needs; AS_SENT where it stays as it is.
SEEN = [
    (CHAT, {"logit_bias": [[n, 1] for n in range(1024)]}, AS_SENT),
    (CHAT, {"x": nested(MOST_DEPTH - 2)}, {}),
    (CHAT, {"stop": "x" * 200}, AS_SENT),
    (NATIVE, {"prompt": [1] * 1000}, AS_SENT),
    ("/tokenize", {"content": "a" * 120_000, "with_pieces": True}, AS_SENT),
    ("/tokenize", {"content": [1] * 140_000}, AS_SENT),
    (CHAT, {"json_schema": schema(512)}, AS_SENT),
    (CHAT, {"tools": [tool("f", {"description": LONG_NAME})]}, AS_SENT),
    (CHAT, {"modalities": ["text"], "audio": None, "functions": [], "store": 1}, {}),
    (COMPLETIONS, {"best_of": 1, "suffix": ""}, {}),
    (RESPONSES, {"background": False, "conversation": None, "store": False}, {}),
    (MESSAGES, said({"type": "text", "text": "a"}, {"type": "tool_result"}), AS_SENT),
    # Agents offer tools that a server would run to any server.
    (RESPONSES, {"tools": [{"type": "web_search"}, OWN]}, {"tools": [OWN]}),
    (MESSAGES, {"tools": [{"type": "web_search_20250305"}, OWN]}, {"tools": [OWN]}),
    # llama.cpp would take memory for more.
    (NATIVE, {"repeat_last_n": 2**31 - 1}, {"repeat_last_n": 512}),
    (NATIVE, {"dry_penalty_last_n": -1}, {"dry_penalty_last_n": 512}),
    # A named tool is the only one.
    (
        CHAT,
        {"tools": TWO, "tool_choice": NAMED_B},
        {"tools": TWO[1:], "tool_choice": "required"} | ONCE,
    ),
    (
        RESPONSES,
        {"tools": PLAIN, "tool_choice": {"type": "function", "name": "b"}},
        {"tools": PLAIN[1:], "tool_choice": "required", **ONCE},
    ),
    (
        MESSAGES,
        {"tools": PLAIN, "tool_choice": {"type": "tool", "name": "b"}},
        {"tools": PLAIN[1:], "tool_choice": {"type": "any"}},
    ),
    (
        CHAT,
        {"tools": TWO, "tool_choice": {"type": "allowed_tools", "allowed_tools": AMONG}},
        {"tools": TWO[1:], "tool_choice": "auto"},
    ),
    (
        RESPONSES,
        {"tools": PLAIN, "tool_choice": ALLOWED},
        {"tools": PLAIN[1:], "tool_choice": "required", **ONCE},
    ),
    *[
        (CHAT, {"tools": ONE, "tool_choice": word}, AS_SENT)
        for word in ("auto", "none", "required")
    ],
    (CHAT, {"tool_choice": "auto"}, AS_SENT),
    # Anthropic has words of its own: llama.cpp would take what it does not know for "auto".
    (MESSAGES, {"tools": PLAIN, "tool_choice": {"type": "none"}}, {}),
    (MESSAGES, {"tools": PLAIN, "tool_choice": {"type": "any"}}, AS_SENT),
    (
        MESSAGES,
        {"tools": PLAIN, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"tools": PLAIN, "tool_choice": {"type": "auto"}, **ONCE},
    ),
]


@pytest.mark.parametrize(("path", "data", "seen"), SEEN)
def test_what_llama_cpp_gets_to_see(path, data, seen):
    expected = {**NEEDED[path], **(data if seen is AS_SENT else seen)}
    assert asked(path, {**NEEDED[path], **data}) == (200, expected)


def test_a_list_of_numbers_is_looked_at_at_once(monkeypatch):
    """Not one by one, which took a third of a second for 128 KiB of them."""
    looks = []
    usual = requests._is_kind

    def is_kind(schema, value):
        looks.append(value)
        return usual(schema, value)

    monkeypatch.setattr(requests, "_is_kind", is_kind)
    many = list(range(10_000))
    for route, data in (
        ("/tokenize", {"content": many}),
        ("/detokenize", {"tokens": many}),
        (NATIVE, {"prompt": many}),
        (NATIVE, {"prompt": [many, many]}),
        (COMPLETIONS, {"prompt": [many] * 3}),
    ):
        looks.clear()
        requests.settle_fields(route, data, 512)
        assert 0 < len(looks) < 100, (route, len(looks))
    for wrong in (-1, 2**31, True):
        with pytest.raises(Refusal, match=r"tokens\[10000\] must be a whole number"):
            requests.settle_fields("/detokenize", {"tokens": [*many, wrong]}, 512)


def test_an_answer_with_probabilities_is_as_long_as_memory_has_room_for():
    asks = {**ASK, "logprobs": True, "top_logprobs": 20}
    assert 100 <= asked(CHAT, asks)[1]["max_tokens"] < 512
    assert "max_tokens" not in asked(CHAT, {**asks, "stream": True})[1]
    assert "max_tokens" not in asked(COMPLETIONS, {"prompt": "a", "logprobs": 1})[1]


def test_the_declaration_knows_each_field_of_upstreams():
    """A field that upstream adds is served, refused or left out on purpose."""
    for path in (*GENERATING, *QUICK):
        assert request_schema(path)["properties"]
    if not sorted(REAL_CACHE.glob("source/*/vendor/llama.cpp/tools/server/server-schema.cpp")):
        pytest.skip("upstream's source is not unpacked: run `make serve` once")
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fuzz"))
    from fields import declared

    ours = {name for path in GENERATING for name in request_schema(path)["properties"]}
    # What changes nothing here, or is the server's to decide.
    left_out = {"backend_sampling", "n_cache_reuse", "n_discard", "reasoning_control"}
    left_out |= {"sse_ping_interval", "id_slot"}
    assert not set(declared(REAL_CACHE)) - {"include_usage"} - ours - set(INNER) - left_out
    assert not ours & set(INNER) and not ours & left_out
