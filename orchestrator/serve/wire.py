"""What goes over the wire: bodies that come in, errors that go out, and costs in answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from gguf_tools.units import format_size

# Errors by their status, as OpenAI names them.
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    421: "permission_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "timeout_error",
}
# llama.cpp's word for a step that failed; the store knows why.
STEP_FAILED = b"Compute error."
# Its words where a grammar is given up in the middle of an answer (moe-edge-grammar.cpp).
GRAMMAR_FAILED = b"got exception: the grammar "
# Its status for what a model cannot do, which is no failure of the server.
NOT_SUPPORTED = 501
# How deep a request may nest; and what the escape of a half of a character looks like.
MOST_DEPTH = 100
_HALVES = re.compile(rb"\\u[dD][89a-fA-F]")
ERROR_EVENTS = (b'data: {"error"', b"event: error")
EVENT_END = b"\n\n"
# Anthropic's form of requests. Its clients see an error in a stream by the event's name alone.
ANTHROPIC = "/v1/messages"
# Its event with what an answer came to, which llama.cpp sends without `timings`.
_SUMMARY = "message_delta"
_SUMMARY_TYPE = re.compile(rb'"type": ?"message_delta"')
_TIMINGS = re.compile(rb'"timings": ?\{(?=(\})?)')
# Paths whose whole answers llama.cpp gives no `timings`. Elsewhere an answer has none where its
# client wants other fields alone (`response_fields`).
_WITHOUT_TIMINGS = (ANTHROPIC, "/v1/responses")


class Refusal(Exception):
    """A request that is answered with a status and one sentence. kind: the error's type, where it
    is not that of its status."""

    def __init__(self, status: int, message: str, kind: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind


def error_object(status: int, message: str, kind: str | None = None) -> dict[str, Any]:
    """An error as the SDKs of OpenAI and Anthropic read it."""
    kind = kind or KINDS.get(status, "server_error")
    return {"type": "error", "error": {"code": status, "message": message, "type": kind}}


async def read_body(
    request: Request, most_bytes: int, useful_bytes: int, count: Callable[[int], None]
) -> bytes:
    """The whole body. count gets how long it is by now. Raises Refusal for one that is or says that
    it is longer than most_bytes, before it is all here. useful_bytes: what a context can use."""
    body, said = bytearray(), request.headers.get("content-length", "")
    try:
        if said.isascii() and said.isdigit() and (len(said) > 18 or int(said) > most_bytes):
            raise _too_long(most_bytes, useful_bytes)
        async for chunk in request.stream():
            count(len(body) + len(chunk))
            body += chunk
            if len(body) > most_bytes:
                raise _too_long(most_bytes, useful_bytes)
    except ClientDisconnect:
        raise Refusal(400, "the request ended early") from None
    return bytes(body)


def _too_long(most_bytes: int, useful_bytes: int) -> Refusal:
    said = f"the request is longer than --body-limit, {format_size(most_bytes)}"
    if useful_bytes > most_bytes:
        wanted = format_size(useful_bytes).replace(" ", "")
        said += f": the context has room for --body-limit {wanted}"
    return Refusal(413, said)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises Refusal for anything else, and for one that nests deeper
    than anybody needs, or has half a character in it."""
    try:
        data = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
        if _HALVES.search(body):
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise Refusal(400, "the body is not UTF-8") from None
    except UnicodeEncodeError:
        raise Refusal(400, "a text of the body has half a character (a lone surrogate)") from None
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is not JSON") from None
    if not isinstance(data, dict):
        raise Refusal(400, "the body must be a JSON object")
    if body.count(b"[") + body.count(b"{") > MOST_DEPTH and _is_deep(data):
        raise Refusal(400, f"the body nests more than {MOST_DEPTH} deep")
    return data


def written(data: dict[str, Any]) -> bytes:
    """A request's object for llama.cpp. Raises Refusal for a number that JSON has no room for."""
    try:
        return json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise Refusal(400, "a number of the body is too large") from None


def _is_deep(data: Any) -> bool:
    level = [data]
    for _ in range(MOST_DEPTH):
        level = inner(level)
    return any(isinstance(each, (dict, list)) for each in level)


