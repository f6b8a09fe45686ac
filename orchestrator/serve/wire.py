"""The wire formats: reads bodies, writes errors, and adds costs to llama.cpp's answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from starlette.requests import ClientDisconnect, Request

from gguf_tools.units import format_size
from orchestrator.runtime.images import TEXT_ONLY

# OpenAI's error type for each HTTP status.
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
# llama.cpp's message for a step that failed. The store knows the cause.
STEP_FAILED = b"Compute error."
# The beginning of the message if a grammar was given up during an answer (moe-edge-grammar.cpp).
GRAMMAR_FAILED = b"got exception: the grammar "
# llama.cpp's status for a feature that the model does not support.
NOT_SUPPORTED = 501
# The deepest nesting of a request. _HALVES finds escapes of surrogates.
MOST_DEPTH = 100
_HALVES = re.compile(rb"\\u[dD][89a-fA-F]")
# A run of characters that is as long as an image in base64. Images are limited apart from the rest
# of a body, which takes many times its length in memory.
_LONG_RUN = re.compile(rb"[A-Za-z0-9+/=\\]{1024,}")
_LONE_SURROGATE = "a text of the body has a lone surrogate (half a character)"
ERROR_EVENTS = (b'data: {"error"', b"event: error")
EVENT_END = b"\n\n"
_EMPTY_EVENT = b"data: null" + EVENT_END
# Marks of a stream's last event, in the formats of the different paths.
_LAST_EVENTS = (
    b"data: [DONE]",
    b"event: message_stop",
    b"event: response.completed",
    b"event: response.incomplete",
    b'"stop":true',
    *ERROR_EVENTS,
)
# Anthropic's path. Its clients detect an error in a stream only by the name of the event.
ANTHROPIC = "/v1/messages"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
# Names of the limit on generated tokens, in llama.cpp's order of precedence.
LIMITS = ("n_predict", "max_completion_tokens", "max_tokens")
# Field of an answer's usage, or of Ollama's last line: the number of dropped messages.
DROPPED = "dropped_messages"
# Anthropic's event with the usage of an answer. llama.cpp sends it without `timings`.
_SUMMARY = "message_delta"
_SUMMARY_TYPE = re.compile(rb'"type": ?"message_delta"')
_TIMINGS = re.compile(rb'"timings": ?\{(?=(\})?)')
# Paths on which llama.cpp's complete answers have no `timings`. On other paths `timings` is only
# missing if the client selected other fields (`response_fields`).
_WITHOUT_TIMINGS = (ANTHROPIC, RESPONSES)


class Refusal(Exception):
    """An error response to a client: an HTTP status and a message of one sentence.

    `more` holds further fields of the JSON error. They override the standard fields.
    """

    def __init__(self, status: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status, self.message, self.more = status, message, more

    def as_object(self) -> dict[str, Any]:
        """Return the error as JSON in the format that the SDKs of OpenAI and Anthropic read."""
        kind = KINDS.get(self.status, "server_error")
        error = {"code": self.status, "message": self.message, "type": kind, **self.more}
        return {"type": "error", "error": error}

    @property
    def headers(self) -> dict[str, str]:
        """Header fields of the error response. Overload errors say when to try again."""
        return {"retry-after": "1"} if self.status in (429, 503) else {}


STOPPING = Refusal(503, "the server is shutting down")


def is_ollama(path: str) -> bool:
    """Return whether a path of the server belongs to Ollama's API."""
    return path.startswith("/api/")


def ollama_error(message: str) -> dict[str, Any]:
    """Return an error message as JSON in the format that Ollama's clients read."""
    return {"error": message}


def beyond_context(what: str, n_tokens: int, n_ctx: int) -> Refusal:
    """Return llama.cpp's error response for a prompt that does not fit in the context.

    The message begins with `what`, such as "the prompt of 9000 tokens". n_tokens is the length of
    the prompt, or a lower bound of it. n_ctx is the length of the context.
    """
    exceeds = "exceed" if what.endswith("messages") else "exceeds"
    return Refusal(
        400,
        f"{what} {exceeds} the available context size, {n_ctx} tokens (--ctx)",
        type="exceed_context_size_error",
        n_prompt_tokens=n_tokens,
        n_ctx=n_ctx,
    )


