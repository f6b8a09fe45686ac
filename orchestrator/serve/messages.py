"""Rewrites the conversations of OpenAI's and Anthropic's clients for llama.cpp.

llama.cpp refuses or reorders several kinds of messages that clients may send, including parts of
its own answers. A client repeats its conversation in each request, so such a message would make
every later request fail.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from orchestrator.serve.wire import ANTHROPIC, RESPONSES

Item = dict[str, Any]

# Claude Code's first system block: `x-anthropic-billing-header: cc_version=2.1.9.e51; cch=a5145;`.
# Its values differ in each request, so no two prompts would share a prefix.
_BILLING = re.compile(r"x-anthropic-billing-header:(?:[ \t]*[\w-]+=[^;\s]*(?:;|(?=\s|$)))*\s*")
# One JSON token: a string, punctuation, or another value. An unterminated string does not match.
_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[][{}:,]|[^][{}:,"\s]+)', re.DOTALL)
# The longest escape sequence that a cut-off string can end in: a surrogate pair.
_LONGEST_ESCAPE = len(r"\ud83d\ude00")
_CLOSERS = {"{": "}", "[": "]"}


def settle_messages(route: str, data: dict[str, Any]) -> None:
    """Rewrite the conversation of a request in place, so that llama.cpp accepts it.

    `data` is a request in the format of the path `route`. It was already checked against the JSON
    schema of that path. The schema allows messages that llama.cpp refuses, such as tool calls with
    cut-off arguments.
    """
    if route == RESPONSES:
        if isinstance(data.get("input"), list):
            data["input"] = [made for item in data["input"] for made in _response_item(item)]
        return
    messages = data.get("messages")
    if not isinstance(messages, list):
        return
    if route == ANTHROPIC:
        _settle_system(data)
        data["messages"] = [made for message in messages for made in _anthropic(message)]
    else:
        data["messages"] = [_chat(message) for message in messages]


def whole_arguments(arguments: Any) -> str:
    """Return the arguments of a tool call as the text of a JSON object.

    Valid text is returned unchanged. Text that was cut off, for example at `max_tokens`, is closed
    after its last complete value or inside the string that was cut. Anything else becomes `{}`.
    """
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    text = arguments if isinstance(arguments, str) else ""
    if _object_in(text) is not None:
        return text
    found = _object_in(_closed(text))
    return json.dumps(found or {}, ensure_ascii=False)


def _object_in(text: str) -> Item | None:
    """Return the JSON object that a text contains, or None if llama.cpp could not parse it."""
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _closed(text: str) -> str:
    """Close the brackets of JSON text that was cut off, after its last complete value.

    If the cut is inside a string that is a value, the beginning of that string is kept.
    """
    at = end = 0
    open_ones: list[str] = []
    before = ""
    while match := _TOKEN.match(text, at):
        token, at = match[1], match.end()
        is_key = _is_key(open_ones, before)
        if token in _CLOSERS:
            open_ones.append(token)
        elif token in _CLOSERS.values() and open_ones:
            open_ones.pop()
        # A number or a literal at the end of the text may be incomplete.
        is_whole = token[0] in '"{}[]' or at < len(text)
        if token not in ",:" and is_whole and not is_key:
            end = at
        before = token
    closers = "".join(_CLOSERS[each] for each in reversed(open_ones))
    cut_string = "" if _is_key(open_ones, before) else _ended(text[at:])
    return (text[:at] + cut_string if cut_string else text[:end]) + closers


def _is_key(open_ones: list[str], before: str) -> bool:
    """Return whether the next string in a JSON text is a property name.

    `open_ones` are the brackets that are open, and `before` is the token before the string.
    """
    return open_ones[-1:] == ["{"] and before in ("{", ",")


def _ended(text: str) -> str:
    """Return an unterminated JSON string with its closing quote, or "" if that is not valid JSON.

    An incomplete escape sequence at the end is removed.
    """
    for n_left_out in range(_LONGEST_ESCAPE):
        made = text[: len(text) - n_left_out] + '"'
        try:
            if isinstance(found := json.loads(made), str) and found.encode() is not None:
                return made
        except ValueError:
            continue
    return ""


def _chat(message: Any) -> Any:
    """Return a message of OpenAI's chat format, changed so that llama.cpp accepts it."""
    if not isinstance(message, dict):
        return message
    made = _with_content(message)
    if made.get("role") == "system":
        made["content"] = _without_billing(made.get("content"))
    calls = made.get("tool_calls")
    if isinstance(calls, list):
        made["tool_calls"] = [_chat_call(call) for call in calls]
    elif made.get("role") == "assistant":
        made.setdefault("content", "")  # the answer was cut off during its reasoning
    return made


