"""How long a prompt is, before the turn of its request has come."""

from __future__ import annotations

import json
from collections.abc import Callable

from orchestrator.serve.wire import ANTHROPIC, Refusal, message_of

# How long a prompt is, and the path to which the same request goes for an answer.
COUNTING = {
    "/v1/chat/completions/input_tokens": "/v1/chat/completions",
    "/v1/responses/input_tokens": "/v1/responses",
    "/v1/messages/count_tokens": ANTHROPIC,
}
_COUNTED_BY = {answering: counting for counting, answering in COUNTING.items()}

Ask = Callable[[str, bytes], tuple[int, bytes]]


def check_length(ask: Ask, route: str, body: bytes, most_tokens: int) -> None:
    """Raises Refusal for a prompt that a context of so many tokens has no room for, and for one
    that cannot be read at all.

    ask: (status, answer) of a request that decodes nothing. Prompts whose length no such request
    tells (several texts, gaps) pass, and are refused when their turn has come.
    """
    counting = _COUNTED_BY.get(route)
    prompt = json.loads(body).get("prompt")
    if counting is not None:
        status, answer = ask(counting, body)
        if status == 400:
            raise Refusal(400, message_of(answer))
        n_tokens = json.loads(answer)["input_tokens"] if status == 200 else 0
    elif isinstance(prompt, str):
        text = json.dumps({"content": prompt, "add_special": True, "parse_special": True})
        status, answer = ask("/tokenize", text.encode())
        n_tokens = len(json.loads(answer)["tokens"]) if status == 200 else 0
    else:
        is_tokens = isinstance(prompt, list) and all(isinstance(each, int) for each in prompt)
        n_tokens = len(prompt) if prompt and is_tokens else 0
    if n_tokens >= most_tokens:
        raise Refusal(
            400,
            f"the prompt of {n_tokens} tokens exceeds the available context size, {most_tokens} "
            f"tokens (--ctx)",
            "exceed_context_size_error",
        )
