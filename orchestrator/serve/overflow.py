"""Drops the oldest exchanges of a client's conversation that outgrows the context."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from orchestrator.runtime.overflow import Author, author_of, shortened
from orchestrator.serve.admission import Body
from orchestrator.serve.schemas import COUNTED_BY
from orchestrator.serve.served import Served
from orchestrator.serve.settings import DROP, REFUSE
from orchestrator.serve.wire import ANTHROPIC, RESPONSES, limit_of, written

# Fields that change how the chat template writes messages, and fields that become part of the
# prompt themselves.
_TEMPLATE = ("chat_template_kwargs", "reasoning_effort", "reasoning", "thinking")
_HEAD = (
    *_TEMPLATE,
    *("system", "instructions", "tools", "tool_choice", "parallel_tool_calls"),
    *("response_format", "json_schema"),
)
# OpenAI's field for the same choice in its responses.
_TRUNCATION = {"auto": DROP, "disabled": REFUSE}


def drop_oldest(
    route: str, data: dict[str, Any], served: Served, asker: Body, setting: str | None
) -> int:
    """Remove the oldest exchanges from a conversation that is too long for the context.

    An exchange is a question and everything up to the next question. Returns the number of removed
    messages.

    `data` is the request to the path `route`, checked by `settle_request`. It is changed in place.
    `setting` is the value of --overflow. If it is None, the field `overflow` of the request decides
    whether messages may be removed. `asker` sends queries to llama.cpp's server, which counts
    tokens. Call this on a thread, because it waits for these queries.
    """
    wish = _TRUNCATION.get(data.pop("truncation", ""), data.pop("overflow", REFUSE))
    name = "input" if route == RESPONSES else "messages"
    messages = data.get(name)
    if (setting or wish) != DROP or not isinstance(messages, list):
        return 0

    def ask(request: bytes) -> int | None:
        status, answer = asker.ask(served.runtime, COUNTED_BY[route], request)
        return int(json.loads(answer)["input_tokens"]) if status == 200 else None

    def count(said: list[Any], is_head: bool) -> int | None:
        fields = {each: data[each] for each in (_HEAD if is_head else _TEMPLATE) if each in data}
        return served.lengths.of(written({**fields, name: said}), ask)

    n_ctx, limit = served.about.n_ctx, limit_of(data)
    if route == RESPONSES:
        limit = limit_of({"max_tokens": data.get("max_output_tokens", -1)})
    n_answer = (served.max_tokens or n_ctx) if limit is None else limit
    data[name] = kept = shortened(messages, len(written(data)), count, n_ctx, n_answer)
    return _n_of_client(route, messages) - _n_of_client(route, kept)


def _n_of_client(route: str, messages: list[Any]) -> int:
    """Return how many messages of a client these messages are.

    settle_messages divides a message with results of tools and a text into two messages.
    """
    if route != ANTHROPIC:
        return len(messages)
    pairs = list(pairwise(map(author_of, messages)))
    return len(messages) - pairs.count((Author.TOOL, Author.USER))
