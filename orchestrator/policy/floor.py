"""A policy that skips missing experts or computes them in low precision, to read less (ours).

The quality loss stays within a budget that the user sets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.allocation.estimate import KlEstimate
from orchestrator.allocation.look_ahead import OFF, LookAhead, Prefetching
from orchestrator.allocation.prompts import Prompts, gate_order
from orchestrator.allocation.settings import USUAL_RATE, Background, Shared
from orchestrator.allocation.slots import (
    COSINE,
    FLAT,
    SCHEDULES,
    ModelShape,
    Rules,
    even_slots,
    falling,
    layer_groups,
)
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
    PolicyRequirements,
    Precisions,
)
from orchestrator.settings import PRECISION, inherit, setting

# One way to save reading, by lowering or skipping an expert: (nats per saved byte, expert, tier,
# nats, instead_of). nats: the cost at a gate weight of 1. instead_of: the tier to which the expert
# must be lowered first, or None. A plain tuple for speed, because several are made and sorted in
# each layer of each token.
Way = tuple[float, int, int, float, int | None]


class Account:
    """The quality loss that the tokens of one sequence may cause and have caused, in nats.

    Experts that are skipped or computed in low precision cause the loss. Each token has the same
    allowance. If a token causes less, later tokens may use the rest.

    - left: the allowance that earlier tokens did not use, up to a maximum.
    - spent: the loss that the current token has caused in the layers so far.
    """

    __slots__ = ("left", "spent")

    def __init__(self) -> None:
        self.left = self.spent = 0.0


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """The costs and savings of skipping or lowering experts of one layer.

    To lower an expert means to compute it in tier 1 instead of tier 0, the better precision. The
    cost is a quality loss. The saving is a number of bytes that need not be read.

    - skip, low: each expert's quality loss in nats if it is skipped or lowered, at gate weight 1.
    - high_bytes, low_bytes: the size of an expert in tiers 0 and 1. low_bytes is 0 without a tier
      1.
    - present_bytes: the saving if an expert in memory is skipped. This saves computing time instead
      of reading, so a number of bytes stands for the time. 0 if such experts are never skipped.
    """

    skip: memoryview
    low: memoryview
    high_bytes: int
    low_bytes: int
    present_bytes: float

    @property
    def highest_cost(self) -> float:
        """An upper limit for the cost of skipping an expert of the layer, in nats per byte.

        The cost is the quality loss, divided by the number of bytes that skipping saves. The limit
        is the largest loss of any expert at gate weight 1, divided by the smallest possible saving.
        """
        saved = (self.high_bytes, self.low_bytes, self.present_bytes)
        return max(self.skip) / min(each for each in saved if each)

    @property
    def lowest_resident_cost(self) -> float:
        """The lowest cost of skipping an expert that is in memory (resident), in nats per byte.

        Skipping such an expert saves computing time instead of reading. The saving is counted as
        present_bytes: the expert's size times the setting skip_present. The lowest cost is the
        smallest quality loss of any expert at gate weight 1, divided by present_bytes. It is
        infinite if present_bytes is 0.
        """
        return min(self.skip) / self.present_bytes if self.present_bytes else math.inf

    def ways(self, expert: int, square: float, resident: int) -> Sequence[Way]:
        """Return the ways to save bytes for an expert: skip it, or lower its precision (tier).

        square: the sum of the squared gate weights of the tokens that use the expert. resident: the
        expert's best tier in memory, or ABSENT.

        Each way is a tuple (nats_per_byte, expert, tier, nats, instead_of):

        - nats_per_byte: the quality loss per saved byte.
        - tier: the expert's new tier, or SKIP.
        - nats: the quality loss at gate weight 1.
        - instead_of: None, or the tier to which the expert must be lowered first. This is for a
          skip after lowering, whose losses are then only those that the skip adds.
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
    """Return the costs and savings of skipping or lowering experts, one LayerCosts for each layer.

    To lower an expert means to compute it in a lower precision. The cost is a quality loss in nats.
    The saving is a number of bytes that need not be read.

    - estimate: the estimated quality losses.
    - present: the saving that is assumed if an expert in memory is skipped, as a fraction of its
      size. Skipping it saves computing time, not reading, so these bytes stand for the time. For
      example, with 0.01 an expert of 1 MB counts as 10 kB saved.
    """
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
    """Choose experts of a layer to skip or to lower, within one token's allowed quality loss.

    To lower an expert means to compute it in a lower tier (precision). Return {expert: tier or
    SKIP}. The choices with the least loss per saved byte come first. Losses are in nats.

    - ways: the possible choices, from LayerCosts.ways; sorted in place.
    - squares: each expert's squared gate weight, which multiplies its loss.
    - price: the maximum loss per saved byte of a choice.
    - account: its field spent is the token's loss in the layers so far, and is updated. Its field
      left is the allowance that earlier tokens did not use.
    - allowed: the loss allowed for a token in the layers up to this one. The token's loss stays
      within allowed + account.left.
    """
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
    """Choose experts of a layer to skip or to lower, within several tokens' allowed quality loss.

    To lower an expert means to compute it in a lower tier (precision). Return {expert: tier or
    SKIP}. The choices with the least loss per saved byte come first. A choice applies to all tokens
    that use the expert, and needs enough allowance of each. Losses are in nats.

    - ways: the possible choices, from LayerCosts.ways; sorted in place.
    - claims: the tokens that use each expert, as pairs (account, squared gate weight).
    - price: the maximum loss per saved byte of a choice.
    - allowed: the loss allowed for a token in the layers up to this one. The token's loss so far
      (account.spent, which is updated) stays within allowed + account.left, the allowance that
      earlier tokens did not use.
    """
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


