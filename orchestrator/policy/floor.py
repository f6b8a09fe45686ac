"""The loss that a user allows, spent on missing experts where it saves most reading (ours)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.allocation.critical import COSINE, FLAT, SCHEDULES, falling, gate_order
from orchestrator.allocation.estimate import KlEstimate
from orchestrator.allocation.look_ahead import OFF, LookAhead, Prefetching
from orchestrator.allocation.prompts import Prompts, even_slots, layer_groups
from orchestrator.allocation.settings import USUAL_RATE, Background, Shared
from orchestrator.allocation.slots import ModelShape, Rules
from orchestrator.errors import PolicyError
from orchestrator.events import (
    ABSENT,
    SKIP,
    DecisionBuffer,
    Phase,
    RouteEvent,
    StepReport,
    StoreView,
)
from orchestrator.policy.base import (
    EVERY_STEP,
    About,
    History,
    Placement,
    Policy,
    Precisions,
    Wants,
)
from orchestrator.settings import PRECISION, again, setting

# One way to save reading, an expert in a lower tier or skipped: (nats a byte that is saved, expert,
# tier, nats, instead_of). nats: what it costs a token with a gate weight of 1. instead_of: the tier
# to which the expert has to be lowered first, None where this is the first step. It is a plain
# tuple for speed: some are made and sorted in each layer of each token.
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
    """Return the costs of each layer. present: what skipping an expert in memory saves, as a share
    of what skipping a missing one saves."""
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


# An expert that is lowered twice within so many steps is read. One that comes up once is not worth
# a slot.
AGAIN_STEPS = 4
# So many experts may be read at once, before the rate holds them back.
_BURST_EXPERTS = 8


class ReadBehind:
    """Asks for the high copies of experts that were lowered twice within a few steps, within a
    rate."""

    def __init__(self, shape: ModelShape, rate: int) -> None:
        """rate: bytes a second, 0 for no limit."""
        self._rate, self._granted = rate, 0.0
        self._bytes = [shape.expert_slot_bytes(layer, 0) for layer in range(shape.n_layers)]
        never = -AGAIN_STEPS - 1
        self._lowered_at = [[never] * shape.n_expert for _ in range(shape.n_layers)]
        self._pending: tuple[int, list[int]] = (0, [])

    def ask(
        self,
        step: int,
        layer: int,
        lowered: Iterable[int],
        resident: memoryview,
        out: DecisionBuffer,
    ) -> None:
        """Asks for what the layer before left, as far as the rate goes: for the layer that is being
        computed, the store takes no prefetch. lowered: experts of this layer; resident: what its
        experts have in memory, best tier or ABSENT."""
        before, experts = self._pending
        if experts:
            n, n_bytes = len(experts), self._bytes[before]
            if self._rate:
                n = min(n, int(max(0.0, self._granted) // n_bytes))
                self._granted -= n * n_bytes
            out.prefetch_all(before, experts[:n], 0)
        lowered_at, again = self._lowered_at[layer], []
        for expert in lowered:
            if resident[expert] != 0:
                if step - lowered_at[expert] <= AGAIN_STEPS:
                    again.append(expert)
                lowered_at[expert] = step
        self._pending = layer, again

    def step_done(self, us: float) -> None:
        """The rate grants what a step of so many microseconds may read."""
        most = _BURST_EXPERTS * self._bytes[0]
        self._granted = min(self._granted + self._rate * us / 1e6, most)


_DECODE = int(Phase.DECODE)
# What tokens leave of their budget the next ones may spend, up to the budget of so many tokens.
_CARRIED_TOKENS = 16
# How strongly the price follows: by this share of what a token was off its budget.
_GAIN = 0.1
# The first price assumes that this share of a token's experts is missing.
_FIRST_MISSING = 0.3
# An expert in memory is left alone where its squared gate weight is below this.
_LEAST_SQUARE = 1e-3


@dataclass(frozen=True)
class FloorSettings(LookAhead):
    """What a user can tune."""

    max_loss: float = setting(
        0.01,
        "Loss allowed, estimated. Q4_K loses 0.01. It is how far the probabilities of an "
        "answer's tokens move from those of the best precision in use: the mean KL divergence, in "
        "nats a token, as moe-edge calibrate estimates it. With the policy floor it is 0.01 unless "
        "another one is given.",
        metavar="NATS",
        within=(0.0, 100.0),
        live=True,
        shown="none",
        group=PRECISION,
    )
    keep_top: int = setting(
        1,
        "How many experts of each token, those with the highest gates, are never lowered or "
        "skipped.",
        within=(0, 2**16),
    )
    loss_schedule: str = setting(
        COSINE,
        f"How the loss that is allowed grows with depth: {', '.join(SCHEDULES)}.",
        choices=SCHEDULES,
    )
    low_share: float = setting(
        0.25,
        "With --low-tier: the share of the slots' bytes that is for low copies.",
        within=(0.0, 1.0),
    )
    skip_present: float = setting(
        0.002,
        "What skipping an expert in memory saves, as a share of what a missing one does: so little "
        "that missing ones come first. 0: what is in memory is always used.",
        within=(0.0, 1.0),
    )
    read_behind: bool = setting(
        True,
        "Whether what was skipped or lowered twice within a few tokens is read afterwards, so that "
        "it is there when it is asked for again.",
    )
    transition_rate: int | None = again(Background, "transition_rate")
    losses: Path | None = again(Shared, "losses")


@dataclass(frozen=True, kw_only=True)
class FloorPlacement(Placement):
    """room: of each layer, its slots in each tier. estimate: what lower tiers cost; None where that
    is not known. share: of max_loss, what is spent now."""

    room: Sequence[Sequence[int]]
    estimate: KlEstimate | None
    share: float = 1.0

    @property
    def allowed(self) -> float:
        """What a token may lose, in nats."""
        allowed: float = self.share * self.settings.max_loss
        return allowed

    @property
    def spends(self) -> float:
        return self.allowed

    @property
    def text(self) -> str:
        tiers = "/".join((*self.shape.tiers, "skip"))
        return f"floor {tiers} within an estimated loss of {self.allowed:g} nats a token"


class Floor(Policy):
    """An answer's experts that are in memory high are used high. Of those that are missing, some
    are skipped, or computed with a low copy, as long as the loss that the user allows lasts. What
    lasts beyond all of these is spent on experts in memory, whose computing it saves.

    What that costs a token is foreseen (allocation/estimate.py). Of all ways to save reading, those
    with the least loss a byte come first, up to a price, in nats a byte, that is the same in all
    layers: at equal prices nothing is gained by moving loss from one expert to another. The price
    rises while tokens lose less than allowed, and falls while they lose more or little is left.
    Besides, a token has at most what is allowed for the layers up to this one (the cosine
    schedule), and what the tokens of its sequence before it left. `keep_top` experts of each token
    are never lowered.

    What was skipped or lowered, and is again a few tokens later, is read behind, after all else,
    within --transition-rate. Look-ahead loads what is not predicted to be skipped, by the price and
    by what is left to spend. Prompts are lossless.
    """

    about = About(
        name="floor",
        summary=(
            "The user says what an answer may lose, and experts that are missing are skipped or "
            "computed low where that saves most reading. What is in memory is skipped last."
        ),
        Settings=FloorSettings,
        reason="decides by the loss that is allowed",
        precisions=Precisions(most=2, skips=True, lossless={"max_loss": 0.0}),
        wants=Wants(EVERY_STEP, by_residency=True),
    )
    settings: FloorSettings
    placement: FloorPlacement

    @classmethod
    def place(
        cls,
        shape: ModelShape,
        settings: Any,
        rules: Rules,
        budget_bytes: int,
        history: History,
    ) -> FloorPlacement:
        """One group per (layer, kind, tier), as many slots in each layer. Low copies have their
        share of the budget, as far as one high copy a layer fits beside them."""
        settings = settings.with_usual()
        low_bytes, low_counts = 0, [0] * shape.n_layers
        if len(shape.tiers) > 1:
            sizes = [shape.expert_slot_bytes(layer, 1) for layer in range(shape.n_layers)]
            high = sum(shape.expert_slot_bytes(layer, 0) for layer in range(shape.n_layers))
            most = min(settings.low_share * budget_bytes, budget_bytes - high)
            low_counts = [max(1, min(shape.n_expert, int(most / sum(sizes))))] * shape.n_layers
            low_bytes = sum(n * size for n, size in zip(low_counts, sizes, strict=True))
        counts = even_slots(shape, budget_bytes - low_bytes)
        pairs = zip(counts, low_counts, strict=True)
        room = [pair[: len(shape.tiers)] for pair in pairs]
        asked = settings.transition_rate
        wants = replace(
            cls.about.wants,
            n_ahead=(settings.n_ahead or 0) if settings.prefetch != OFF else 0,
            transition_rate=USUAL_RATE if asked is None else asked,
            learns=True,
        )
        return FloorPlacement(
            *(cls, shape, settings, rules, layer_groups(shape, room), wants),
            room=room,
            estimate=history.estimate(shape.tiers),
        )

    def _set_up(self) -> None:
        shape, asked = self.shape, self.settings
        self._dearest = math.inf
        self._costs: list[LayerCosts] = []
        self._high_bytes = [shape.expert_slot_bytes(layer, 0) for layer in range(shape.n_layers)]
        self._accounts: dict[int, Account] = {}
        self._prompts = Prompts(self.rules, room=self.placement.room)
        self._ahead = Prefetching(asked.prefetch if self.wants.n_ahead else OFF, shape.n_layers)
        self._running: list[Account] = []
        self._asks_ahead = False
        self._behind = ReadBehind(shape, self.wants.transition_rate)
        self._step, self._tokens, self._spent = -1, 0, 0.0
        self._routed = self._missing = self._lowered = self._missing_before = 0
        self._keep_top = asked.keep_top
        # Experts in memory are looked at from this price on.
        self._present_price = math.inf
        self._reads_behind = asked.read_behind
        estimate = self.placement.estimate
        if estimate is not None:
            self._costs = layer_costs(shape, estimate, asked.skip_present)
            self._dearest = max(each.dearest for each in self._costs)
            if asked.skip_present:
                least = min(each.least_present for each in self._costs)
                self._present_price = _LEAST_SQUARE * least
        self._divide_by_depth()

    @property
    def allowed(self) -> float:
        """What a token may lose now, in nats: the setting max_loss, or half of it."""
        return self.placement.allowed

    def update_settings(self, settings: Any) -> None:
        super().update_settings(settings)
        self._divide_by_depth()

    def _spend_share(self, share: float) -> None:
        """Spend this share of max_loss from now on."""
        if share != self.placement.share:
            self.placement = replace(self.placement, share=share)
            self._divide_by_depth()

    def _divide_by_depth(self) -> None:
        """Divide the budget by depth, and begin with the price at which it would be spent if all
        ways to save had the same cost."""
        budget, shape = self.allowed, self.shape
        # A layer's part of the budget is the share of experts that the schedule lets be lowered.
        schedule = self.settings.loss_schedule
        left = [schedule == FLAT or 1 - share for share in falling(schedule, shape.n_layers)]
        total = math.fsum(left) or 1.0
        self._allowed = [
            budget * math.fsum(left[: layer + 1]) / total for layer in range(shape.n_layers)
        ]
        missing = shape.n_layers * shape.n_expert_used * _FIRST_MISSING
        self._price = budget / (missing * self._high_bytes[0])

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        if event.phase != _DECODE:
            if event.n_tokens > 1:
                self._prompts.decide(event, view, out, self._ahead.asked != OFF)
            return
        if not self._costs:
            raise PolicyError(f"the policy {self.name} was not told what lower precisions lose")
        if event.step != self._step:
            self._begin(event)
        # A single token has code of its own, which decides the same as that for several. It waits
        # here once per layer, with cold caches, so that this code has to touch little memory.
        lower = self._lower if event.n_tokens == 1 else self._lower_all
        lowered = lower(event, view, out)
        if lowered:
            for expert, tier in lowered.items():
                out.tier[expert] = tier
            out.renormalize = self.rules.renormalize
            self._lowered += len(lowered)
        if event.n_ahead and self._asks_ahead:
            ask = self._ask if event.n_tokens == 1 else self._ask_all
            ask(event, view, out)
        if self._reads_behind:
            resident = view.resident[event.layer]
            self._behind.ask(event.step, event.layer, lowered, resident, out)

    def _begin(self, event: RouteEvent) -> None:
        """A step's first layer. What a failed step spent is forgotten."""
        self._step = event.step
        self._missing_before = self._missing
        for account in self._running:
            account.spent = 0.0
        names = event.sequences_array.tolist()
        self._running = [self._accounts.setdefault(each, Account()) for each in names]
        self._asks_ahead = self._ahead.on

    def _lower(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> dict[int, int]:
        """The tiers of what a step's only token skips or gets low."""
        layer, ids, weights = event.layer, event.ids.tolist(), event.weights.tolist()
        resident = view.resident[layer]
        missing = [at for at, expert in enumerate(ids) if resident[expert]]
        self._routed += len(ids)
        self._missing += len(missing)
        every = self._price > self._present_price
        at_stake: Sequence[int] = range(len(ids)) if every else missing
        lowered: dict[int, int] = {}
        if at_stake:
            costs, kept = self._costs[layer], gate_order(weights)[: self._keep_top]
            squares: dict[int, float] = {}
            ways: list[Way] = []
            for at in at_stake:
                if at not in kept:
                    expert = ids[at]
                    square = squares[expert] = weights[at] ** 2
                    ways += costs.ways(expert, square, resident[expert])
            lowered = spend(ways, squares, self._running[0], self._price, self._allowed[layer])
        if lowered:
            ids = [expert for expert in ids if lowered.get(expert) != SKIP]
        self._ahead.score.observe(layer, ids)
        return lowered

    def _lower_all(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> dict[int, int]:
        """The tiers of what several tokens skip or get low."""
        layer, accounts = event.layer, self._accounts_of(event)
        resident, costs = view.resident[layer], self._costs[layer]
        rows, gates = event.ids_array.tolist(), event.weights_array.tolist()
        claims: dict[int, list[tuple[Account, float]]] = {}
        kept: set[int] = set()
        every = self._price > self._present_price
        for account, ids, weights in zip(accounts, rows, gates, strict=True):
            for place, at in enumerate(gate_order(weights)):
                expert = ids[at]
                if resident[expert] or every:
                    claims.setdefault(expert, []).append((account, weights[at] ** 2))
                    if place < self._keep_top:
                        kept.add(expert)
        self._routed += event.k * event.n_tokens
        self._missing += sum(resident[expert] != 0 for expert in claims)
        ways: list[Way] = []
        for expert, of_tokens in claims.items():
            if expert not in kept:
                square = sum(each for _, each in of_tokens)
                ways += costs.ways(expert, square, resident[expert])
        return spend_all(ways, claims, self._price, self._allowed[layer])

    def _accounts_of(self, event: RouteEvent) -> list[Account]:
        """Of an event's tokens: some tokens of a step do not reach the last layer."""
        if len(self._running) == event.n_tokens:
            return self._running
        return [self._accounts[each] for each in event.sequences_array.tolist()]

    def _ask(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        """Asks for what the next layer is predicted to choose: what is in memory, so that it stays,
        and of the rest what would cost too much to skip, or more than is left behind what costs
        less."""
        layer, keep_top = event.layer + 1, self._keep_top
        resident, costs = view.resident[layer], self._costs[layer]
        ids, scores = event.ahead_ids[0].tolist(), event.ahead_scores[0].tolist()
        # The predicted scores are scaled to the sum of the weights in this layer.
        scale = sum(event.weights.tolist()) / max(sum(scores), 1e-30)
        least, skip, account = self._price * costs.high_bytes, costs.skip, self._running[0]
        left = account.left + self._allowed[layer] - account.spent
        bills = [
            (score * scale) ** 2 * skip[expert] for expert, score in zip(ids, scores, strict=True)
        ]
        skipped = set()
        for place in sorted(range(len(ids)), key=bills.__getitem__):
            bill = bills[place]
            if place >= keep_top and resident[ids[place]] and bill <= least and bill <= left:
                skipped.add(place)
                left -= bill
        asked = [expert for place, expert in enumerate(ids) if place not in skipped]
        out.prefetch_all(layer, asked, 0)
        self._ahead.score.expect(layer, asked)

    def _ask_all(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        """As _ask, of several tokens: what an expert would cost all of them, and each."""
        layer = event.layer + 1
        resident, costs = view.resident[layer], self._costs[layer]
        rows, scores = event.ahead_ids_array[0].tolist(), event.ahead_array[0]
        sums = event.weights_array.sum(axis=1), np.maximum(scores.sum(axis=1), 1e-30)
        gates = (scores * (sums[0] / sums[1])[:, None]).tolist()
        wanted: dict[int, dict[int, float]] = {}  # [expert][token]: nats of skipping it
        for token, (ids, weights) in enumerate(zip(rows, gates, strict=True)):
            for place, (expert, gate) in enumerate(zip(ids, weights, strict=True)):
                cost = math.inf if place < self._keep_top else gate**2 * costs.skip[expert]
                wanted.setdefault(expert, {})[token] = cost
        allowed, least = self._allowed[layer], self._price * costs.high_bytes
        left = [each.left + allowed - each.spent for each in self._accounts_of(event)]
        skipped = set()
        for expert in sorted(wanted, key=lambda each: sum(wanted[each].values())):
            bills = wanted[expert]
            dear = sum(bills.values()) > least or any(bills[each] > left[each] for each in bills)
            if resident[expert] != 0 and not dear:
                skipped.add(expert)
                for token, cost in bills.items():
                    left[token] -= cost
        out.prefetch_all(layer, [expert for expert in wanted if expert not in skipped], 0)

    def on_step(self, report: StepReport) -> tuple[()]:
        """A decode step's tokens have lost what they lost: their sequences keep the rest, up to a
        few tokens' budget, and the price follows. Half of the loss is spent from a step on whose
        report says that the texts are unusual."""
        if report.unusual is not None:
            self._spend_share(0.5 if report.unusual else 1.0)
        for sequence in (*report.ends, *report.starts):
            self._accounts.pop(sequence, None)
        if report.phase != _DECODE:
            return ()
        budget, running = self.allowed, self._running
        spent = sum(account.spent for account in running)
        for account in running:
            kept = account.left + budget - account.spent
            account.left, account.spent = min(kept, _CARRIED_TOKENS * budget), 0.0
        # Where nothing was missing, nothing could be spent, whatever the price.
        if running and budget and self._missing > self._missing_before:
            off = 1 - spent / (budget * len(running))
            # A price that is too high spends no more than is allowed, but spends it in the first
            # layers. So the price is to leave half of what may be carried.
            left = sum(account.left for account in running) / len(running)
            off += left / (_CARRIED_TOKENS * budget) - 0.5
            # Where all that is missing is lowered already, the price would rise without end.
            self._price = min(self._price * math.exp(_GAIN * max(-1.0, off)), self._dearest)
        self._running = []
        self._tokens += report.n_tokens
        self._spent += spent
        self._behind.step_done(report.us)
        self._ahead.step_done(report)
        return ()

    def report(self) -> Mapping[str, Any]:
        """Return max_loss, what a token may lose now in nats, and of the tokens that were decoded
        since the engine started: loss, the mean of their estimated losses; of the experts that they
        chose, the shares that were not in memory high (missing) and that were lowered or skipped.
        The rest is as of Prefetching.report."""
        return {
            "max_loss": self.allowed,
            "loss": self._spent / self._tokens if self._tokens else None,
            "missing": self._missing / self._routed if self._routed else None,
            "lowered": self._lowered / self._routed if self._routed else None,
            **self._ahead.report(),
        }

    def describe(self) -> str:
        return self.placement.text + self._ahead.note
