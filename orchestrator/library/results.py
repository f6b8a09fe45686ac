"""What an `LLM` returns: small records of answers, scores and the resolved plan."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.runtime.runtime import Runtime
from orchestrator.serve.messages import whole_arguments


@dataclass(frozen=True)
class ToolCall:
    """A function that the model wants to be called.

    id: repeat it in the message with the function's result. arguments: by name.
    """

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ChatAnswer:
    """The answer to a chat.

    text: the answer; "" if the model only calls tools. reasoning: what a reasoning model thought
    before. finish_reason: "stop", "length" or "tool_calls". tokens, prompt_tokens: their numbers.
    openai: OpenAI's chat completion, as the server returns it.
    """

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    tokens: int
    prompt_tokens: int
    openai: dict[str, Any] = field(repr=False)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to append to the messages of the conversation."""
        return dict(self.openai["choices"][0]["message"])

    @classmethod
    def of(cls, found: dict[str, Any]) -> ChatAnswer:
        """Read OpenAI's chat completion."""
        choice, usage = found["choices"][0], found.get("usage", {})
        message = choice["message"]
        return cls(
            text=message.get("content") or "",
            reasoning=message.get("reasoning_content") or "",
            tool_calls=tuple(map(_tool_call, message.get("tool_calls") or ())),
            finish_reason=choice.get("finish_reason") or "",
            tokens=usage.get("completion_tokens", 0),
            prompt_tokens=usage.get("prompt_tokens", 0),
            openai=found,
        )


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    arguments = json.loads(whole_arguments(function.get("arguments")))
    return ToolCall(call.get("id") or "", function["name"], arguments)


@dataclass(frozen=True)
class Completion:
    """The continuation of a text. Its fields are those of ChatAnswer."""

    text: str
    finish_reason: str
    tokens: int
    prompt_tokens: int
    openai: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, found: dict[str, Any]) -> Completion:
        """Read OpenAI's completion."""
        choice, usage = found["choices"][0], found.get("usage", {})
        return cls(
            text=choice.get("text") or "",
            finish_reason=choice.get("finish_reason") or "",
            tokens=usage.get("completion_tokens", 0),
            prompt_tokens=usage.get("prompt_tokens", 0),
            openai=found,
        )


@dataclass(frozen=True)
class Chunk:
    """A part of a streamed answer.

    text, reasoning: what is new. finish_reason: None before the last part. openai: the chunk, as
    the server sends it. Parts of tool calls are only in `openai`.
    """

    text: str
    reasoning: str
    finish_reason: str | None
    openai: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, found: dict[str, Any]) -> Chunk:
        """Read a chunk of a chat or of a completion."""
        choice = (found.get("choices") or [{}])[0]
        delta = choice.get("delta", {})
        return cls(
            text=delta.get("content") or choice.get("text") or "",
            reasoning=delta.get("reasoning_content") or "",
            finish_reason=choice.get("finish_reason"),
            openai=found,
        )


@dataclass(frozen=True)
class Score:
    """Log-probabilities of the tokens of a text, in nats.

    tokens: their ids. texts: their texts. logprobs: one for each token, given all tokens before it;
    nan for a first token with none before it.
    """

    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        """The log-probability of the text: the sum over its tokens."""
        return math.fsum(each for each in self.logprobs if not math.isnan(each))

    @property
    def perplexity(self) -> float:
        """The perplexity of the text; nan if no token has a log-probability."""
        n = sum(not math.isnan(each) for each in self.logprobs)
        return math.exp(-self.total / n) if n else math.nan


@dataclass(frozen=True)
class ResolvedPlan:
    """What was resolved when the model was opened. Sizes are in bytes.

    mode: the status line of the command line. policy: its name; "plain" is llama.cpp's own path.
    tiers: precisions in use, best first. n_ctx: context of a conversation in tokens. n_ubatch:
    micro-batch in tokens. ram_bytes: the memory limit. dense_bytes, kv_bytes, scratch_bytes,
    expert_bytes: its parts, with expert_bytes for the experts in memory. settings: of the policy.
    """

    mode: str
    policy: str
    tiers: tuple[str, ...]
    n_ctx: int
    n_ubatch: int
    ram_bytes: int
    dense_bytes: int
    kv_bytes: int
    scratch_bytes: int
    expert_bytes: int
    settings: dict[str, Any]

    @classmethod
    def of(cls, runtime: Runtime) -> ResolvedPlan:
        """Describe what a runtime has loaded."""
        plan, about = runtime.inside.plan, runtime.about
        slots = plan.slots
        return cls(
            mode=runtime.mode,
            policy=about.policy,
            tiers=tuple(plan.versions),
            n_ctx=about.n_ctx,
            n_ubatch=plan.n_ubatch,
            ram_bytes=plan.ram_bytes,
            dense_bytes=plan.dense_bytes,
            kv_bytes=plan.kv_bytes,
            scratch_bytes=plan.scratch_bytes,
            expert_bytes=slots.total_bytes if slots else plan.expert_bytes,
            settings={} if about.settings is None else about.settings.as_dict(),
        )
