"""Ways to save reading in one layer: experts that are skipped, or computed with a low copy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.estimate import KlEstimate
from orchestrator.events import ABSENT, SKIP
from orchestrator.policy.base import ModelShape

# One way to save reading, an expert in a lower tier or skipped: (nats a byte that is saved, expert,
# tier, nats, instead_of). nats: what it costs a token with a gate weight of 1; instead_of: the tier
# that the expert has to be lowered to before, None for no other. A plain tuple, since some are made
# and sorted in each layer of each token.
Way = tuple[float, int, int, float, int | None]


class Account:
    """What one sequence may still lose, in nats: left of the tokens before, and spent on the
    running one."""

    __slots__ = ("left", "spent")

    def __init__(self) -> None:
        self.left = self.spent = 0.0


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """What it costs and saves to lower an expert of one layer.

    skip, low: nats of each expert with a gate weight of 1, skipped and in tier 1, float64
    [n_expert]. high_bytes, low_bytes: of an expert in tiers 0 and 1, 0 where there is one tier.
    present_bytes: of reading, what skipping an expert saves that is in memory high.
    """

    skip: memoryview
    low: memoryview
    high_bytes: int
    low_bytes: int
    present_bytes: float

    @property
    def dearest(self) -> float:
        """No way costs a token more, in nats a byte: above it a price changes nothing."""
        saved = (self.high_bytes, self.low_bytes, self.present_bytes)
        return max(self.skip) / min(each for each in saved if each)

    @property
    def least_present(self) -> float:
        """What skipping an expert in memory with a gate weight of 1 costs at least, in nats a byte;
        infinite where that saves nothing."""
        return min(self.skip) / self.present_bytes if self.present_bytes else math.inf

    def ways(self, expert: int, square: float, resident: int) -> Sequence[Way]:
        """What may be done with an expert. square: the sum of its squared gate weights over the
        tokens that want it; resident: its tier in memory, or ABSENT.

        A low copy in memory stands for the high one. An absent expert is skipped; or read low,
        where that costs less for each byte than skipping, and then skipped instead. One in memory
        high is only skipped.
        """
        skip, n_bytes, low_bytes = self.skip[expert], self.high_bytes, self.low_bytes
        if resident == 0:
            return ((square * skip / self.present_bytes, expert, SKIP, skip, None),)
        if low_bytes:
            low = self.low[expert]
            if resident != ABSENT:
                return ((square * low / n_bytes, expert, resident, low, None),)
            if low * n_bytes < skip * (n_bytes - low_bytes):
                more = skip - low
                return (
                    (square * low / (n_bytes - low_bytes), expert, 1, low, None),
                    (square * more / low_bytes, expert, SKIP, more, 1),
                )
        return ((square * skip / n_bytes, expert, SKIP, skip, None),)


def layer_costs(shape: ModelShape, estimate: KlEstimate, present: float) -> list[LayerCosts]:
    """Of each layer. present: what skipping an expert in memory saves, as a share of what a missing
    one does."""
    found = []
    for layer, nats in enumerate(estimate.nats):
        n_bytes = [shape.expert_slot_bytes(layer, tier) for tier in range(len(shape.tiers))]
        low_bytes = n_bytes[1] if len(n_bytes) > 1 else 0
        skip, low = (nats[:, column].copy().data.toreadonly() for column in (-1, 1))
        found.append(LayerCosts(skip, low, n_bytes[0], low_bytes, present * n_bytes[0]))
    return found


def spend(
    ways: list[Way], squares: Mapping[int, float], account: Account, price: float, allowed: float
) -> dict[int, int]:
    """Takes the ways of one token, the cheapest first, up to a price in nats a byte, as long as
    something is left: of `allowed` nats, and of what the account has from before. squares: of the
    experts' gate weights. Returns {expert: tier}, and adds what was spent to the account."""
    lowered: dict[int, int] = {}
    spent, most = account.spent, account.left + allowed
    ways.sort()
    for nats_per_byte, expert, tier, nats, instead_of in ways:
        if nats_per_byte > price:
            break
        bill = squares[expert] * nats
        if spent + bill <= most and lowered.get(expert) == instead_of:
            spent += bill
            lowered[expert] = tier
    account.spent = spent
    return lowered


def spend_all(
    ways: list[Way],
    claims: Mapping[int, Sequence[tuple[Account, float]]],
    price: float,
    allowed: float,
) -> dict[int, int]:
    """As spend, of several tokens, all of which have to have something left for an expert that they
    want. claims: of each token that wants an expert, its account and the square of its gate
    weight."""
    lowered: dict[int, int] = {}
    ways.sort()
    for nats_per_byte, expert, tier, nats, instead_of in ways:
        if nats_per_byte > price:
            break
        bills = [(account, square * nats) for account, square in claims[expert]]
        broke = any(account.spent + bill > account.left + allowed for account, bill in bills)
        if broke or lowered.get(expert) != instead_of:
            continue
        for account, bill in bills:
            account.spent += bill
        lowered[expert] = tier
    return lowered
