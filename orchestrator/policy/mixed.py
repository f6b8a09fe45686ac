"""A policy that keeps every expert in memory, in the precision with the best value for its bytes.

The policy generalises DynaExq: it plans over all tiers (precisions) of the file and follows the
usage of the experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.allocation.hull import Hull, in_tiers, total_loss
from orchestrator.allocation.pools import (
    Places,
    TierPools,
    every_expert_to,
    nominal_bits,
    nominal_losses,
    shares,
    slot_sizes,
)
from orchestrator.allocation.settings import Shared
from orchestrator.allocation.slots import FileTier, ModelShape, Rules, Transition
from orchestrator.events import ABSENT, Phase, StepReport
from orchestrator.policy.base import (
    About,
    History,
    Placement,
    PolicyRequirements,
    Precisions,
    TierOffer,
)
from orchestrator.policy.learning import MAX_QUEUE, Intervals, Learning, wants_to_learn
from orchestrator.settings import inherit


def exchanges(
    losses: np.ndarray, tiers: np.ndarray, pool_of: np.ndarray, free: np.ndarray, margin: float
) -> list[tuple[int, int]]:
    """Return pairs (riser, faller) of experts that should exchange their tiers (precisions).

    The riser gets the faller's tier, which is better, and the faller gets the riser's tier. Pairs
    that save the most loss come first. An expert is the number layer * n_expert + index. Two
    experts can be a pair only if their layers share a memory pool in the riser's tier, and also
    share a pool in the faller's tier.

    - losses: each expert's quality loss in each tier, multiplied by its use, [n_layers, n_expert,
      n_tiers].
    - tiers: each expert's tier now, [n_layers, n_expert].
    - pool_of: the number of each layer's memory pool in each tier, [n_layers, n_tiers]; -1 for
      unused tiers.
    - free: whether each expert may be exchanged, bool [n_layers, n_expert].
    - margin: the minimum saving, as a multiple of the experts' mean loss difference between the two
      tiers.
    """
    _, n_expert, n_tiers = losses.shape
    flat, at = losses.reshape(-1, n_tiers), tiers.reshape(-1)
    pairs: list[tuple[float, int, int]] = []
    may_leave = [free.reshape(-1) & (at == tier) for tier in range(n_tiers)]
    held = [tier for tier in range(n_tiers) if may_leave[tier].any()]
    for high, low in combinations(held, 2):
        gains = flat[:, low] - flat[:, high]
        least = margin * float(np.abs(gains).mean())
        both = pool_of[:, [high, low]]
        for pair in sorted({(a, b) for a, b in both.tolist() if min(a, b) >= 0}):
            here = np.repeat((both == pair).all(axis=1), n_expert)
            rising, falling = (np.flatnonzero(here & may_leave[tier]) for tier in (low, high))
            if not (len(rising) and len(falling)):
                continue
            if gains[rising].max() - gains[falling].min() <= least:
                continue  # no pair gains enough
            rising = rising[np.argsort(-gains[rising], kind="stable")]
            falling = falling[np.argsort(gains[falling], kind="stable")]
            n = min(len(rising), len(falling))
            whole = gains[rising[:n]] - gains[falling[:n]]
            better = whole > least
            found = (each[:n][better].tolist() for each in (whole, rising, falling))
            pairs += zip(*found, strict=True)
    pairs.sort(key=lambda each: -each[0])
    moved: set[int] = set()
    chosen = []
    for _, riser, faller in pairs:
        if not {riser, faller} & moved:
            moved |= {riser, faller}
            chosen.append((riser, faller))
    return chosen


def moves(
    pools: TierPools,
    wanted: np.ndarray,
    resident: np.ndarray,
    target: np.ndarray,
    losses: np.ndarray,
) -> list[Transition]:
    """Return the moves of experts to other tiers (precisions) for which memory slots are free now.

    A move is (layer, expert, new tier). The new tier is the expert's wanted tier.

    If no such move is possible and no expert is moving, the result has temporary moves instead. A
    temporary move takes an expert that waits for a lower tier to the lowest tier, which has spare
    slots. The expert's old slot, in a better tier, is then free for other experts.

    - pools: the memory slots.
    - wanted: the tier that each expert should have, [n_layers, n_expert].
    - resident: each expert's tier now, [n_layers, n_expert].
    - target: each expert's tier after its running move, or its tier now, [n_layers, n_expert].
    - losses: each expert's quality loss in each tier, multiplied by its use, [n_layers, n_expert,
      n_tiers].
    """
    lowest = losses.shape[2] - 1
    wanted = np.where(resident == ABSENT, ABSENT, wanted)
    before, goals = (np.minimum(tiers, lowest) for tiers in (resident, wanted))
    gains = in_tiers(losses, before) - in_tiers(losses, goals)
    found = pools.moves_to(wanted, resident, target, gains)
    if found or (resident != target).any():
        return found
    waiting = np.where((wanted > resident) & (resident < lowest), lowest, resident)
    return pools.moves_to(waiting, resident, target, gains)


# This share of a layer's usage is distributed uniformly, so that rarely used experts count too.
UNIFORM_SHARE = 0.05
# A share of the budget that counts as negligible.
SMALL = 0.001
# Number of experts per reserve slot.
_EXPERTS_PER_MOVE = 128
# While experts move, the policy requests their states once per this many microseconds of steps.
# A request takes a third of a fast model's token time, and a move takes several tokens.
LOOK_US = 4000.0


@dataclass(frozen=True)
class MixedSettings(Intervals):
    """Settings of the policy `mixed`, which chooses a precision for each expert by its usage."""

    losses: Path | None = inherit(Shared, "losses")


class _AnyTiers(Precisions):
    def high(self, offer: TierOffer) -> FileTier:
        """Return the best tier (precision) of a model file that the policy uses.

        This is the better of two tiers:

        - The tier that is one step better than the best tier in which all experts fit in the memory
          budget. Of q8_0, q4_k and q2_k, for example, it is q8_0 if all experts fit in q4_k. Some
          experts can then have q8_0.
        - The best tier in which an average expert takes at most 0.1 % of the budget, if there is
          one.

        offer: the tiers of the model file, and the budget.
        """
        tiers = offer.tiers
        fits = next((each for each in tiers if offer.fits_whole(each)), tiers[-1])
        above = tiers[max(0, fits - 1)]
        for better in tiers[:above]:
            shape = offer.shape(better)
            n_experts = shape.n_layers * shape.n_expert
            if shape.all_slot_bytes() <= SMALL * n_experts * offer.budget_bytes:
                return better
        return above


@dataclass(frozen=True, kw_only=True)
class MixedPlacement(Placement):
    """The expert slots of the policy `mixed`, and the tier (precision) planned for every expert.

    - pools: the slots, grouped by size.
    - tiers: the planned tiers, uint8 [n_layers, n_expert].
    """

    pools: TierPools
    tiers: np.ndarray

    def first(self, hotness: np.ndarray | None = None) -> Sequence[Transition]:
        """Return the transitions that load every expert in its planned tier (precision).

        Each transition is (layer, expert, tier). The argument hotness is ignored, because the tiers
        were planned before.
        """
        return every_expert_to(self.tiers)

    @property
    def per_tier(self) -> list[int]:
        """The planned number of experts in each tier (precision), best tier first."""
        found: list[int] = np.bincount(self.tiers.ravel(), minlength=len(self.shape.tiers)).tolist()
        return found

    @property
    def text(self) -> str:
        counts = zip(self.per_tier, self.shape.tiers, strict=True)
        parts = ", ".join(f"{n} in {name}" for n, name in counts if n)
        return f"mixed, {self.tiers.size} experts: {parts}"


class Mixed(Learning):
    """A policy that gives each expert a precision (tier), for minimal loss in a memory budget.

    All experts are in memory. The policy minimises the quality loss, the sum of w L over all
    experts:

    - L: the loss of one use of the expert in the chosen tier, in nats if known.
    - w: the expert's share of the uses in its layer. Unused experts get a small share.

    The number of experts per tier is fixed. After each interval of steps, pairs of experts may
    exchange their tiers, because the usage changes.
    """

    about = About(
        name="mixed",
        summary=(
            "Keeps every expert in memory. Experts that are used often and lose much quality in "
            "low precision get the better precisions. Precisions change in the background when the "
            "usage changes."
        ),
        Settings=MixedSettings,
        reason="keeps every expert in memory, in the best precisions that fit",
        precisions=_AnyTiers(least=2, keeps="several precisions"),
        wants=PolicyRequirements(all_resident=True),
    )
    settings: MixedSettings
    placement: MixedPlacement

    @classmethod
    def place(
        cls,
        shape: ModelShape,
        settings: Any,
        rules: Rules,
        budget_bytes: int,
        history: History,
    ) -> MixedPlacement:
        """Choose the precision (tier) of every expert for a memory budget.

        Returns the placement, with memory slots for all experts. The total quality loss is
        minimised, according to the expert usage and the losses in `history`.
        """
        hotness, losses = history.hotness(), history.losses(shape.tiers, per_use=True)
        scores = np.zeros((shape.n_layers, shape.n_expert)) if hotness is None else hotness
        hull = Hull(weighted(shape, scores, losses), slot_sizes(shape))
        tiers = hull.at(hull.least_bytes)
        pools = pools_of(shape, settings, tiers)
        spare, beyond = budget_bytes, budget_bytes if fits(pools, budget_bytes) else 0
        while beyond > 0:  # reserve slots and slots of unused tiers exceed the budget
            tiers = hull.at(spare)
            pools = pools_of(shape, settings, tiers)
            beyond = pools.plan().total_bytes - budget_bytes
            spare -= beyond
        wants = replace(
            wants_to_learn(cls.about.wants, settings), default_tier=len(shape.tiers) - 1
        )
        return MixedPlacement(
            *(cls, shape, settings, rules, pools.plan(), wants),
            losses=losses,
            pools=pools,
            tiers=tiers,
        )

    def _set_up(self) -> None:
        super()._set_up()
        self._weighted: tuple[np.ndarray, np.ndarray] | None = None  # (scores, their w L)
        self._pools, self._wanted = self.placement.pools, self.placement.tiers.copy()
        self._used = sorted(set(self._wanted.ravel().tolist()))  # tiers that experts have
        self._moved = self._exchanged = 0
        # Microseconds of steps since the last report with counts and states.
        self._unseen_us = math.inf
        # The states (resident, target) for which no move found a slot; they need no second search.
        self._no_moves: tuple[bytes, bytes] | None = None

    @property
    def weighted(self) -> np.ndarray:
        """The loss of each expert in each tier, multiplied by how often tokens use the expert.

        The array is float64 [n_layers, n_expert, n_tiers].
        """
        of = self._weighted
        if of is None or of[0] is not self._scores:
            found = weighted(self.shape, self._scores, self.placement.losses)
            of = self._weighted = self._scores, found
        return of[1]

    def _wants_report(self, phase: Phase) -> bool:
        """Return whether the policy needs a report about experts after a step of this phase.

        The report has the number of tokens routed to each expert, and the tiers of the experts.
        While experts move, the policy needs one report per LOOK_US microseconds of steps. The
        policy also needs a report at the end of an interval.
        """
        looks = not self._at_rest and self._unseen_us >= LOOK_US
        return looks or self._may_end_interval(phase)

    def on_step(self, report: StepReport) -> Sequence[Transition]:
        """Count the expert use of a finished step, and return the experts to move to another tier.

        Each move is (layer, expert, new tier). A tier is a precision. The result has only the moves
        for which a memory slot is free now.
        """
        found = self._learn(report)
        self._choose_reports()
        return found

    def _learn(self, report: StepReport) -> Sequence[Transition]:
        self._unseen_us += report.us
        if report.counts is None or report.resident is None or report.target is None:
            self._count(report)
            return ()
        resident, target = report.resident, report.target
        self._unseen_us = report.us  # a step longer than LOOK_US is followed by a full report
        if self._count(report):
            self._exchange((resident == target) & (resident == self._wanted))
            self._no_moves = None
        there = bool((resident == self._wanted).all())
        self._at_rest = there and bool((target == resident).all())
        states = resident.tobytes(), target.tobytes()
        if there or states == self._no_moves:
            return ()
        found = moves(self._pools, self._wanted, resident, target, self.weighted)
        self._moved += len(found)
        self._no_moves = None if found else states
        return found

    def _exchange(self, free: np.ndarray) -> None:
        """Choose pairs of experts that exchange their wanted tiers, and change these tiers.

        free: the experts that are in their wanted tier and may be chosen, bool [n_layers,
        n_expert].
        """
        pool_of = np.full((self.shape.n_layers, len(self.shape.tiers)), -1)
        pool_of[:, self._used] = self._pools.pool_of[:, self._used]
        pairs = exchanges(self.weighted, self._wanted, pool_of, free, self.settings.hysteresis)
        flat = self._wanted.reshape(-1)
        for riser, faller in pairs[:MAX_QUEUE]:
            flat[riser], flat[faller] = flat[faller], flat[riser]
        self._exchanged += len(pairs[:MAX_QUEUE])

    def report(self) -> Mapping[str, Any]:
        """Return figures about the policy's work since the runtime started, by name.

        - updates: how often the measured expert usage was updated.
        - exchanges: the number of pairs of experts that were chosen to exchange their tiers
          (precisions).
        - moves: the number of experts that were requested in another tier.
        - experts: the planned number of experts in each tier.
        - loss: the total quality loss in the chosen tiers, divided by the total loss if all experts
          were in the lowest tier.
        """
        losses = self.weighted
        least = float(losses[..., -1].sum())
        return {
            "updates": self.updates,
            "exchanges": self._exchanged,
            "moves": self._moved,
            "experts": dict(zip(self.shape.tiers, self.placement.per_tier, strict=True)),
            "loss": total_loss(losses, self._wanted) / least if least else 0.0,
        }


def pools_of(shape: ModelShape, settings: MixedSettings, tiers: np.ndarray) -> TierPools:
    """Return memory slots for experts whose tiers (precisions) were planned.

    Each tier has a slot for each of its planned experts. The lowest tier also has some spare slots,
    if the settings let experts change their tiers.

    A tier without planned experts also needs slots. It uses the slots of the next better tier, if
    these are for planned experts and can hold other tiers (shape.shares_slots). Otherwise, it gets
    one slot for each group of layers with similar expert sizes.

    tiers: the planned tier of each expert, [n_layers, n_expert]. Tier 0 is the best.
    """
    places: list[Places] = []
    last = len(shape.tiers) - 1
    moves = bool(settings.update_steps if settings.update_ms is None else settings.update_ms)
    for tier in range(last + 1):
        n = (tiers == tier).sum(axis=1).tolist()
        if not any(n) and shape.shares_slots and places and any(places[-1].n_experts):
            before = places.pop()
            held, reserve = (*before.tiers, tier), moves and tier == last
            places.append(Places(held, before.n_experts, reserve, _EXPERTS_PER_MOVE))
        else:
            places.append(Places((tier,), n, moves and tier == last, _EXPERTS_PER_MOVE))
    return TierPools(shape, places)


def fits(pools: TierPools, budget_bytes: int) -> bool:
    """Return whether all slots of these pools together are within a budget."""
    return pools.plan().total_bytes <= budget_bytes


def weighted(shape: ModelShape, scores: np.ndarray, losses: np.ndarray | None) -> np.ndarray:
    """Return the loss of each expert in each tier, multiplied by how often tokens use the expert.

    The result is float64 [n_layers, n_expert, n_tiers].

    - scores: the fraction of tokens that use each expert, [n_layers, n_expert].
    - losses: the loss of one use of each expert in each tier. With None, nominal losses are used:
      each further bit per weight divides the loss by four.
    """
    each = nominal(shape) if losses is None else losses
    found: np.ndarray = weights(scores)[..., None] * each
    return found


def weights(scores: np.ndarray) -> np.ndarray:
    """Return each expert's fraction of all uses in its layer, float64 [n_layers, n_expert].

    Each layer's values sum to 1. The part UNIFORM_SHARE of this sum is divided equally among the
    experts, so that rarely used experts count too. A layer without uses gets equal values.

    scores: how often tokens use each expert, [n_layers, n_expert].
    """
    found: np.ndarray = (1 - UNIFORM_SHARE) * shares(scores) + UNIFORM_SHARE / scores.shape[1]
    return found


def nominal(shape: ModelShape) -> np.ndarray:
    """Return assumed quality losses of the experts in each tier (precision), if none were measured.

    All experts have the same losses. One more bit per weight divides the loss by four. The losses
    have no unit. The result is float64 [n_layers, n_expert, n_tiers].
    """
    bits = shape.bits or tuple(map(nominal_bits, shape.tiers))
    return nominal_losses(bits, shape.n_layers, shape.n_expert)
