"""The loss that a user allows, spent on missing experts where it saves most reading (ours)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from orchestrator.errors import PolicyError
from orchestrator.estimate import KlEstimate
from orchestrator.events import (
    ABSENT,
    SKIP,
    DecisionBuffer,
    Phase,
    RouteEvent,
    StepReport,
    StoreView,
)
from orchestrator.policy.base import Callback, ModelShape, Policy, Rules, SlotPlan
from orchestrator.policy.context import ContextSettings
from orchestrator.policy.importance import gate_order
from orchestrator.policy.monitor import Monitor, Prediction
from orchestrator.policy.prefetch import AUTO, OFF, ON, LookAhead
from orchestrator.policy.prompts import Prompts, even_slots, layer_groups
from orchestrator.policy.retention import COSINE, FLAT, SCHEDULES, ratios
from orchestrator.policy.versions import Background, rate_of
from orchestrator.settings import again, setting

_DECODE = int(Phase.DECODE)

# Tokens whose budget may wait to be spent: what one token leaves, the next ones have.
_CARRIED_TOKENS = 16
# The share of a token's miss of its budget by which the price changes.
_GAIN = 0.1
# Of the first price: so many of a token's experts are taken to be missing.
_FIRST_MISSING = 0.3
# Experts that reads behind may be ahead of their rate.
_BURST_EXPERTS = 8


@dataclass(frozen=True)
class FloorSettings(LookAhead):
    """What a user can tune."""

    max_loss: float = setting(
        0.01,
        "The loss that is allowed: mean KL divergence from the best precision in use, in nats a "
        "token.",
        metavar="NATS",
        within=(0.0, 100.0),
        live=True,
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
        hidden=True,
    )
    low_share: float = setting(
        0.25,
        "With --low-tier: the share of the slots' bytes that is for low copies.",
        within=(0.0, 1.0),
        hidden=True,
    )
    skip_present: float = setting(
        0.0,
        "What skipping an expert in memory saves, as a share of what a missing one does.",
        within=(0.0, 1.0),
        hidden=True,
    )
    read_behind: bool = setting(
        True,
        "Whether what was skipped or lowered is read afterwards, so that it is there when it is "
        "asked for again.",
        hidden=True,
    )
    transition_rate: int | None = again(Background, "transition_rate")
    losses: Path | None = again(ContextSettings, "losses")


class _Way(NamedTuple):
    """One way to save reading: an expert in a lower tier, or skipped. nats: what that costs a token
    with a gate weight of 1; instead_of: the tier that it has to be lowered to before, None for no
    other."""

    nats_per_byte: float
    expert: int
    tier: int
    nats: float
    instead_of: int | None


class _Account:
    """What one sequence may still lose, in nats: left of the tokens before, and spent on the
    running one."""

    __slots__ = ("left", "spent")

    def __init__(self) -> None:
        self.left = self.spent = 0.0


class Floor(Policy):
    """An answer's experts that are in memory high are used high. Of those that are missing, some
    are skipped, or computed with a low copy, as long as the loss that the user allows lasts.

    What that costs a token is foreseen (orchestrator.estimate). Of all ways to save reading, those
    with the least loss a byte come first, up to a price, in nats a byte, that is the same in all
    layers: at equal prices nothing is gained by moving loss from one expert to another. The price
    rises while tokens lose less than allowed, and falls while they lose more. Besides, a token has
    at most what is allowed for the layers up to this one (the cosine schedule), and what the tokens
    of its sequence before it left. `keep_top` experts of each token are never lowered.

    What was skipped or lowered is read behind, after all else, within --transition-rate. Look-ahead
    loads what is not predicted to be skipped. Prompts are lossless.
    """

    name = "floor"
    summary = (
        "The user says what an answer may lose, and experts that are missing are skipped or "
        "computed low where that saves most reading. What is in memory is used as it is."
    )
    Settings = FloorSettings
    most_tiers = 2
    reason = "decides by the loss that is allowed"
    callback = Callback.ALWAYS
    skips = True
    foresees = True
    lossless: ClassVar[Mapping[str, Any]] = {"max_loss": 0.0}
    settings: FloorSettings

    def __init__(
        self,
        shape: ModelShape,
        settings: FloorSettings | None = None,
        rules: Rules | None = None,
    ) -> None:
        super().__init__(shape, settings, rules)
        self.settings = self.settings.settled()
        self._estimate: KlEstimate | None = None
        self._nats: list[list[list[float]]] = []  # [layer][expert][tier, the last one to skip]
        self._bytes = [
            [shape.expert_slot_bytes(layer, tier) for tier in range(len(shape.tiers))]
            for layer in range(shape.n_layers)
        ]
        self._accounts: dict[int, _Account] = {}
        self._prompts = Prompts(self.rules, lambda layer, n_used: n_used, ())
        self._prefetch = self.settings.prefetch if self.n_ahead else OFF
        self._monitor = Monitor()
        self._prediction = Prediction(shape.n_layers)
        self._running: list[_Account] = []
        self._behind_bytes = 0.0
        self._pending: tuple[int, list[int]] = (0, [])
        self._step, self._tokens, self._spent = -1, 0, 0.0
        self._routed = self._missing = self._lowered = 0
        self.settings_changed()

    @property
    def by_residency(self) -> bool:
        return True

    @property
    def n_ahead(self) -> int:
        return (self.settings.n_ahead or 0) if self.settings.prefetch != OFF else 0

    @property
    def transition_rate(self) -> int:
        return rate_of(self.settings.transition_rate)

    @property
    def fresh(self) -> bool:
        return self._tokens == 0

    @property
    def estimate(self) -> KlEstimate | None:
        """What set_estimate said."""
        return self._estimate

    def set_estimate(self, estimate: KlEstimate) -> None:
        self._estimate = estimate
        self._nats = estimate.nats.tolist()

    def settings_changed(self) -> None:
        """Deals the budget out by depth, and begins with a price at which it would be spent if all
        ways to save were alike."""
        budget, shape = self.settings.max_loss, self.shape
        # What the critical experts leave: nothing in the first layer, most in the last one.
        schedule = self.settings.loss_schedule
        left = [schedule == FLAT or 1 - share for share in ratios(0.0, shape.n_layers, schedule)]
        total = math.fsum(left) or 1.0
        self._allowed = [
            budget * math.fsum(left[: layer + 1]) / total for layer in range(shape.n_layers)
        ]
        missing = shape.n_layers * shape.n_expert_used * _FIRST_MISSING
        self._price = budget / (missing * self._bytes[0][0])

    def plan(self, budget_bytes: int) -> SlotPlan:
        """One group per (layer, kind, tier), as many slots in each layer. Raises BudgetError."""
        shape = self.shape
        low_bytes, low_counts = 0, [0] * shape.n_layers
        if len(shape.tiers) > 1:
            sizes = [each[1] for each in self._bytes]
            wanted = self.settings.low_share * budget_bytes / sum(sizes)
            low_counts = [max(1, min(shape.n_expert, int(wanted)))] * shape.n_layers
            low_bytes = sum(n * size for n, size in zip(low_counts, sizes, strict=True))
        counts = even_slots(shape, budget_bytes - low_bytes)
        self._prompts.room = [(n, 0) for n in counts]
        n_tiers, pairs = len(shape.tiers), zip(counts, low_counts, strict=True)
        return layer_groups(shape, [list(pair)[:n_tiers] for pair in pairs])

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        if event.phase != _DECODE:
            if event.n_tokens > 1:
                self._prompts.decide(event, view, out, self._prefetch != OFF)
            return
        if not self._nats:
            raise PolicyError(f"the policy {self.name} was not told what lower precisions lose")
        if event.step != self._step:
            self._begin(event)
        lowered = self._lower(event, view, out)
        if event.n_tokens == 1:
            used = [each for each in event.ids.tolist() if out.tier[each] != SKIP]
            self._prediction.observe(event.layer, used)
        if event.n_ahead and self._prefetches():
            self._ask(event, view, out)
        if self.settings.read_behind:
            self._ask_behind(out)
            self._pending = event.layer, lowered

    def _begin(self, event: RouteEvent) -> None:
        """A step's first layer. What a failed step spent is forgotten."""
        self._step = event.step
        for account in self._running:
            account.spent = 0.0
        names = event.sequences_array.tolist()
        self._running = [self._accounts.setdefault(each, _Account()) for each in names]

    def _lower(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> list[int]:
        """Writes the tiers of what is skipped or low; returns what of it is not in memory high."""
        layer = event.layer
        resident = view.resident[layer]
        owners: dict[int, list[tuple[_Account, float]]] = {}
        kept: set[int] = set()
        for account, ids, weights in self._tokens_of(event):
            for place, at in enumerate(gate_order(weights)):
                expert = ids[at]
                if resident[expert] != 0 or self.settings.skip_present:
                    owners.setdefault(expert, []).append((account, weights[at] ** 2))
                    if place < self.settings.keep_top:
                        kept.add(expert)
        self._routed += len(event.ids) * event.n_tokens
        self._missing += sum(resident[expert] != 0 for expert in owners)
        room = self._allowed[layer]
        lowered: dict[int, int] = {}
        for way in sorted(self._ways(layer, owners, kept, resident)):
            if way.nats_per_byte > self._price:
                break
            bills = [(account, square * way.nats) for account, square in owners[way.expert]]
            broke = any(account.spent + bill > account.left + room for account, bill in bills)
            if broke or lowered.get(way.expert) != way.instead_of:
                continue
            for account, bill in bills:
                account.spent += bill
            lowered[way.expert] = way.tier
        for expert, tier in lowered.items():
            out.tier[expert] = tier
        if lowered:
            out.renormalize = self.rules.renormalize
            self._lowered += len(lowered)
        return [expert for expert in lowered if resident[expert] != 0]

    def _tokens_of(
        self, event: RouteEvent
    ) -> Iterator[tuple[_Account, Sequence[int], Sequence[float]]]:
        """(the account, experts, weights) of each token."""
        if event.n_tokens == 1:
            yield self._running[0], event.ids.tolist(), event.weights.tolist()
            return
        accounts = self._running
        if len(accounts) != event.n_tokens:  # a layer that some tokens of the step do not reach
            accounts = [self._accounts[each] for each in event.sequences_array.tolist()]
        yield from zip(
            accounts, event.ids_array.tolist(), event.weights_array.tolist(), strict=True
        )

    def _ways(
        self,
        layer: int,
        owners: Mapping[int, Sequence[tuple[_Account, float]]],
        kept: Collection[int],
        resident: Sequence[int],
    ) -> Iterator[_Way]:
        """What may be done with experts of a layer that are not kept. A low copy in memory stands
        for the high one. An absent expert is skipped; or read low, where that costs less for each
        byte than skipping, and then skipped instead. One in memory high is only skipped."""
        high_bytes = self._bytes[layer][0]
        low_bytes = self._bytes[layer][1] if len(self.shape.tiers) > 1 else 0
        for expert, of_tokens in owners.items():
            if expert in kept:
                continue
            nats, square = self._nats[layer][expert], sum(each for _, each in of_tokens)
            skip, low = nats[-1], nats[1]
            if resident[expert] == 0:
                saved = self.settings.skip_present * high_bytes
                yield _Way(square * skip / saved, expert, SKIP, skip, None)
            elif resident[expert] != ABSENT:
                yield _Way(square * low / high_bytes, expert, resident[expert], low, None)
            elif low_bytes and low * high_bytes < skip * (high_bytes - low_bytes):
                price = square * low / (high_bytes - low_bytes)
                yield _Way(price, expert, 1, low, None)
                yield _Way(square * (skip - low) / low_bytes, expert, SKIP, skip - low, 1)
            else:
                yield _Way(square * skip / high_bytes, expert, SKIP, skip, None)

    def _ask(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        """Asks for what the next layer is predicted to choose: what is in memory, so that it stays,
        and of the rest what would cost too much to skip."""
        layer = event.layer + 1
        resident, nats = view.resident[layer], self._nats[layer]
        wanted: dict[int, float] = {}
        for row in range(event.n_tokens):
            ids, scores = event.ahead_ids_array[0, row].tolist(), event.ahead_array[0, row]
            # the model's weights have the sum that they have here
            gates = scores * (event.weights_array[row].sum() / max(float(scores.sum()), 1e-30))
            for place, (expert, gate) in enumerate(zip(ids, gates.tolist(), strict=True)):
                cost = math.inf if place < self.settings.keep_top else gate**2 * nats[expert][-1]
                wanted[expert] = wanted.get(expert, 0.0) + cost
        least = self._price * self._bytes[layer][0]
        asked = [e for e, cost in wanted.items() if resident[e] == 0 or cost > least]
        out.prefetch_all(layer, asked, 0)
        if event.n_tokens == 1:
            self._prediction.expect(layer, asked)

    def _ask_behind(self, out: DecisionBuffer) -> None:
        """Asks for the high copies of what was lowered in the layer before, as far as the rate
        goes: for the layer that is being computed, the store takes no prefetch."""
        layer, lowered = self._pending
        if not self.transition_rate:
            out.prefetch_all(layer, lowered, 0)
            return
        n = int(max(0.0, self._behind_bytes) // self._bytes[layer][0])
        out.prefetch_all(layer, lowered[:n], 0)
        self._behind_bytes -= min(n, len(lowered)) * self._bytes[layer][0]

    def _prefetches(self) -> bool:
        return self._prefetch == ON or (self._prefetch == AUTO and self._monitor.on)

    def step_done(self, report: StepReport) -> tuple[()]:
        """A decode step's tokens have lost what they lost: their sequences keep the rest, up to a
        few tokens' budget, and the price follows."""
        for sequence in (*report.ends, *report.starts):
            self._accounts.pop(sequence, None)
        if report.phase != _DECODE:
            return ()
        budget, running = self.settings.max_loss, self._running
        spent = sum(account.spent for account in running)
        for account in running:
            kept = account.left + budget - account.spent
            account.left, account.spent = min(kept, _CARRIED_TOKENS * budget), 0.0
        if running and budget:
            off = 1 - spent / (budget * len(running))
            self._price *= math.exp(_GAIN * max(-1.0, off))
        self._running = []
        self._tokens += report.n_tokens
        self._spent += spent
        most = _BURST_EXPERTS * self._bytes[0][0]
        self._behind_bytes = min(self._behind_bytes + self.transition_rate * report.us / 1e6, most)
        if report.n_tokens == 1 and self._prefetch == AUTO:
            self._monitor.step(report.us)
        return ()

    def report(self) -> Mapping[str, Any]:
        """Since the engine started, of tokens that were decoded: loss, the mean that they are
        foreseen to have lost, in nats; of the experts that they chose, the shares that were not in
        memory high (missing) and that were lowered or skipped. prefetch, recall, precision: as of
        DyMoE."""
        auto = ON if self._monitor.pays else "paused"
        return {
            "max_loss": self.settings.max_loss,
            "loss": self._spent / self._tokens if self._tokens else None,
            "missing": self._missing / self._routed if self._routed else None,
            "lowered": self._lowered / self._routed if self._routed else None,
            "prefetch": auto if self._prefetch == AUTO else self._prefetch,
            "recall": self._prediction.recall(),
            "precision": self._prediction.precision(),
        }

    def describe(self) -> str:
        tiers = "/".join((*self.shape.tiers, "skip"))
        text = f"floor {tiers} at a loss of {self.settings.max_loss:g} nats a token"
        return text if self._monitor.pays else text + ", prefetch paused"
