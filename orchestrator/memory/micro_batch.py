"""How many tokens of a prompt are computed at once, where that was not asked for.

A micro-batch of hundreds of tokens uses nearly every expert, so it reads each one that has no slot,
once. Larger ones are fewer; their scratch takes slots from experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

SIZES = (512, 1024, 2048, 4096)

# Tokens of an answer for each token of its prompt, and how often an expert without a slot is used,
# of the mean of all. The medians of conversations in Splitwise (ISCA 2024, Figure 3) are 1,020 and
# 129 tokens. What has no slot is what was used least; half is on the safe side
# (docs/experiments/prompts.md, "Micro-batches by memory").
ANSWER_SHARE = 1 / 8
ABSENT_USE = 1 / 2


class Planned(Protocol):
    """A way to lay a model out in memory: orchestrator.memory.plan.MemoryPlan."""

    @property
    def n_ubatch(self) -> int: ...
    @property
    def absent_bytes(self) -> int: ...


P = TypeVar("P", bound=Planned)


def read_per_prompt_token(n_tokens: int, absent_bytes: int, used_share: float) -> float:
    """Bytes that are read for one token of a prompt and for what an answer has of tokens to it:

        A / u + a * c * A * k / n

    A = absent_bytes: experts without a slot, which are fewer where less is scratch. u = n_tokens of
    a micro-batch, which reads all of A. a = ANSWER_SHARE: tokens of an answer for one of the
    prompt. A token of an answer uses k / n = used_share of the experts, and c = ABSENT_USE says how
    often those without a slot.
    """
    return absent_bytes * (1 / n_tokens + ANSWER_SHARE * ABSENT_USE * used_share)


def best_plan(least: P, plan_of: Callable[[int], P | None], used_share: float) -> P:
    """The plan with which least is read: of `least`, whose micro-batch is the smallest, and of
    those that plan_of gives for larger ones, None where memory or context has no room.

    Scratch grows evenly with the micro-batch, so that what is read first falls, then rises: beyond
    the best one, each next size costs more in slots than it saves in passes. Where nothing is
    absent no larger one is tried.
    """

    def read(plan: P) -> float:
        return read_per_prompt_token(plan.n_ubatch, plan.absent_bytes, used_share)

    best = least
    for n_tokens in SIZES[1:]:
        if best.absent_bytes == 0:
            break
        plan = plan_of(n_tokens)
        if plan is None or read(plan) >= read(best):
            break
        best = plan
    return best
