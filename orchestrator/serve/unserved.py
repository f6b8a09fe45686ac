"""What OpenAI's and Anthropic's requests may ask for, and llama.cpp's server leaves out without a
word: an answer that only looks like what was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestrator.serve.wire import ANTHROPIC, Refusal

_CHAT, _COMPLETIONS, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_NATIVE, _INFILL = "/completion", "/infill"
_ECHO = "/v1/completions has it, for the likelihood of a prompt"
# Fields that change what an answer is, by path, and what to do about them.
_FIELDS = {
    _CHAT: {
        "audio": "answers are text",
        "functions": "give them as tools",
        "web_search_options": "this server searches nothing",
    },
    _COMPLETIONS: {
        "suffix": "/infill fills gaps, for models that can",
    },
    _NATIVE: {"echo": _ECHO},
    _INFILL: {"echo": _ECHO},
    _RESPONSES: {
        "echo": _ECHO,
        "conversation": "nothing is stored, so give the whole conversation as input",
        "background": "nothing is stored, so wait for the answer",
        "prompt": "nothing is stored, so give the text as input",
    },
    ANTHROPIC: {
        "echo": _ECHO,
        "mcp_servers": "this server runs no tools",
        "container": "this server runs no tools",
    },
}
# Blocks of Anthropic's messages that llama.cpp reads, or refuses by itself.
_BLOCKS = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")
# How the types of tools begin that Anthropic's own servers run.
_RUN_THERE = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset")


def settle_unserved(route: str, data: dict[str, Any]) -> None:
    """Leaves out tools that a server would run, where others stand beside them: agents offer them
    to any server.

    Raises Refusal for what cannot be served.
    """
    for name, why in _FIELDS.get(route, {}).items():
        if data.get(name):
            raise Refusal(400, f"{name} is not served: {why}")
    best_of, modalities = data.get("best_of"), data.get("modalities")
    if route == _COMPLETIONS and best_of not in (None, 1):
        raise Refusal(400, "best_of is not served: each answer is one")
    if route == _CHAT and isinstance(modalities, list) and set(map(str, modalities)) - {"text"}:
        raise Refusal(400, "modalities has more than text: answers are text")
    if route == ANTHROPIC:
        for kind in _blocks(data.get("messages")):
            if kind not in _BLOCKS:
                raise Refusal(400, f"content of type '{kind[:80]}' is not served: give it as text")
    tools = data.get("tools")
    if route not in (_RESPONSES, ANTHROPIC) or not isinstance(tools, list):
        return
    own = [tool for tool in tools if not _runs_there(route, tool)]
    if tools and not own:
        raise Refusal(400, "this server runs no tools: give functions that the client runs")
    data["tools"] = own


def _blocks(messages: Any) -> Iterator[str]:
    """The types of all blocks, those of results of tools included."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for block in content if isinstance(content, list) else ():
            if isinstance(block, dict):
                yield str(block.get("type"))
                yield from _blocks([block])


def _runs_there(route: str, tool: Any) -> bool:
    kind = str(tool.get("type")) if isinstance(tool, dict) else "function"
    if route == _RESPONSES:
        return kind != "function"
    return kind.startswith(_RUN_THERE)
