"""Answers in the form that a path's clients know, where llama.cpp gives them another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.serve.requests import LIMITS
from orchestrator.serve.wire import ANTHROPIC, Refusal, mapped

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# What the tokens' probabilities of an answer take, for each alternative of each token: as long as
# the answer lasts, and while it is written whole, which a stream never is. Measured with 400 tokens
# of 21: 1.1 and 0.2 KiB, and twice as much where memory was fresh.
WHOLE_BYTES, STREAM_BYTES = 2048, 256
# What each answer may take for them.
PROBS_BYTES = 5 << 20

Shape = Callable[[bytes, bool], bytes]


def settle_probs(route: str, data: dict[str, Any], most_tokens: int) -> Shape | None:
    """Puts what a request asks of probabilities and of tokens into llama.cpp's words, and bounds
    both together. Returns what turns parts of its answer into the form of its path; None where they
    have it.

    llama.cpp keeps the answers to all prompts of a request until the last one is made, so that they
    share the memory. Further answers to a prompt (`n`) take a place each, and so have memory each.

    most_tokens: of an answer. Raises Refusal for more than an answer has memory for.
    """
    shaping = Shaping(route, data)
    name = {_CHAT: "top_logprobs", _COMPLETIONS: "logprobs"}.get(route, "n_probs")
    if route == _CHAT and data.get("logprobs") and not data.get(name):
        data[name] = 1  # llama.cpp says nothing of the chosen token without another one
    if route == _CHAT and not data.get("logprobs"):
        if data.get(name):
            raise Refusal(400, "top_logprobs needs logprobs to be true")
        data.pop(name, None)
    if route == _COMPLETIONS and data.get(name) == 0:
        data[name] = 1
    _bound(name, data, most_tokens)
    if shaping.has_no_tokens:
        _limit(data, 1)  # llama.cpp reads the prompt for no less
    return shaping.shape if shaping.is_needed else None


def _bound(name: str, data: dict[str, Any], most_tokens: int) -> None:
    n_probs = data.get(name, 0)
    if not n_probs:
        return
    each = (STREAM_BYTES if data.get("stream") else WHOLE_BYTES) * (2 if data.get("verbose") else 1)
    n_prompts = _prompts(data.get("prompt"))
    most = PROBS_BYTES // (each * n_prompts)  # tokens and alternatives of one answer
    room = most // (n_probs + 1)
    of = "an answer" if n_prompts == 1 else f"each of {n_prompts} answers"
    if room < 1:
        raise Refusal(400, f"{name} is {n_probs}: {of} has memory for {max(0, most - 1)}")
    limit = limit_of(data)
    if limit is None:
        if room < most_tokens:
            _limit(data, room)
    elif min(limit, most_tokens) > room:
        raise Refusal(
            400,
            f"{of} of {limit} tokens with {n_probs} alternatives each has no room in memory: "
            f"ask for {room} tokens or fewer alternatives"
            + ("" if data.get("stream") else ", or for a stream"),
        )


def _prompts(prompt: Any) -> int:
    """How many prompts llama.cpp takes a request's for: with a token in it, a list is one."""
    if not isinstance(prompt, list) or any(isinstance(each, int) for each in prompt):
        return 1
    return max(1, len(prompt))


def _limit(data: dict[str, Any], n_tokens: int) -> None:
    """Lets an answer have so many tokens, whatever the request says by any name."""
    for name in LIMITS:
        data.pop(name, None)
    data["max_tokens"] = n_tokens


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
        self._only_chosen = route == _CHAT and bool(asked) and not data.get("top_logprobs")
        self._n_logprobs = asked if route == _COMPLETIONS else None
        self._at: dict[int, int] = {}  # characters of each answer so far
        self.has_no_tokens = route != _CHAT and limit_of(data) == 0
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