def _chat_call(call: Any) -> Any:
    """Return a tool call of OpenAI's chat format, changed so that its arguments are valid JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    function = {**function, "arguments": whole_arguments(function.get("arguments"))}
    return {"type": "function", **call, "function": function}


def _with_content(message: Item) -> Item:
    """Return a copy of a message in which an empty list of content parts is an empty text."""
    return {**message, "content": ""} if message.get("content") == [] else {**message}


def _without_billing(content: Any) -> Any:
    """Return the content of a system message without Claude Code's billing header."""
    if isinstance(content, str):
        match = _BILLING.match(content)
        return content[match.end() :] if match else content
    if isinstance(content, list):
        return [
            {**part, "text": _without_billing(part.get("text"))} if isinstance(part, dict) else part
            for part in content
        ]
    return content


def _settle_system(data: dict[str, Any]) -> None:
    """Remove the billing header from Anthropic's system prompt, and an empty system prompt."""
    system = _without_billing(data.pop("system", ""))
    if isinstance(system, list):
        system = [block for block in system if block["text"]]
    if system:
        data["system"] = system


def _anthropic(message: Item) -> Iterator[Item]:
    """Yield the one or two messages that replace a message of Anthropic's format.

    Tool results come first, directly after the calls, and the other blocks follow in a second
    message. llama.cpp would put the other blocks before the results.
    """
    made = _with_content(message)
    if not isinstance(made["content"], list):
        yield made
        return
    blocks = [_block(each) for each in made["content"]]
    results = [each for each in blocks if each.get("type") == "tool_result"]
    rest = [each for each in blocks if each.get("type") != "tool_result"]
    for part in (results, rest):
        if part:
            yield {**made, "content": part}


def _block(block: Item) -> Item:
    """Return a content block of Anthropic's format, changed so that llama.cpp accepts it.

    llama.cpp ignores `is_error`, so the result of a tool that failed gets the prefix "Error: ".
    """
    if block.get("type") == "tool_use":
        return {**block, "input": json.loads(whole_arguments(block.get("input")))}
    if block.get("type") == "tool_result" and block.get("is_error") is True:
        content = block.get("content") or ""
        said = [{"type": "text", "text": content}] if isinstance(content, str) else content
        return {**block, "content": [{"type": "text", "text": "Error: "}, *said]}
    return block


def _response_item(item: Any) -> Iterator[Any]:
    """Yield an item of OpenAI's Responses format, changed so that llama.cpp accepts it.

    Yields nothing for reasoning without text. Clients send such items unless they ask for `include:
    ["reasoning.encrypted_content"]`.
    """
    if not isinstance(item, dict):
        yield item
        return
    made = _with_content(item)
    kind = made.get("type")
    if kind == "reasoning":
        text = _text_of(made.get("content")) or _text_of(made.get("summary"))
        if text:
            content = [{"type": "reasoning_text", "text": text}]
            yield {"type": kind, "summary": [], "content": content}
        return
    if kind == "function_call":
        made["arguments"] = whole_arguments(made.get("arguments"))
    elif kind is None and "role" in made:
        made["type"] = "message"
    yield made


def _text_of(parts: Any) -> str:
    """Return the texts of a list of content parts as one text."""
    if not isinstance(parts, list):
        return ""
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "".join(text for text in texts if isinstance(text, str))
