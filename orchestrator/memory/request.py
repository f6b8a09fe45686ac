"""What is to be planned: what a user asked for, what a front end needs beside the model, and what
llama.cpp counts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gguf_tools.file.layout import pad
from orchestrator.config import Config
from orchestrator.memory.shared import CELL_STEP

# Tokens of the context, and tokens that are computed at once.
Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Counted:
    """Bytes in the host's memory as llama.cpp counts them, by the tokens that are computed at once:
    (tokens of the context, bytes of the cache, bytes of the scratch) of some contexts, the shortest
    one first. Contexts are whole steps of cells, as llama.cpp pads them; between two of them both
    amounts are on a line."""

    by_tokens: Mapping[int, Sequence[tuple[int, int, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, sizes: Iterable[Size], count: Callable[[int, int], Size | None]) -> Counted:
        """count: the cache and the scratch of a context of so many tokens and so many at once; None
        where llama.cpp cannot say."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        for n_ctx, n_tokens in sorted({(pad(n_ctx, CELL_STEP), n) for n_ctx, n in sizes}):
            counted = count(n_ctx, n_tokens)
            if counted is not None:
                found.setdefault(n_tokens, []).append((n_ctx, *counted))
        return cls(found)

    def at(self, n_ctx: int, n_tokens: int) -> Size | None:
        """Bytes of the cache and of the scratch; None where nothing was counted for so many tokens
        at once."""
        points, n_ctx = self.by_tokens.get(n_tokens, ()), pad(n_ctx, CELL_STEP)
        if len(points) < 2:
            return points[0][1:] if points else None
        after = min(max(1, bisect_left(points, (n_ctx,))), len(points) - 1)
        (start, *low), (end, *high) = points[after - 1], points[after]
        pairs = zip(low, high, strict=True)
        # rounded up
        kv, scratch = (a - (n_ctx - start) * (a - b) // (end - start) for a, b in pairs)
        return max(0, kv), max(0, scratch)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is to be planned.

    config: what the user asked for. sequences: how many may decode together beside the
    conversation; they share the context. conversations: memory is set aside for prompts that were
    read before, and slots of experts give way to a context and to scratch as far as these are used.
    scored: tokens of a prompt that is scored in parts whose logits are there at once, at most.
    beside: bytes that the process takes for itself, beside the model and what a chat takes;
    beside_token: the same for each token of the vocabulary. more_scratch: bytes that llama.cpp was
    seen to take beyond the estimate. counted: what it counts, in place of estimates.
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
        """The request of a front end that writes its needs into its configuration."""
        return cls(
            config,
            sequences=config.sequences,
            conversations=config.conversations,
            scored=config.scored,
            beside=config.beside,
            beside_token=config.beside_token,
        )
