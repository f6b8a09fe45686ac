"""The input of the memory planner.

It consists of the user's configuration, the needs of a front end, and memory counted by llama.cpp.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gguf_tools.file.layout import pad
from orchestrator.config import Config
from orchestrator.plan.shared import CELL_STEP

# Context length and micro-batch size, in tokens.
Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Counted:
    """Host memory as llama.cpp counts it, in bytes.

    by_tokens: maps a micro-batch size to (context length, KV cache bytes, scratch bytes) for some
    contexts, shortest first. Context lengths are padded as llama.cpp pads them. Between two of
    them, both sizes are interpolated linearly.
    """

    by_tokens: Mapping[int, Sequence[tuple[int, int, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, sizes: Iterable[Size], count: Callable[[int, int], Size | None]) -> Counted:
        """Count several sizes.

        count: returns the bytes of KV cache and scratch for a context length and a micro-batch
        size, or None if llama.cpp cannot count them.
        """
        found: dict[int, list[tuple[int, int, int]]] = {}
        for n_ctx, n_tokens in sorted({(pad(n_ctx, CELL_STEP), n) for n_ctx, n in sizes}):
            counted = count(n_ctx, n_tokens)
            if counted is not None:
                found.setdefault(n_tokens, []).append((n_ctx, *counted))
        return cls(found)

    def at(self, n_ctx: int, n_tokens: int) -> Size | None:
        """Return the bytes of KV cache and scratch.

        Return None if nothing was counted for this micro-batch size.
        """
        points, n_ctx = self.by_tokens.get(n_tokens, ()), pad(n_ctx, CELL_STEP)
        if len(points) < 2:
            return points[0][1:] if points else None
        after = min(max(1, bisect_left(points, (n_ctx,))), len(points) - 1)
        (start, *low), (end, *high) = points[after - 1], points[after]
        pairs = zip(low, high, strict=True)
        # Round up.
        kv, scratch = (a - (n_ctx - start) * (a - b) // (end - start) for a, b in pairs)
        return max(0, kv), max(0, scratch)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request for a memory plan.

    config: the user's configuration. sequences: number of sequences that may decode in parallel in
    addition to the conversation; they share the context. conversations: reserve memory for the
    prompt cache, and let the KV cache and scratch take memory from expert slots as they grow.
    scored: maximum number of prompt tokens whose logits are in memory at once while a prompt is
    scored in parts.

    beside: bytes of the front end's process in addition to the model and a chat. beside_token: the
    same for each token of the vocabulary. more_scratch: bytes that llama.cpp took beyond the
    estimate. counted: memory counted by llama.cpp, which replaces estimates.
    """

    config: Config
    sequences: int = 0
    conversations: bool = False
    scored: int = 0
    beside: int = 0
    beside_token: int = 0
    more_scratch: int = 0
    counted: Counted = Counted()

    @classmethod
    def of(cls, config: Config) -> PlanRequest:
        """Return the request of a front end whose needs are in its configuration."""
        return cls(
            config,
            sequences=config.sequences,
            conversations=config.conversations,
            scored=config.scored,
            beside=config.beside,
            beside_token=config.beside_token,
        )
