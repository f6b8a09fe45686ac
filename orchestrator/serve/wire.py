"""What goes over the wire: bodies that come in, errors that go out, and answers with their costs
in the form that a path's clients know."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
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
_NOTHING = b"data: null" + EVENT_END
# What the last event of a stream has, by the form of its path.
_LAST_EVENTS = (
    b"data: [DONE]",
    b"event: message_stop",
    b"event: response.completed",
    b"event: response.incomplete",
    b'"stop":true',
    *ERROR_EVENTS,
)
# Anthropic's form of requests. Its clients see an error in a stream by the event's name alone.
ANTHROPIC = "/v1/messages"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
# Names of the most tokens of an answer, in the order in which llama.cpp looks for them.
LIMITS = ("n_predict", "max_completion_tokens", "max_tokens")
# Its event with what an answer came to, which llama.cpp sends without `timings`.
_SUMMARY = "message_delta"
_SUMMARY_TYPE = re.compile(rb'"type": ?"message_delta"')
_TIMINGS = re.compile(rb'"timings": ?\{(?=(\})?)')
# Paths whose whole answers llama.cpp gives no `timings`. Elsewhere an answer has none where its
# client wants other fields alone (`response_fields`).
_WITHOUT_TIMINGS = (ANTHROPIC, RESPONSES)


class Refusal(Exception):
    """A request that is answered with a status and one sentence. more: fields of the error beside
    these, or in their place."""

    def __init__(self, status: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status, self.message, self.more = status, message, more

    def as_object(self) -> dict[str, Any]:
        """An error as the SDKs of OpenAI and Anthropic read it."""
        kind = KINDS.get(self.status, "server_error")
        error = {"code": self.status, "message": self.message, "type": kind, **self.more}
        return {"type": "error", "error": error}

    @property
    def headers(self) -> dict[str, str]:
        return {"retry-after": "1"} if self.status in (429, 503) else {}


STOPPING = Refusal(503, "the server is shutting down")


def is_ollama(path: str) -> bool:
    """Whether a path's clients are Ollama's."""
    return path.startswith("/api/")


def ollama_error(message: str) -> dict[str, Any]:
    """An error as Ollama's clients read it."""
    return {"error": message}


def beyond_context(what: str, n_tokens: int, n_ctx: int) -> Refusal:
    """What llama.cpp says of a prompt that a context of n_ctx tokens has no room for. n_tokens: at
    least so many it has."""
    return Refusal(
        400,
        f"{what} exceed{'' if what.endswith('messages') else 's'} the available context size, "
        f"{n_ctx} tokens (--ctx)",
        type="exceed_context_size_error",
        n_prompt_tokens=n_tokens,
        n_ctx=n_ctx,
    )


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
        data = json.loads(body.decode("utf-8-sig"), parse_constant=_no_constant)
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
    if body.count(b"[") + body.count(b"{") > MOST_DEPTH:
        deepest = next(islice(levels([data]), MOST_DEPTH, None), [])
        if any(isinstance(each, (dict, list)) for each in deepest):
            raise Refusal(400, f"the body nests more than {MOST_DEPTH} deep")
    return data


def written(data: dict[str, Any]) -> bytes:
    """A request's object for llama.cpp. Raises Refusal for a number that JSON has no room for."""
    try:
        return json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise Refusal(400, "a number of the body is too large") from None


def levels(values: list[Any]) -> Iterator[list[Any]]:
    """These values, then those in their objects and lists, and so on, level by level."""
    while values:
        yield values
        values = [
            child
            for each in values
            if isinstance(each, (dict, list))
            for child in (each.values() if isinstance(each, dict) else each)
        ]


def _no_constant(name: str) -> float:
    raise ValueError(name)


def without_nothing(events: bytes) -> bytes:
    """Return a stream's events without those that say nothing, `data: null`. llama.cpp sends them
    between the answers to several prompts."""
    if not events.startswith(_NOTHING) and EVENT_END + _NOTHING not in events:
        return events
    kept = [each for each in events.split(EVENT_END) if each + EVENT_END != _NOTHING]
    return EVENT_END.join(kept)


def is_whole(last: bytes, is_stream: bool) -> bool:
    """Whether an answer is complete. last: its last part that was not empty."""
    return bool(last) and (not is_stream or any(mark in last for mark in _LAST_EVENTS))


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


def progress_of(events: bytes) -> bytes:
    """Return the last of some events if it reports how much of a prompt is read, else nothing.

    Only streams whose events are all of one kind (chat and completions) get such reports repeated.
    """
    last = events.removesuffix(EVENT_END).rpartition(EVENT_END)[2]
    reports = last.startswith(b"data: {") and b'"prompt_progress"' in last
    return last + EVENT_END if reports else b""


def with_progress(event: bytes, n_tokens: float) -> bytes:
    """Return the event of progress_of with n_tokens more of the prompt read, at most all of it."""

    def change(data: Any) -> Any:
        progress = data["prompt_progress"]
        read = progress["processed"] + int(n_tokens)
        return {**data, "prompt_progress": {**progress, "processed": min(progress["total"], read)}}

    return mapped(event, True, change)


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
    there where it never has any. Without costs it stays as it is.

    It stays a text, since an answer may be megabytes and other clients would wait for its parsing.
    """
    if not costs:
        return part
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


def limit_of(data: dict[str, Any]) -> int | None:
    """The most tokens that a request asks for, as llama.cpp reads it; None for all there are."""
    for name in LIMITS:
        if name in data:
            limit = int(data[name])
            return None if limit < 0 else limit
    return None


class Shaping:
    """What is changed in the answer to one request, whose fields are as the client sent them."""

    def __init__(self, route: str, data: dict[str, Any]) -> None:
        self._route = route
        self._stops = data.get("stop_sequences") or ()
        asked = data.get("logprobs")
        self._only_chosen = route == CHAT and bool(asked) and not data.get("top_logprobs")
        self._n_logprobs = asked if route == COMPLETIONS else None
        self._at: dict[int, int] = {}  # characters of each answer so far
        self.has_no_tokens = route != CHAT and limit_of(data) == 0
        self.is_needed = (
            route == ANTHROPIC
            or self._only_chosen
            or self._n_logprobs is not None
            or self.has_no_tokens
        )

    def shape(self, part: bytes, is_stream: bool) -> bytes:
        """A part of the answer: all of it, or whole events of a stream."""
        return mapped(part, is_stream, self._change)

    def _change(self, data: Any) -> Any:
        answers = data if isinstance(data, list) else [data]
        for answer in answers:
            if not isinstance(answer, dict):
                continue
            if self.has_no_tokens:
                _empty(answer)
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
    """The probabilities of an answer's tokens as OpenAI's plain completion has them. begin: how
    many characters of the answer came before."""
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
    """Takes the one token out of an answer that was to have none."""
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


def _stopped(answer: Any, stops: Any) -> None:
    """Says of one of Anthropic's answers that a sequence of the client's ended it; llama.cpp also
    names those of the chat template."""
    if not isinstance(answer, dict) or "stop_sequence" not in answer:
        return
    if answer["stop_sequence"] not in stops:
        answer["stop_sequence"] = None
    elif answer.get("stop_reason") == "end_turn":
        answer["stop_reason"] = "stop_sequence"


def anthropic_error(data: Any) -> Any:
    """An error of llama.cpp's, as Anthropic's clients know errors: within an object of its own."""
    if isinstance(data, dict) and "type" not in data and isinstance(data.get("error"), dict):
        return {"type": "error", **data}
    if isinstance(data, dict) and "message" in data and "code" in data:
        return {"type": "error", "error": data}
    return data