async def read_body(
    request: Request, most_bytes: int, remedy: str, count: Callable[[int], None]
) -> bytes:
    """Read the whole body of a request from its client, and return it.

    `count` is called after each piece, with the number of bytes so far. Raises Refusal (an error
    response) as soon as the body or its declared length exceeds most_bytes. The error ends with
    `remedy`.
    """
    body, said = bytearray(), request.headers.get("content-length", "")
    try:
        if said.isascii() and said.isdigit() and (len(said) > 18 or int(said) > most_bytes):
            raise _too_long(most_bytes, remedy)
        async for chunk in request.stream():
            count(len(body) + len(chunk))
            body += chunk
            if len(body) > most_bytes:
                raise _too_long(most_bytes, remedy)
    except ClientDisconnect:
        raise Refusal(400, "the connection closed before the whole request arrived") from None
    return bytes(body)


def check_text(body: bytes, most_bytes: int) -> None:
    """Raise Refusal (an error response) if the text in a request's body is longer than most_bytes.

    The text is the body without its images. The body need not be parsed for this check: each run of
    at least 1024 base64 characters counts as an image.
    """
    if len(body) > most_bytes:
        n_runs = sum(found.end() - found.start() for found in _LONG_RUN.finditer(body))
        if len(body) - n_runs > most_bytes:
            raise too_long_text(most_bytes)


def too_long_text(most_bytes: int) -> Refusal:
    """Return the error response to a request with more than most_bytes of text.

    The text of a request is its body without the images.
    """
    return Refusal(
        413,
        f"the request without its images is longer than {format_size(most_bytes)}, the limit for "
        f"this --ctx: send less text, or start the server with a larger --ctx",
    )


def _too_long(most_bytes: int, remedy: str) -> Refusal:
    return Refusal(
        413, f"the request is longer than {format_size(most_bytes)} (--body-limit){remedy}"
    )


def body_remedy(most_bytes: int, useful_bytes: int, takes_images: bool) -> str:
    """Return the end of the error for a request body that is longer than most_bytes.

    - useful_bytes: the length of the longest body whose prompt fits in the model's context. If it
      is larger than most_bytes, the text suggests it as --body-limit.
    - takes_images: whether the model takes images. If not, the text names the option for them.
    """
    remedy = ""
    if useful_bytes > most_bytes:
        useful = format_size(useful_bytes).replace(" ", "")
        remedy = f": send less, or start the server with --body-limit {useful}"
    return remedy if takes_images else f"{remedy}; {TEXT_ONLY}"


def read_object(body: bytes) -> dict[str, Any]:
    """Parse the body of a request as a JSON object.

    Raises Refusal (an error response) for anything else, for nesting deeper than MOST_DEPTH, and
    for lone surrogates.
    """
    try:
        data = json.loads(body.decode("utf-8-sig"), parse_constant=_no_constant)
        if _HALVES.search(body):
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise Refusal(400, "the body is not UTF-8") from None
    except UnicodeEncodeError:
        raise Refusal(400, _LONE_SURROGATE) from None
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is not JSON") from None
    if not isinstance(data, dict):
        raise Refusal(400, "the body must be a JSON object")
    if body.count(b"[") + body.count(b"{") > MOST_DEPTH:
        deepest = next(islice(levels([data]), MOST_DEPTH, None), [])
        if any(isinstance(each, (dict, list)) for each in deepest):
            raise Refusal(400, f"the body is nested more than {MOST_DEPTH} levels deep")
    return data


def written(data: dict[str, Any]) -> bytes:
    """Return a request as JSON text for llama.cpp.

    Raises Refusal (an error response) for infinite numbers and lone surrogates, which JSON does not
    have.
    """
    try:
        return json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise Refusal(400, _LONE_SURROGATE) from None
    except ValueError:
        raise Refusal(400, "a number in the body is too large for JSON") from None


