"""Ollama's API: translates its requests to OpenAI's format, and the answers back to lines of JSON.

The format is that of `docs/api.md` in Ollama's repository.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from time import monotonic_ns
from typing import Any

from starlette.types import Send

from orchestrator.runtime.images import image_part
from orchestrator.serve.answer import STREAM, Outlet
from orchestrator.serve.requests import settle_fields
from orchestrator.serve.schemas import JSON, LINES, OLLAMA
from orchestrator.serve.served import Served
from orchestrator.serve.settings import DROP, REFUSE
from orchestrator.serve.wire import (
    CHAT,
    COMPLETIONS,
    DROPPED,
    OLLAMA_CHAT,
    Refusal,
    message_of,
    ollama_error,
)

# The Ollama version whose API this is. Clients check that it is new enough.
VERSION = "0.6.4"
# Ollama unloads idle models; this server keeps its model loaded.
NEVER = "9999-12-31T23:59:59Z"


class OllamaRequest:
    """Translates a request to Ollama's `/api/chat` or `/api/generate` into OpenAI's format.

    `route` and `data` are the translated request. `has_prompt` is False if the client only wants
    the model to be loaded.
    """

    def __init__(self, route: str, data: dict[str, Any], n_ctx: int) -> None:
        """Translate the request `data` to the path `route`.

        Parts of `data` are reused in the new request. `n_ctx` is the context length in tokens.
        Raises Refusal (an error response) for a request that cannot be served.
        """
        settle_fields(route, data, n_ctx)
        self._is_chat, self._model = route == OLLAMA_CHAT, data.get("model", "")
        self.route = COMPLETIONS if data.get("raw") else CHAT
        self.has_prompt = bool(data.get("messages" if self._is_chat else "prompt"))
        images = [] if self._is_chat else data.get("images", [])
        if images and self.route == COMPLETIONS:
            raise Refusal(400, "images need the chat template: leave out the field raw")
        self.data = {"model": self._model, "stream": data.get("stream", True)}
        for name in ("tools", "moe_edge"):
            if name in data:
                self.data[name] = data[name]
        if self.route == COMPLETIONS:
            self.data["prompt"] = data.get("prompt", "")
        else:
            said, system = data.get("messages", []), data.get("system")
            if not self._is_chat:
                said = [{"role": "system", "content": system}] if system else []
                user = {"role": "user", "content": data.get("prompt", ""), "images": images}
                said.append(user)
            self.data["messages"] = list(_translated(said))
            self.data["overflow"] = DROP if data.get("truncate", True) else REFUSE
            think = data.get("think")
            if isinstance(think, bool):
                self.data["chat_template_kwargs"] = {"enable_thinking": think}
            elif think is not None:
                self.data["reasoning_effort"] = think
        options = data.get("options", {})
        for name in OLLAMA["options"]["properties"].keys() & options.keys():
            if options[name] is not None:
                self.data[name] = options[name]
        limit = self.data.pop("num_predict", -1)
        if limit == 0:
            raise Refusal(
                400,
                f"options.num_predict is {limit}: give a number from 1, or below 0 for no limit",
            )
        if limit > 0:
            self.data["max_tokens"] = limit
        form = data.get("format")
        if form == "json":
            self.data["response_format"] = {"type": "json_object"}
        elif form:
            schema = {"name": "format", "schema": form}
            self.data["response_format"] = {"type": "json_schema", "json_schema": schema}

    def line(self, text: str = "", **more: Any) -> dict[str, Any]:
        """Return one JSON line of the answer, with a piece of its text.

        `more` holds further fields of the line or of its message.
        """
        inside = ("thinking", "tool_calls")
        said: dict[str, Any] = {name: more.pop(name) for name in inside if name in more}
        if self._is_chat:
            said = {"message": {"role": "assistant", "content": text, **said}}
        else:
            said["response"] = text
        now = datetime.now(timezone.utc).isoformat()
        return {"model": self._model, "created_at": now, **said, **more}

    def loaded(self) -> dict[str, Any]:
        """Return the answer to a request without a prompt, which says that the model is loaded."""
        return self.line(done=True, done_reason="load")


def _translated(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield Ollama's messages in OpenAI's format, in which a tool result needs the id of its call.

    A result belongs to the call with its `tool_call_id`. A result without an id belongs to the
    first unanswered call of its function (`tool_name`), otherwise to the first unanswered call.
    Images come before the text of their message, as in Ollama.
    """
    n_calls, waiting = 0, dict[str, str]()  # unanswered calls: {id: function name}
    for each in messages:
        made = {"role": each["role"], "content": each.get("content") or ""}
        if each.get("images"):
            text = [{"type": "text", "text": made["content"]}] if made["content"] else []
            made["content"] = [*map(image_part, each["images"]), *text]
        if each.get("thinking"):
            made["reasoning_content"] = each["thinking"]
        if each.get("tool_calls"):
            made["tool_calls"], waiting = [], {}
            for call in each["tool_calls"]:
                function, id = call["function"], call.get("id") or f"call_{n_calls}"
                name, arguments = function["name"], function.get("arguments")
                named = {"name": name, "arguments": arguments}
                made["tool_calls"].append({"id": id, "type": "function", "function": named})
                waiting[id] = name
                n_calls += 1
        if each["role"] == "tool":
            id, name = each.get("tool_call_id") or "", each.get("tool_name") or ""
            if not id:
                of_name = (one for one, called in waiting.items() if called == name)
                id = next(of_name, "") or next(iter(waiting), "")
            name = waiting.pop(id, name)
            made |= {"tool_call_id": id, "name": name} if name else {"tool_call_id": id}
        yield made