# An expert that is lowered twice within this many steps is read. A single use is not worth a slot.
AGAIN_STEPS = 4
# Maximum burst of reads above the rate, in experts.
_BURST_EXPERTS = 8


class ReadBehind:
    """Prefetches experts that were skipped or lowered twice within a few steps, for later tokens.

    A lowered expert was computed in a low precision. The experts are read in the best precision in
    use, at a limited rate, after the reads that the current tokens need.
    """

    def __init__(self, shape: ModelShape, rate: int) -> None:
        """Start with no reads.

        rate: the limit in bytes per second; 0 for no limit.
        """
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
        """Find experts of this layer to prefetch for later tokens. The next call requests them.

        Call this once for each layer of a step. An expert is found if it is skipped or lowered
        (computed in a lower tier) twice within a few steps, and is not in memory in tier 0. This
        call requests the experts that the previous call found, within a limit in bytes per second.

        - step, layer: the running step and layer.
        - lowered: the experts that are skipped or lowered in this layer.
        - resident: each expert's best tier in memory, or ABSENT.
        - out: receives the requests.
        """
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
        """Allow more bytes to be prefetched, after a step that took `us` microseconds.

        The added bytes are this time multiplied by the limit in bytes per second. Unused bytes add
        up to at most the size of a few experts.
        """
        most = _BURST_EXPERTS * self._bytes[0]
        self._granted = min(self._granted + self._rate * us / 1e6, most)


_DECODE = int(Phase.DECODE)
# Later tokens may spend what earlier ones left, up to the budget of this many tokens.
_CARRIED_TOKENS = 16
# Gain of the price control: the relative change of the price per relative error of the budget.
_GAIN = 0.1
# The first price assumes that this share of a token's experts is missing.
_FIRST_MISSING = 0.3
# Resident experts are skipped only from the price at which this squared gate weight is affordable.
_LEAST_SQUARE = 1e-3


@dataclass(frozen=True)
class FloorSettings(LookAhead):
    """Settings of the policy `floor`.

    This policy skips experts that are not in memory, up to a limit on the estimated loss of
    quality.
    """

    max_loss: float = setting(
        0.01,
        "Allowed quality loss, in nats per token. Quality loss is the mean KL divergence from the "
        "best precision (--high-tier): about 0.01 with Q4_K. Default with --policy floor: 0.01.",
        metavar="NATS",
        within=(0.0, 100.0),
        live=True,
        shown="none",
        group=PRECISION,
    )
    keep_top: int = setting(
        1,
        "Number of experts of each token that are never skipped or computed in a lower precision: "
        "those with the highest gate weights.",
        within=(0, 2**16),
    )
    loss_schedule: str = setting(
        COSINE,
        f"How --max-loss is divided among the layers: {', '.join(SCHEDULES)}. With flat, all "
        "layers get equal shares. Otherwise, later layers get larger shares.",
        choices=SCHEDULES,
    )
    low_share: float = setting(
        0.25,
        "With --low-tier: the share of the expert memory that holds experts in the low precision.",
        within=(0.0, 1.0),
    )
    skip_present: float = setting(
        0.002,
        "How readily experts in memory are skipped to save compute time: 0 for never, 1 as readily "
        "as missing experts.",
        within=(0.0, 1.0),
    )
    read_behind: bool = setting(
        True,
        "In the background, read experts that were skipped or computed in the low precision twice "
        "within a few tokens.",
    )
    transition_rate: int | None = inherit(Background, "transition_rate")
    losses: Path | None = inherit(Shared, "losses")