def length_of(body: bytes) -> int:
    """Return the length of a JSON text in bytes, with each escaped slash counted as one byte.

    PHP escapes all slashes, also those in the base64 text of images. Without this rule, an image
    from such a client would count as longer than it is.
    """
    return len(body) - body.count(b"\\/")


def levels(values: list[Any]) -> Iterator[list[Any]]:
    """Yield the values of a JSON tree level by level.

    The first list is `values` itself. Each further list holds the children of the objects and lists
    in the list before.
    """
    while values:
        yield values
        values = [
            child
            for each in values
            if isinstance(each, (dict, list))
            for child in (each.values() if isinstance(each, dict) else each)
        ]


def _no_constant(name: str) -> float:
    """Raise ValueError for NaN and Infinity, which Python's JSON parser would accept."""
    raise ValueError(name)


def without_empty_events(events: bytes) -> bytes:
    """Return a stream's events without the empty events (`data: null`).

    llama.cpp sends empty events between the answers to several prompts.
    """
    if not events.startswith(_EMPTY_EVENT) and EVENT_END + _EMPTY_EVENT not in events:
        return events
    kept = [each for each in events.split(EVENT_END) if each + EVENT_END != _EMPTY_EVENT]
    return EVENT_END.join(kept)


def is_whole(last: bytes, is_stream: bool) -> bool:
    """Return whether an answer is complete. `last` is the last part of it that is not empty.

    A stream is complete if `last` contains a final event or an error. Any other answer arrives in
    one piece, so it is complete if `last` is not empty.
    """
    return bool(last) and (not is_stream or any(mark in last for mark in _LAST_EVENTS))


def failure_at(status: int, text: bytes) -> int:
    """Return the offset in `text` at which llama.cpp reports that an answer failed, or -1.

    An answer fails if llama.cpp cannot evaluate its tokens, or cannot follow the grammar that the
    request gives. For other errors the result is -1. `text` is a complete answer with the HTTP
    status `status`, or whole events of a stream. Text that the model generated is never taken for
    such a report.
    """
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
    """Return why llama.cpp could not follow the grammar of an answer, or None for other failures.

    `text` is the end of llama.cpp's response to the request, from its error message on.
    """
    at = text.find(GRAMMAR_FAILED)
    sentence = text[at:].partition(b": ")[2].partition(b'"')[0]
    return sentence.decode("utf-8", "replace") if at >= 0 else None


def progress_of(events: bytes) -> bytes:
    """Return the last of a stream's events if it reports how much of the prompt is read.

    Returns b"" if the last event is of any other kind, even if an earlier event is such a report.
    In Anthropic's format, the result is always b"".
    """
    last = events.removesuffix(EVENT_END).rpartition(EVENT_END)[2]
    reports = last.startswith(b"data: {") and b'"prompt_progress"' in last
    return last + EVENT_END if reports else b""


def with_progress(event: bytes, n_tokens: float) -> bytes:
    """Return a progress event of a stream with n_tokens added to its number of processed tokens.

    The number of processed tokens never exceeds the length of the prompt.
    """

    def change(data: Any) -> Any:
        progress = data["prompt_progress"]
        read = progress["processed"] + int(n_tokens)
        return {**data, "prompt_progress": {**progress, "processed": min(progress["total"], read)}}

    return mapped(event, True, change)


