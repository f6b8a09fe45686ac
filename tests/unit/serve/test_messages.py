"""How messages and reasoning settings of clients are rewritten for llama.cpp."""

import json

import pytest
from asgi import ask
from fake_served import FakeServed, app_for, whole
from paths import CHAT, COUNT, MESSAGES, RESPONSES
from tables import cases

from orchestrator.serve.messages import whole_arguments

ASK = {"role": "user", "content": "a"}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "42"}
SECOND = {"type": "tool_result", "tool_use_id": "t2", "content": "43"}
FAILED = {"type": "text", "text": "Error: "}
SAYS = {"type": "text", "text": "go on"}
AS_SENT = None


def seen(path, data):
    """(status, body that llama.cpp gets, or the error message)."""
    served = FakeServed(whole())
    reply = ask(app_for(served, parallel=2), path, data)
    if not served.asked:
        return reply.status, reply.json()["error"]["message"]
    got = json.loads(served.asked[0][1])
    got.pop("id_slot", None)
    return reply.status, got


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def called(arguments, **more):
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": function, **more}]}


def failed(content):
    return user({**RESULT, "content": content, "is_error": True})


def reasoning(**more):
    return {"type": "reasoning", "id": "r", **more}


def thought(text):
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "summary": [], "content": content}


def response_call(arguments):
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}


# (path, messages or input of the request, messages that llama.cpp gets). AS_SENT: unchanged.
@cases(
    "path, sent, got",
    # Tool results directly follow their calls. Other parts of the message follow the results.
    *[
        (path, [ASK, user(RESULT, SAYS, SECOND)], [ASK, user(RESULT, SECOND), user(SAYS)])
        for path in (MESSAGES, COUNT)
    ],
    (MESSAGES, [user(SAYS, RESULT)], [user(RESULT), user(SAYS)]),
    (MESSAGES, [user(RESULT, SECOND)], AS_SENT),
    (MESSAGES, [ASK, {"role": "assistant", "content": [SAYS, USE]}], AS_SENT),
    # The result of a failed call begins with "Error: ".
    (
        MESSAGES,
        [failed("no file")],
        [
            user(
                {
                    **RESULT,
                    "is_error": True,
                    "content": [FAILED, {"type": "text", "text": "no file"}],
                }
            )
        ],
    ),
    (COUNT, [failed([SAYS])], [user({**RESULT, "is_error": True, "content": [FAILED, SAYS]})]),
    (MESSAGES, [user({**RESULT, "is_error": False})], AS_SENT),
    # Missing content becomes an empty text.
    *[
        (
            path,
            [ASK, {"role": "assistant", "content": []}],
            [ASK, {"role": "assistant", "content": ""}],
        )
        for path in (CHAT, MESSAGES, COUNT, "/apply-template")
    ],
    (
        CHAT,
        [ASK, {"role": "assistant", "reasoning_content": "h"}],
        [ASK, {"role": "assistant", "reasoning_content": "h", "content": ""}],
    ),
    (CHAT, [ASK, {"role": "assistant", "content": None}], AS_SENT),
    # Arguments that were cut off are completed.
    (CHAT, [called("", type="function")], [called("{}", type="function")]),
    (CHAT, [called('{"x": "y', type="function")], [called('{"x": "y"}', type="function")]),
    (CHAT, [called('{"x":1}')], [called('{"x":1}', type="function")]),
    (CHAT, [called({"x": 1}, type="function")], [called('{"x": 1}', type="function")]),
    (
        MESSAGES,
        [{"role": "assistant", "content": [{**USE, "input": ""}]}],
        [{"role": "assistant", "content": [{**USE, "input": {}}]}],
    ),
    (RESPONSES, [response_call('{"x": [1, ')], [response_call('{"x": [1]}')]),
    # Reasoning items without text are left out.
    (RESPONSES, [reasoning(summary=[]), {**ASK, "type": "message"}], [{**ASK, "type": "message"}]),
    (
        RESPONSES,
        [reasoning(content=None), {**ASK, "type": "message"}],
        [{**ASK, "type": "message"}],
    ),
    (RESPONSES, [reasoning(summary=[{"type": "summary_text", "text": "hm"}])], [thought("hm")]),
    (RESPONSES, [reasoning(content=[SAYS, SAYS])], [thought("go ongo on")]),
    (
        RESPONSES,
        [{"role": "assistant", "content": "a"}],
        [{"role": "assistant", "content": "a", "type": "message"}],
    ),
)
def test_messages_are_rewritten_for_llama_cpp(path, sent, got):
    name, more = ("input", {}) if path == RESPONSES else ("messages", {"max_tokens": 5})
    status, found = seen(path, {name: sent, **more})
    assert (status, found[name]) == (200, sent if got is AS_SENT else got)


CLAUDE = "You are Claude Code."
HEADER = "x-anthropic-billing-header: cc_version=2.1.{}; cc_entrypoint=cli; {}"