def _line(data: dict[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False).encode() + b"\n"


class Lines(Outlet):
    """Converts an answer from OpenAI's format to Ollama's lines of JSON, and sends it."""

    def __init__(self, send: Send, request: OllamaRequest, n_dropped: int) -> None:
        """Prepare the answer to a request from which n_dropped messages were dropped."""
        super().__init__(send, request.route)
        self._request, self._began_ns = request, monotonic_ns()
        self._n_dropped = n_dropped
        self._is_stream = False
        self._rest = b""
        self._calls: dict[int, dict[str, str]] = {}
        self._reason = "stop"
        self._timings: dict[str, Any] = {}

    async def begin(
        self, status: int, content_type: str, more: dict[str, str] | None = None
    ) -> None:
        """Send the HTTP status and the headers of an answer in Ollama's format.

        `content_type` is the media type that the answer has in OpenAI's format. For a stream,
        Ollama's media type for lines of JSON is sent instead. `more` holds further header fields.
        """
        self._is_stream = content_type == STREAM
        await super().begin(status, LINES if self._is_stream else content_type, more)

    async def part(self, data: bytes, more: bool = True) -> None:
        """Convert a part of an answer from OpenAI's format to Ollama's JSON lines, and send them.

        `data` is the part in OpenAI's format. `more` is False for the last part. If `data` ends
        inside an event of a stream, the incomplete event is kept for the next call. An answer that
        is not a stream is kept until its last part.
        """
        self._rest += data
        made: list[dict[str, Any]] = []
        if self._is_stream:
            *events, self._rest = self._rest.split(b"\n")
            for event in events:
                if event.startswith(b"data: "):
                    made += self._lines(event[len(b"data: ") :])
        elif not more and self._rest:
            made = [self._whole(self._rest)]
        text = b"".join(map(_line, made))
        if text or not more:
            await super().part(text, more)

    async def ping(self) -> None:
        """Send the HTTP headers to a waiting client, if they have not been sent yet.

        Later calls do nothing, because Ollama's format has no keep-alive message.
        """
        if self.status is None:
            await self.begin(200, STREAM)

    async def fail(self, refusal: Refusal) -> None:
        """End the response with an error in Ollama's format."""
        if self.status is None:
            await self.begin(refusal.status, JSON, refusal.headers)
        await super().part(_line(ollama_error(refusal.message)), more=False)

    def _lines(self, event: bytes) -> Iterator[dict[str, Any]]:
        if event == b"[DONE]":
            yield self._last(self._called())
            return
        data = json.loads(event)
        if "error" in data:
            yield ollama_error(message_of(event))
        for choice in data.get("choices", ()):
            text, more = self._said(choice, choice.get("delta", {}))
            if text or more:
                yield self._request.line(text, done=False, **more)
        self._timings = data.get("timings", self._timings)

    def _whole(self, text: bytes) -> dict[str, Any]:
        data = json.loads(text)
        if "choices" not in data:
            return ollama_error(message_of(text))
        (choice,) = data["choices"]
        said, more = self._said(choice, choice.get("message", {}))
        self._timings = data.get("timings", {})
        return self._last(self._called() | more, said)

    def _said(self, choice: dict[str, Any], inside: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the text and reasoning of an answer, as (text, {"thinking": text} or {}).

        `choice` is a choice of OpenAI's format. `inside` is its message, or its delta in a stream.
        """
        self._reason = choice.get("finish_reason") or self._reason
        self._call(inside.get("tool_calls"))
        thought = inside.get("reasoning_content")
        text = inside.get("content") or choice.get("text") or ""
        return text, {"thinking": thought} if thought else {}

    def _call(self, deltas: list[dict[str, Any]] | None) -> None:
        """Collect tool calls until the end of the answer. In a stream they arrive in pieces."""
        for place, each in enumerate(deltas or ()):
            known = self._calls.setdefault(each.get("index", place), {"name": "", "arguments": ""})
            for name in known:
                known[name] += each["function"].get(name) or ""

    def _called(self) -> dict[str, Any]:
        """Return the complete tool calls that were collected, as {"tool_calls": list} or {}."""
        made = []
        for call in self._calls.values():
            try:
                arguments = json.loads(call["arguments"] or "{}")
            except ValueError:
                continue  # the answer was cut off inside this call
            made.append({"function": {"name": call["name"], "arguments": arguments}})
        return {"tool_calls": made} if made else {}

    def _last(self, more: dict[str, Any], text: str = "") -> dict[str, Any]:
        timings = self._timings
        costs = {
            "total_duration": monotonic_ns() - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": timings.get("prompt_n", 0) + timings.get("cache_n", 0),
            "prompt_eval_duration": int(1e6 * timings.get("prompt_ms", 0)),
            "eval_count": timings.get("predicted_n", 0),
            "eval_duration": int(1e6 * timings.get("predicted_ms", 0)),
            **({DROPPED: self._n_dropped} if self._n_dropped else {}),
            "timings": timings,
        }
        reason = "length" if self._reason == "length" else "stop"
        return self._request.line(text, done=True, done_reason=reason, **more, **costs)


def _time(seconds: float) -> str:
    """Return a Unix time in Ollama's text format (ISO 8601)."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()


def _details(model: dict[str, Any], served: Served) -> dict[str, Any]:
    meta = model["meta"]
    return {
        "parent_model": "",
        "format": "gguf",
        "family": served.about.architecture,
        "families": [served.about.architecture],
        "parameter_size": f"{meta['n_params'] / 1e9:.1f}B",
        "quantization_level": meta["ftype"],
    }


def _named(model: dict[str, Any], served: Served) -> dict[str, Any]:
    """Return the fields of a model that `/api/tags` and `/api/ps` have in common.

    `model` is the model's entry in OpenAI's model list. The digest identifies the file, but is not
    a hash of all its bytes, because reading them would take minutes.
    """
    return {
        "name": model["id"],
        "model": model["id"],
        "size": model["meta"]["size"],
        "digest": served.about.digest,
        "details": _details(model, served),
    }


def capabilities(served: Served) -> list[str]:
    """Return what the loaded model can do, in Ollama's words."""
    return ["completion", "tools", *(["vision"] if served.images is not None else [])]


def listed(model: dict[str, Any], served: Served) -> dict[str, Any]:
    """Return the loaded model as an entry of Ollama's `/api/tags`.

    `model` is the model's entry in OpenAI's model list.
    """
    return {**_named(model, served), "modified_at": _time(served.about.modified_s)}


def running(model: dict[str, Any], served: Served) -> dict[str, Any]:
    """Return the loaded model as an entry of Ollama's `/api/ps`.

    `model` is the model's entry in OpenAI's model list.
    """
    return {
        **_named(model, served),
        "expires_at": NEVER,
        "size_vram": served.runtime.stats().device_bytes,
        "context_length": served.about.n_ctx,
    }


def shown(model: dict[str, Any], served: Served, template: str) -> dict[str, Any]:
    """Return the answer of Ollama's `/api/show`, with details of the loaded model.

    `model` is the model's entry in OpenAI's model list. `template` is its chat template.
    """
    architecture = served.about.architecture
    return {
        "template": template,
        "modified_at": _time(served.about.modified_s),
        "details": _details(model, served),
        "model_info": {
            "general.architecture": architecture,
            "general.parameter_count": model["meta"]["n_params"],
            f"{architecture}.context_length": served.about.n_ctx,
        },
        "capabilities": capabilities(served),
    }