def message_of(part: bytes) -> str:
    """Return the message in an error answer from llama.cpp."""
    try:
        return str(json.loads(part)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return (
            "llama.cpp failed on this request, and its error has no message: try again, or change "
            "the request"
        )


def error_event(route: str, error: bytes) -> bytes:
    """Return an error (JSON) as an event of a stream, in the format of the path `route`."""
    head = b"event: error\n" if route == ANTHROPIC else b""
    return head + b"data: " + error + b"\n\n"


def should_add_costs(part: bytes, is_stream: bool, route: str) -> bool:
    """Return whether `with_costs` should add the costs of an answer to this part of the answer.

    Costs are measurements, such as cache hits. `part` is a complete answer, or whole events of a
    stream. `route` is the path of the request. The result is True for these parts:

    - A part with llama.cpp's own measurements (`timings`).
    - A complete answer on the path of Anthropic's API or of OpenAI's responses API. llama.cpp sends
      no `timings` there.
    - A part of a stream with Anthropic's event `message_delta`. It has no `timings`, either.
    """
    if not is_stream and route in _WITHOUT_TIMINGS:
        return True
    return b'"timings"' in part or _SUMMARY.encode() in part


def with_costs(part: bytes, costs: dict[str, Any], is_stream: bool, route: str) -> bytes:
    """Return a part of an answer with the measurements `costs` added to its `timings`.

    `costs` has cache hits, bytes read and other measurements of the experts. A part without
    `timings` gets this field.
    """
    if not costs:
        return part
    ours = json.dumps(costs, ensure_ascii=False).encode()[1:-1]

    def add(text: bytes) -> bytes:
        has_none = _SUMMARY_TYPE.search(text) if is_stream else route in _WITHOUT_TIMINGS
        return _append_timings(text, ours) if has_none else _extend_timings(text, ours)

    return _each(part, is_stream, add)


def _extend_timings(text: bytes, ours: bytes) -> bytes:
    """Return JSON text with the measurements `ours` inserted at the start of each `timings` object.

    Only property names match, because the quotes of a name inside a JSON string would be escaped.
    """
    return _TIMINGS.sub(lambda found: found[0] + ours + (b"" if found[1] else b","), text)


def _append_timings(text: bytes, ours: bytes) -> bytes:
    """Return the JSON text of an object with a new property `timings`.

    The property holds the measurements `ours`.
    """
    whole = text.rstrip()
    if not whole.endswith(b"}"):
        return text
    comma = b"" if whole[:-1].endswith(b"{") else b","
    return whole[:-1] + comma + b'"timings":{' + ours + b"}}" + text[len(whole) :]


def mapped(part: bytes, is_stream: bool, change: Callable[[Any], Any]) -> bytes:
    """Return a part of an answer after applying `change` to its parsed JSON.

    `part` is a complete answer, or whole events of a stream. In a stream, `change` is applied to
    the JSON of each event.
    """
    return _each(part, is_stream, lambda text: _changed(text, change))


def _each(part: bytes, is_stream: bool, change: Callable[[bytes], bytes]) -> bytes:
    """Return a part of an answer after applying `change` to its JSON text.

    In a stream, `change` is applied to the text of each event.
    """
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


def limit_of(data: dict[str, Any]) -> int | None:
    """Return the limit of generated tokens in a request, or None if it has no limit.

    llama.cpp knows several names for this field, which are searched in its order of precedence.
    """
    for name in LIMITS:
        if name in data:
            limit = int(data[name])
            return None if limit < 0 else limit
    return None


class Shaping:
    """Converts llama.cpp's answers to the format that the client of one request expects."""

    def __init__(self, route: str, data: dict[str, Any], n_dropped: int = 0) -> None:
        """Choose the conversion for a request.

        `data` holds the fields of the request as the client sent them. n_dropped is the number of
        messages that were dropped from it (--overflow), which the usage of the answer reports.
        """
        self._route, self._n_dropped = route, n_dropped
        self._stops = data.get("stop_sequences") or ()
        asked = data.get("logprobs")
        self._only_chosen = route == CHAT and bool(asked) and not data.get("top_logprobs")
        self._n_logprobs = asked if route == COMPLETIONS else None
        self._at: dict[int, int] = {}  # {index of a choice: characters sent so far}
        self.has_no_tokens = route != CHAT and limit_of(data) == 0
        self.is_needed = (
            route == ANTHROPIC
            or self._only_chosen
            or self._n_logprobs is not None
            or self.has_no_tokens
            or n_dropped > 0
        )

    def shape(self, part: bytes, is_stream: bool) -> bytes:
        """Return a part of llama.cpp's answer in the format that the client expects.

        The part is the whole answer, or whole events of a stream.
        """
        return mapped(part, is_stream, self._change)

    def _change(self, data: Any) -> Any:
        answers = data if isinstance(data, list) else [data]
        for answer in answers:
            if not isinstance(answer, dict):
                continue
            if self.has_no_tokens:
                _empty(answer)
            if self._n_dropped:
                _add_dropped(answer, self._n_dropped)
            for choice in answer.get("choices") or ():
                self._change_choice(choice)
            if self._route == ANTHROPIC:
                _stopped(answer, self._stops)
                _stopped(answer.get("delta"), self._stops)
        return anthropic_error(data) if self._route == ANTHROPIC else data

    def _change_choice(self, choice: dict[str, Any]) -> None:
        found = choice.get("logprobs")
        text = choice.get("text") or ""
        if isinstance(found, dict) and self._only_chosen:
            for token in found.get("content") or ():
                token["top_logprobs"] = []
        elif isinstance(found, dict) and self._n_logprobs is not None:
            number = choice.get("index", 0)
            begin = self._at.get(number, 0)
            choice["logprobs"] = completion_logprobs(
                found.get("content") or [], begin, bool(self._n_logprobs)
            )
            self._at[number] = begin + len(text)


def completion_logprobs(tokens: list[dict[str, Any]], begin: int, with_top: bool) -> dict[str, Any]:
    """Return token probabilities in the format of OpenAI's completions.

    `tokens` has them in OpenAI's chat format. The answer has `begin` characters before these
    tokens. `with_top` tells whether to include the alternatives of each token.
    """
    offsets, at = [], begin
    for token in tokens:
        offsets.append(at)
        at += len(token["token"])
    tops = [
        {other["token"]: other["logprob"] for other in reversed(token["top_logprobs"])}
        for token in tokens
    ]
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": tops if with_top else None,
        "text_offset": offsets,
    }