@cases(
    "header",
    HEADER.format("101.e51", "cch=a5145;"),
    HEADER.format("101.abc", "cch=0;"),
    HEADER.format("9", "cch=0123456789abcdef;"),
    HEADER.format("9", "cch=a5145"),
    HEADER.format("9", "cch=a5145;\n"),
    "x-anthropic-billing-header:",
)
def test_the_billing_header_is_removed_from_prompts(header):
    """Claude Code's billing header changes with each request. Without it, prompts begin with the
    same tokens and can be reused."""
    block, own = {"type": "text", "text": header}, {"type": "text", "text": CLAUDE}
    for path in (MESSAGES, COUNT):
        asked = {"messages": [ASK], "max_tokens": 5}
        assert seen(path, {**asked, "system": [block, own]})[1]["system"] == [own]
        assert "system" not in seen(path, {**asked, "system": header})[1]
    joined = header if header.endswith((";", "\n")) else header + "\n"
    assert seen(MESSAGES, {**asked, "system": joined + CLAUDE})[1]["system"] == CLAUDE
    got = seen(CHAT, {"messages": [{"role": "system", "content": joined + CLAUDE}, ASK]})[1]
    assert got["messages"][0]["content"] == CLAUDE
    about = {"messages": [{**ASK, "content": header}], "max_tokens": 5, "system": f"See {header}"}
    assert seen(MESSAGES, about) == (200, about)


OFF = {"chat_template_kwargs": {"enable_thinking": False}}


def effort(word):
    return {"chat_template_kwargs": {"reasoning_effort": word}}


# (path, reasoning settings of the request, fields that are added for llama.cpp, fields that are
# removed)
@cases(
    "path, asked, besides, without",
    (MESSAGES, {"thinking": {"type": "disabled"}}, OFF, ()),
    (COUNT, {"thinking": {"type": "disabled"}}, OFF, ()),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 0}}, OFF, ()),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2000}}, {}, ()),
    (MESSAGES, {"thinking": {"type": "adaptive"}}, {}, ()),
    (MESSAGES, {"output_config": {"effort": "low"}}, effort("low"), ()),
    (
        MESSAGES,
        {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}},
        {},
        (),
    ),
    (CHAT, {"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}, ["reasoning"]),
    (CHAT, {"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}, ["reasoning"]),
    (
        CHAT,
        {"reasoning": {"effort": "low"}, "reasoning_effort": "high"},
        {"reasoning_effort": "high"},
        ["reasoning"],
    ),
    (CHAT, {"reasoning": {"enabled": False}}, OFF, ["reasoning"]),
    (CHAT, {"reasoning": {"enabled": True}}, {}, ["reasoning"]),
    (CHAT, {"reasoning": {"max_tokens": 9}}, {"reasoning_budget_tokens": 9}, ["reasoning"]),
    (CHAT, {"reasoning_budget_tokens": 0}, OFF, ()),
    (CHAT, {"thinking_budget_tokens": 0}, OFF, ()),
    (CHAT, {"reasoning_budget_tokens": 5, "thinking_budget_tokens": 0}, {}, ()),
    (RESPONSES, {"reasoning": {"effort": "none"}}, {}, ()),
)
def test_settings_of_reasoning_reach_llama_cpp(path, asked, besides, without):
    needed = {"input": "a"} if path == RESPONSES else {"messages": [ASK], "max_tokens": 5}
    expected = {name: value for name, value in (needed | asked).items() if name not in without}
    assert seen(path, needed | asked) == (200, expected | besides)


@cases(
    "path, asked, says",
    (MESSAGES, {"thinking": {"type": "auto"}}, 'thinking.type must be "enabled" or "disabled" or'),
    (MESSAGES, {"thinking": {}}, "thinking.type is missing"),
    (COUNT, {"output_config": {"effort": "huge"}}, 'output_config.effort must be "low" or'),
    (CHAT, {"reasoning": {"effort": 1}}, "reasoning.effort must be a text"),
    (CHAT, {"reasoning": "none"}, "reasoning must be an object"),
)
def test_unknown_settings_of_reasoning_are_refused(path, asked, says):
    status, why = seen(path, {"messages": [ASK], "max_tokens": 5, **asked})
    assert status == 400 and says in why


@cases(
    "sent, made",
    ("{}", "{}"),
    ('{"a":1}', '{"a":1}'),
    ('{"city": "Os', '{"city": "Os"}'),
    ('{"a": "x\\', '{"a": "x"}'),
    ('{"a": "x\\u12', '{"a": "x"}'),
    ('{"a": "x\\ud83d\\ude', '{"a": "x"}'),
    ('{"a": "x\\\\', '{"a": "x\\\\"}'),
    ('{"a": tr', "{}"),
    ('{"a": 1, "b": 12', '{"a": 1}'),
    ('{"a": 1, "b', '{"a": 1}'),
    ('{"a": 1, "b":', '{"a": 1}'),
    ('{"a": [1, {"x": "y", "z', '{"a": [1, {"x": "y"}]}'),
    ('{"a": {"b": "c"}', '{"a": {"b": "c"}}'),
    ('{"a": 1} more', '{"a": 1}'),
    ('{"a": NaN}', "{}"),
    ('{"a": 1e999}', "{}"),
    ('{"a":' * 50_000, "{}"),
    *[(odd, "{}") for odd in ("", " ", "null", "[1]", "5", '"a"', "text", None, 5, ["a"])],
    ({"a": "ø"}, '{"a": "ø"}'),
)
def test_arguments_of_a_call_are_an_object(sent, made):
    assert whole_arguments(sent) == made


@pytest.mark.parametrize("length", range(1, 60))
def test_a_call_cut_at_any_length_is_completed(length):
    """Keys of the result are keys of the original, for each length at which it is cut."""
    text = '{"a": {"b": [1, "x\\n", {"c": null}], "d": "y\\ud83d\\ude00"}, "e": true}'
    made = json.loads(whole_arguments(text[:length]))
    assert isinstance(made, dict) and made.keys() <= {"a", "e"}
    assert length < 8 or made["a"].keys() <= {"b", "d"}