def inner(level: Iterable[Any]) -> list[Any]:
    """The values in the objects and lists of these, one level below them."""
    return [
        child
        for each in level
        if isinstance(each, (dict, list))
        for child in (each.values() if isinstance(each, dict) else each)
    ]


def _no_constant(name: str) -> float:
    raise ValueError(name)


def failure_at(status: int, text: bytes) -> int:
    """Where in llama.cpp's answer it says that a step or a grammar failed, and no model does; -1
    where it does not. Of a stream, text is whole events."""
    if STEP_FAILED not in text and GRAMMAR_FAILED not in text:
        return -1
    if status == 500:
        return 0
    at = 0
    for event in text.split(EVENT_END):
        is_failure = STEP_FAILED in event or GRAMMAR_FAILED in event
        if is_failure and event.startswith(ERROR_EVENTS):
            return at
        at += len(event) + len(EVENT_END)
    return -1


def grammar_failure(text: bytes) -> str | None:
    """The sentence with which a failed answer says that its grammar was given up; None where it
    failed otherwise. text: from where it says so."""
    at = text.find(GRAMMAR_FAILED)
    sentence = text[at:].partition(b": ")[2].partition(b'"')[0]
    return sentence.decode("utf-8", "replace") if at >= 0 else None


def message_of(part: bytes) -> str:
    """The sentence in an error of llama.cpp's."""
    try:
        return str(json.loads(part)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "the model cannot do that"


def error_event(route: str, error: bytes) -> bytes:
    """An error's JSON as an event of the stream that this path answers with."""
    head = b"event: error\n" if route == ANTHROPIC else b""
    return head + b"data: " + error + b"\n\n"


def has_costs(part: bytes, is_stream: bool, route: str) -> bool:
    """Whether costs belong into a part of an answer: its account, or all of one that has none."""
    if not is_stream and route in _WITHOUT_TIMINGS:
        return True
    return b'"timings"' in part or _SUMMARY.encode() in part


def with_costs(part: bytes, costs: dict[str, Any], is_stream: bool, route: str) -> bytes:
    """A part of an answer, with the costs beside llama.cpp's own figures in `timings`, or alone
    there where it never has any.

    It stays a text, since an answer may be megabytes and other clients would wait for its parsing.
    """
    ours = json.dumps(costs, ensure_ascii=False).encode()[1:-1]

    def add(text: bytes) -> bytes:
        has_none = _SUMMARY_TYPE.search(text) if is_stream else route in _WITHOUT_TIMINGS
        return _with_timings(text, ours) if has_none else _beside(text, ours)

    return _each(part, is_stream, add)


def _beside(text: bytes, ours: bytes) -> bytes:
    """Within a JSON string the name's quotes would have backslashes, so that this finds names."""
    return _TIMINGS.sub(lambda found: found[0] + ours + (b"" if found[1] else b","), text)


def _with_timings(text: bytes, ours: bytes) -> bytes:
    whole = text.rstrip()
    if not whole.endswith(b"}"):
        return text
    comma = b"" if whole[:-1].endswith(b"{") else b","
    return whole[:-1] + comma + b'"timings":{' + ours + b"}}" + text[len(whole) :]


def mapped(part: bytes, is_stream: bool, change: Callable[[Any], Any]) -> bytes:
    """A part of an answer with its JSON changed: all of it, or that of each event of a stream.

    Others wait meanwhile, in a thread as well, since Python's lock is held by one call of `json`.
    Whole answers are short enough for that: 240 KB with all probabilities that there is memory for
    take 12 ms, and a text of 131,072 tokens 5 ms.
    """
    return _each(part, is_stream, lambda text: _changed(text, change))


def _each(part: bytes, is_stream: bool, change: Callable[[bytes], bytes]) -> bytes:
    """A part of an answer with its texts of JSON changed: all of it, or that of each event."""
    if not is_stream:
        return change(part)
    mark = b"data: "
    return b"\n".join(
        mark + change(line[len(mark) :]) if line.startswith(mark + b"{") else line
        for line in part.split(b"\n")
    )


def _changed(text: bytes, change: Callable[[Any], Any]) -> bytes:
    try:
        data = json.loads(text)
    except ValueError:
        return text
    return json.dumps(change(data), ensure_ascii=False).encode()
