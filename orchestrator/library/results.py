"""The results of an `LLM`: small records of answers, scores and the resolved plan."""

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
    """A call of a function (tool) that the model asks for.

    `name` is the function's name, and `arguments` maps the names of its parameters to values.
    Repeat `id` in the message with the function's result.
    """

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ChatAnswer:
    """The answer of a model to a conversation.

    `text` is the answer, or "" if the model only calls tools. `reasoning` is the text of a
    reasoning model before its answer. `finish_reason` is "stop", "length" or "tool_calls". `tokens`
    and `prompt_tokens` are the numbers of tokens in the answer and the prompt. `openai` is the same
    answer in OpenAI's format, as the server returns it.
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
        """The answer as a message in OpenAI's format, to append to the conversation."""
        return dict(self.openai["choices"][0]["message"])

    @classmethod
    def of(cls, found: dict[str, Any]) -> ChatAnswer:
        """Create a ChatAnswer from a chat completion in OpenAI's format."""
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
    """The text with which a model continues a prompt.

    `finish_reason` is "stop" or "length". `tokens` and `prompt_tokens` are the numbers of tokens in
    the text and the prompt. `openai` is the same answer in OpenAI's format, as the server returns
    it.
    """

    text: str
    finish_reason: str
    tokens: int
    prompt_tokens: int
    openai: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, found: dict[str, Any]) -> Completion:
        """Create a Completion from a completion in OpenAI's format."""
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

    `text` and `reasoning` are the new pieces of the answer and of the reasoning before it.
    `finish_reason` is None before the last part. `openai` is the part in OpenAI's format, as the
    server sends it. Pieces of tool calls are only in `openai`.
    """

    text: str
    reasoning: str
    finish_reason: str | None
    openai: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, found: dict[str, Any]) -> Chunk:
        """Create a Chunk from a part of a streamed chat or completion in OpenAI's format."""
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

    `tokens` are the token ids, and `texts` their texts. `logprobs` has the log-probability of each
    token, given all tokens before it. The first value is nan if the model read no token, such as
    BOS, before the text.
    """

    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        """The log-probability of the whole text in nats, which is the sum over its tokens."""
        return math.fsum(each for each in self.logprobs if not math.isnan(each))

    @property
    def perplexity(self) -> float:
        """The perplexity of the text; nan if no token has a log-probability."""
        n = sum(not math.isnan(each) for each in self.logprobs)
        return math.exp(-self.total / n) if n else math.nan


@dataclass(frozen=True)
class PlanSummary:
    """The settings and memory sizes that were chosen when a model was loaded.

    `mode` is the status line. `policy` is "plain" if llama.cpp runs without expert management.
    `tiers` are the precisions, best first. `n_ctx` is the context length and `n_ubatch` the
    micro-batch size in tokens. `ram_bytes` is the memory limit, with the parts `dense_bytes`,
    `kv_bytes`, `scratch_bytes` and `expert_bytes` (experts in memory). `settings` are those of the
    policy.
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
    def of(cls, runtime: Runtime) -> PlanSummary:
        """Create a PlanSummary from a runtime that has loaded a model."""
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
