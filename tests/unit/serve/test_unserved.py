"""What llama.cpp's server would leave out without a word is refused, or left out on purpose."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("starlette", reason="starlette is missing: run `make build`")

from asgi import FakeBackend, FakeRequest, ask, state_with

from orchestrator.serve.app import application

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "a"}}


def said(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("path", "data", "names"),
    [
        (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        (CHAT, {"functions": [{"name": "a"}]}, "tools"),
        (CHAT, {"web_search_options": {"a": 1}}, "web_search_options"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "/infill"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, "echo"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "echo": True}, "echo is not served"),
        (RESPONSES, {"input": "a", "echo": True}, "echo is not served"),
        (MESSAGES, {**said({"type": "text"}), "echo": True}, "echo is not served"),
        (RESPONSES, {"input": "a", "conversation": "conv_1"}, "conversation"),
        (RESPONSES, {"input": "a", "background": True}, "background"),
        (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "prompt"),
        (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}, "runs no tools"),
        (MESSAGES, said(DOCUMENT), "document"),
        (MESSAGES, said({"type": "tool_result", "content": [DOCUMENT]}), "document"),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "runs no tools"),
        (MESSAGES, {"mcp_servers": [{"url": "https://mcp.example"}]}, "mcp_servers"),
        ("/v1/messages/count_tokens", said(DOCUMENT), "document"),
    ],
)
def test_what_cannot_be_served_is_refused(path: str, data: dict[str, Any], names: str) -> None:
    reply = ask(application(state_with(FakeBackend()), lambda _line: None), path, data)
    assert reply.status == 400 and names in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "data"),
    [
        (
            CHAT,
            {
                **said({"type": "text"}),
                "modalities": ["text"],
                "audio": None,
                "functions": [],
                "store": 1,
            },
        ),
        (COMPLETIONS, {"prompt": "a", "best_of": 1, "suffix": ""}),
        (RESPONSES, {"input": "a", "background": False, "conversation": None, "store": False}),
        (MESSAGES, said({"type": "text", "text": "a"}, {"type": "tool_result", "content": "b"})),
    ],
)
def test_what_changes_nothing_is_no_reason_to_refuse(path: str, data: dict[str, Any]) -> None:
    backend = FakeBackend(FakeRequest(200, False, [b"{}"]))
    assert ask(application(state_with(backend), lambda _line: None), path, data).status == 200
    left = json.loads(backend.asked[0][1])
    assert left == {name: data[name] for name in ("messages", "prompt", "input") if name in data}


@pytest.mark.parametrize(
    ("path", "theirs"),
    [(RESPONSES, "web_search"), (MESSAGES, "web_search_20250305")],
)
def test_tools_that_a_server_would_run_are_left_out_beside_others(path: str, theirs: str) -> None:
    """Agents offer them to any server."""
    backend = FakeBackend(FakeRequest(200, False, [b"{}"]))
    own = {"type": "function" if path == RESPONSES else "custom", "name": "read"}
    data = {
        "input": "a",
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": theirs, "name": "w"}, own],
    }
    assert ask(application(state_with(backend), lambda _line: None), path, data).status == 200
    assert json.loads(backend.asked[0][1])["tools"] == [own]
