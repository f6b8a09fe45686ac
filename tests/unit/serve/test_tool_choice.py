"""Choices of tools in OpenAI's and Anthropic's forms, as llama.cpp's server gets them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("starlette", reason="starlette is missing: run `make build`")

from asgi import FakeBackend, FakeRequest, ask, state_with

from orchestrator.serve.app import COUNTING, application
from orchestrator.serve.tools import settle_tool_choice
from orchestrator.serve.wire import Refusal

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SAID = [{"role": "user", "content": "a"}]


def chat_tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {}}}


def plain_tool(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {}}


def settled(route: str, **data: Any) -> dict[str, Any]:
    settle_tool_choice(route, data)
    return data


@pytest.mark.parametrize(
    ("route", "tool", "choice", "word"),
    [
        (CHAT, chat_tool, {"type": "function", "function": {"name": "b"}}, "required"),
        (RESPONSES, plain_tool, {"type": "function", "name": "b"}, "required"),
        (MESSAGES, plain_tool, {"type": "tool", "name": "b"}, {"type": "any"}),
        (
            CHAT,
            chat_tool,
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [chat_tool("b"), chat_tool("x")]},
            },
            "auto",
        ),
        (
            RESPONSES,
            plain_tool,
            {"type": "allowed_tools", "mode": "required", "tools": [plain_tool("b")]},
            "required",
        ),
    ],
)
def test_a_named_tool_is_the_only_one(route: str, tool: Any, choice: Any, word: Any) -> None:
    data = settled(route, tools=[tool("a"), tool("b")], tool_choice=choice)
    once = {"parallel_tool_calls": False} if word == "required" else {}
    assert data == {"tools": [tool("b")], "tool_choice": word, **once}


def test_words_stay_as_they_are() -> None:
    for word in ("auto", "none", "required"):
        data = settled(CHAT, tools=[chat_tool("a")], tool_choice=word)
        assert data == {"tools": [chat_tool("a")], "tool_choice": word}
    assert settled(CHAT, messages=[]) == {"messages": []}
    assert settled(CHAT, messages=[], tool_choice="auto") == {"messages": [], "tool_choice": "auto"}


def test_a_count_reads_the_choice_as_the_answer_does() -> None:
    """What llama.cpp counts is the prompt of the request as it gets it for an answer."""
    asked = {"messages": SAID, "tools": [plain_tool("a")], "tool_choice": {"type": "any"}}
    named = {"messages": SAID, "tools": [chat_tool("a"), chat_tool("b")]}
    named["tool_choice"] = {"type": "function", "function": {"name": "b"}}
    for path, data in (
        ("/v1/messages", asked),
        ("/v1/chat/completions", named),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_object"}}}),
    ):
        backend = FakeBackend(*(FakeRequest(200, False, [b"{}"]) for _ in range(2)))
        app = application(state_with(backend), lambda _line: None)
        count = next(each for each, form in COUNTING.items() if form == path)
        assert [ask(app, each, data).status for each in (path, count)] == [200, 200]
        (answered, body), (counted, same) = backend.asked
        assert (answered, counted) == (path, count) and body == same


def test_anthropic_has_words_of_its_own() -> None:
    tools = [plain_tool("a")]
    # llama.cpp would take what it does not know for "auto".
    assert settled(MESSAGES, tools=tools, tool_choice={"type": "none"}) == {}
    assert settled(MESSAGES, tools=tools, tool_choice={"type": "any"})["tool_choice"] == {
        "type": "any"
    }
    once = {"type": "auto", "disable_parallel_tool_use": True}
    assert settled(MESSAGES, tools=tools, tool_choice=once)["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    ("tools", "choice", "says"),
    [
        (None, "required", "has no tools"),
        ([], {"type": "function", "function": {"name": "a"}}, "has no tools"),
        ([chat_tool("a")], {"type": "function", "function": {"name": "b"}}, "'b', which is none"),
        ([chat_tool("a")], "sometimes", "must be"),
        ([chat_tool("a")], 3, "must be"),
        ([chat_tool("a")], {"type": "function"}, "must be"),
        ([chat_tool("a")], {"type": "allowed_tools", "mode": "auto", "tools": 3}, "must be"),
        ({}, "auto", "must be a list"),
    ],
)
def test_what_cannot_be_met_is_refused(tools: Any, choice: Any, says: str) -> None:
    with pytest.raises(Refusal, match=says) as refused:
        settle_tool_choice(CHAT, {"tools": tools, "tool_choice": choice})
    assert refused.value.status == 400