@dataclass(frozen=True, kw_only=True)
class FloorPlacement(Placement):
    """The memory slots for experts under the policy `floor`, and its estimate of the quality loss.

    This policy skips experts that are not in memory, or computes them in a lower tier (precision),
    within an allowed loss.

    - room: the number of slots (each for one expert) of each layer in each tier, [layer][tier].
    - estimate: the estimated loss of lower tiers and of skipping; None if unknown.
    - share: the fraction of the setting max_loss that a token may cause. Usually 1, but 0.5 while
      the estimate may be wrong for the current text.
    """

    room: Sequence[Sequence[int]]
    estimate: KlEstimate | None
    share: float = 1.0

    @property
    def allowed(self) -> float:
        """The quality loss that one token may cause, in nats."""
        allowed: float = self.share * self.settings.max_loss
        return allowed

    @property
    def spends(self) -> float:
        return self.allowed

    @property
    def text(self) -> str:
        tiers = "/".join((*self.shape.tiers, "skip"))
        return f"floor {tiers} (estimated quality loss at most {self.allowed:g} nats per token)"


class Floor(Policy):
    """A policy that skips experts that are not in memory, or computes them in low precision.

    This saves reading, but costs quality. An expert is skipped or lowered only within two limits:

    - The setting max_loss limits the mean quality loss per token, in nats.
    - The price is the highest loss per saved byte at which an expert is skipped or lowered. The
      policy raises it while tokens lose less than max_loss, and lowers it while they lose more.

    While the price is high, experts in memory are skipped too, to save computing time.

    Prompts are computed without loss, and so are each token's `keep_top` experts with the highest
    gate weights.
    """

    # The price is the same in all layers, because then no other distribution of the same loss saves
    # more bytes. orchestrator/allocation/estimate.py estimates the loss of a token.
    # An expert that is skipped or lowered twice within a few tokens is read afterwards, after all
    # other reads, within --transition-rate. Experts predicted for the next layer are prefetched,
    # unless they would be skipped at the current price and budget.
    about = About(
        name="floor",
        summary=(
            "Skips experts that are not in memory, or computes them in the low precision, to read "
            "less. --max-loss limits the quality loss. Within this limit, experts in memory may be "
            "skipped too, to save compute time."
        ),
        Settings=FloorSettings,
        reason="skips experts that are not in memory, within an allowed quality loss",
        precisions=Precisions(most=2, skips=True, lossless={"max_loss": 0.0}),
        wants=PolicyRequirements(EVERY_STEP, by_residency=True),
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
        """Divide a memory budget into slots for experts, and return the placement with these slots.

        The budget is divided between the high and the low tier (precision), then about equally
        among the layers. The low tier, if the policy uses one, gets the fraction low_share of the
        budget. It gets less if the high tier could otherwise not hold one expert per layer.
        """
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
        self._highest_cost = math.inf
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
        # Skipping resident experts is considered from this price on.
        self._present_price = math.inf
        self._reads_behind = asked.read_behind
        estimate = self.placement.estimate
        if estimate is not None:
            self._costs = layer_costs(shape, estimate, asked.skip_present)
            self._highest_cost = max(each.highest_cost for each in self._costs)
            if asked.skip_present:
                least = min(each.lowest_resident_cost for each in self._costs)
                self._present_price = _LEAST_SQUARE * least
        self._divide_by_depth()

    @property
    def allowed(self) -> float:
        """The quality loss that one token may cause now, in nats.

        This is the setting max_loss, or half of it while the loss estimates may be wrong for the
        current text.
        """
        return self.placement.allowed

    def update_settings(self, settings: Any) -> None:
        super().update_settings(settings)
        self._divide_by_depth()

    def _spend_share(self, share: float) -> None:
        """From now on, allow this fraction of the setting max_loss."""
        if share != self.placement.share:
            self.placement = replace(self.placement, share=share)
            self._divide_by_depth()

    def _divide_by_depth(self) -> None:
        """Divide the allowed loss of a token among the layers, and reset the price.

        The price is the maximum loss per saved byte. The new price would use up the allowed loss if
        all experts had the same cost.
        """
        budget, shape = self.allowed, self.shape
        # A layer's part of the budget is proportional to the share of experts that may be lowered.
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
            raise PolicyError(
                f"the policy {self.name} has no estimate of the quality loss of lower precisions: "
                "run moe-edge calibrate"
            )
        if event.step != self._step:
            self._begin(event)
        # A single token has code of its own with the same decisions. The token waits here once per
        # layer, with cold caches, so this code has to touch little memory.
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
        """Begin a decode step at its first layer: find the loss account of each token's sequence.

        Losses that a failed step added to the accounts are dropped.
        """
        self._step = event.step
        self._missing_before = self._missing
        for account in self._running:
            account.spent = 0.0
        names = event.sequences_array.tolist()
        self._running = [self._accounts.setdefault(each, Account()) for each in names]
        self._asks_ahead = self._ahead.on

    def _lower(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> dict[int, int]:
        """Choose which experts to skip or lower in a step with one token.

        Returns {expert: tier} with the chosen lower tier, or SKIP.
        """
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
        """Choose which experts to skip or lower in a step with several tokens.

        Returns {expert: tier} with the chosen lower tier, or SKIP.
        """
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
        """Return the loss account of each token of an event.

        The last layer computes only some tokens of a step, so the event may have fewer tokens.
        """
        if len(self._running) == event.n_tokens:
            return self._running
        return [self._accounts[each] for each in event.sequences_array.tolist()]

    def _ask(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        """Prefetch the experts that the only token of a step is predicted to use in the next layer.

        Experts in memory are requested so that the store keeps them. A missing expert is requested
        only if it will not be skipped: skipping costs more than the price, or more than the loss
        that is left.
        """
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
        """Prefetch the experts that several tokens are predicted to use in the next layer.

        A missing expert is requested only if it will not be skipped. Skipping must cost more than
        the price for all tokens together, or more than one of the tokens has left.
        """
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
        """After a step, adjust the two limits for the quality loss of later tokens. Returns ().

        An expert is skipped or lowered only if both limits permit it:

        - The allowed loss of a token. It is the setting max_loss, or half of it while
          report.unusual is true, because the estimates may then be wrong. Loss that a token does
          not use is allowed for the next tokens of its sequence, up to a maximum.
        - The price, which is the highest allowed loss per saved byte. It rises if tokens leave much
          of the allowed loss unused, and falls if they leave little.
        """
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
        # If no expert was missing, nothing could be spent at any price.
        if running and budget and self._missing > self._missing_before:
            off = 1 - spent / (budget * len(running))
            # A price that is too high spends no more than allowed, but spends it in the first
            # layers. So the price aims at leaving half of the maximum that may be carried.
            left = sum(account.left for account in running) / len(running)
            off += left / (_CARRIED_TOKENS * budget) - 0.5
            # If all missing experts are lowered already, the price would rise without limit.
            self._price = min(self._price * math.exp(_GAIN * max(-1.0, off)), self._highest_cost)
        self._running = []
        self._tokens += report.n_tokens
        self._spent += spent
        self._behind.step_done(report.us)
        self._ahead.step_done(report)
        return ()

    def report(self) -> Mapping[str, Any]:
        """Return figures about the decoded tokens since the runtime started, by name.

        - max_loss: the quality loss that one token may cause now, in nats.
        - loss: the mean estimated loss per token, in nats.
        - missing: the fraction of the routed experts that were not in memory in the high tier.
        - lowered: the fraction of the routed experts that were skipped or computed in a lower tier.
        - prefetch: the state of prefetching, such as "on".
        - recall, precision: the quality of predicting experts, for each layer.
        """
        return {
            "max_loss": self.allowed,
            "loss": self._spent / self._tokens if self._tokens else None,
            "missing": self._missing / self._routed if self._routed else None,
            "lowered": self._lowered / self._routed if self._routed else None,
            **self._ahead.report(),
        }

    def describe(self) -> str:
        return self.placement.text + self._ahead.note