def _empty(answer: dict[str, Any]) -> None:
    """Remove the generated token from an answer to a request with a limit of 0 tokens.

    llama.cpp reads the prompt only if it generates at least one token.
    """
    for choice in answer.get("choices") or ():
        choice["text"], choice["logprobs"] = "", None
        if choice.get("finish_reason") is not None:
            choice["finish_reason"] = "length"
    if "content" in answer:
        answer["content"], answer["tokens"] = "", []
        answer.pop("completion_probabilities", None)
        if "stop_type" in answer:
            answer["stop_type"], answer["stopping_word"] = "limit", ""
    if "tokens_predicted" in answer:
        answer["tokens_predicted"] = 0
    usage = answer.get("usage")
    if isinstance(usage, dict):
        usage["completion_tokens"], usage["total_tokens"] = 0, usage.get("prompt_tokens", 0)


def _add_dropped(answer: dict[str, Any], n_dropped: int) -> None:
    """Add the number of dropped messages to the usage in an answer or in an event of a stream.

    Some events contain the answer in the field `message` (Anthropic) or `response` (responses).
    """
    for each in (answer, answer.get("message"), answer.get("response")):
        if isinstance(each, dict) and isinstance(each.get("usage"), dict):
            each["usage"][DROPPED] = n_dropped


def _stopped(answer: Any, stops: Any) -> None:
    """Correct the stop reason in an answer of Anthropic's format, in place.

    Only the stop sequences of the client (`stops`) may be reported. llama.cpp also reports those of
    the chat template.
    """
    if not isinstance(answer, dict) or "stop_sequence" not in answer:
        return
    if answer["stop_sequence"] not in stops:
        answer["stop_sequence"] = None
    elif answer.get("stop_reason") == "end_turn":
        answer["stop_reason"] = "stop_sequence"


def anthropic_error(data: Any) -> Any:
    """Return an error from llama.cpp in the format that Anthropic's clients expect.

    Other data is returned unchanged.
    """
    if isinstance(data, dict) and "type" not in data and isinstance(data.get("error"), dict):
        return {"type": "error", **data}
    if isinstance(data, dict) and "message" in data and "code" in data:
        return {"type": "error", "error": data}
    return data
