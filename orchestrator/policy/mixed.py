"""Every expert in memory, in whichever tier of the file pays best for its bytes: a resident plan
over all tiers, which follows what is used (DynaExq, generalised)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.allocation.hull import Hull, in_tiers, lost
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
    Precisions,
    TierOffer,
    Wants,
)
from orchestrator.policy.learning import MAX_QUEUE, Intervals, Learning, wants_to_learn
from orchestrator.settings import again


def exchanges(
    losses: np.ndarray, tiers: np.ndarray, pool_of: np.ndarray, free: np.ndarray, margin: float
) -> list[tuple[int, int]]:
    """Pairs (riser, faller) of experts that had better be in each other's tier, the largest gain
    first; no expert is in two of them. Experts are numbered layer by layer.

    losses: w L, float64 [n_layers, n_expert, n_tiers]. tiers uint8 [n_layers, n_expert]: where each
    is. pool_of int64 [n_layers, n_tiers]: the pool that holds a layer's experts in a tier, so that
    experts with the same two pools may exchange; -1: in a tier that nobody is given. free bool
    [n_layers, n_expert]: may change. margin: a pair has to gain more than so many times what an
    expert gains between the two tiers in the mean; with two tiers and losses alike that is
    DynaExq's hysteresis.
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
    """As TierPools.moves_to, by the losses w L, float64 [n_layers, n_expert, n_tiers].

    Only the lowest tier has slots in reserve. Where nothing is under way and nobody finds a slot,
    those that are to fall wait in the lowest tier, and free theirs: the pools hold as many experts
    of each tier as are wanted there, so that a slot which is free has somebody who wants it.
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


# This share of a layer's use is dealt out evenly, so that rarely used experts count as well.
ALIKE = 0.05
# Less than this share of the budget counts as nothing.
SMALL = 0.001
# One slot is in reserve for so many experts.
_EXPERTS_PER_MOVE = 128
# While experts move, the policy asks where they are once in so many microseconds of steps. To ask
# takes a third of a fast model's token, and a move takes several tokens.
LOOK_US = 4000.0


@dataclass(frozen=True)
class MixedSettings(Intervals):
    """What a user can tune."""

    losses: Path | None = again(Shared, "losses")


class _AnyTiers(Precisions):
    def high(self, offer: TierOffer) -> FileTier:
        """The tier above the best one whose copies all fit; a better one where a slot of it, which
        the store wants, takes next to nothing of the budget."""
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
    """tiers: of each expert, uint8 [n_layers, n_expert]; pools: their slots."""

    pools: TierPools
    tiers: np.ndarray

    def first(self, hotness: np.ndarray | None = None) -> Sequence[Transition]:
        """Every expert where the plan has it, whatever the hotness."""
        return every_expert_to(self.tiers)

    @property
    def per_tier(self) -> list[int]:
        """How many experts are in each tier. Exchanges do not change it."""
        found: list[int] = np.bincount(self.tiers.ravel(), minlength=len(self.shape.tiers)).tolist()
        return found

    @property
    def text(self) -> str:
        counts = zip(self.per_tier, self.shape.tiers, strict=True)
        parts = ", ".join(f"{n} in {name}" for n, name in counts if n)
        return f"mixed, of {self.tiers.size} experts {parts}"


class Mixed(Learning):
    """The allocation of `Hull`: the sum over layers and experts of w L is least under the budget,
    over all tiers in use. L is what the tier costs a use of the expert, in nats where calibrate has
    fitted that, so that layers compare; else its mean squared error, or nominal losses. w is the
    share of tokens that use the expert, by what earlier runs learned, with a small part alike for
    all.

    Slots are as many of each tier as this plan has experts in it, in pools that layers of one size
    share. What changes while it runs is which experts have them: behind each interval experts that
    gain by it exchange their tiers, in pairs, by DynaExq's hysteresis, at step boundaries and
    within the transition rate. No token waits, and no token reads.

    A tier that no expert has takes no slots where another one's can hold it: one of each size else.
    The lowest tier has slots in reserve, through which experts move, unless none ever will.
    """

    about = About(
        name="mixed",
        summary=(
            "Every expert is in memory, in the precision of the file that pays best for its bytes, "
            "by how much it is used and what it loses. Experts exchange their precisions in the "
            "background, and no token waits for it."
        ),
        Settings=MixedSettings,
        reason="fills the budget with the best precisions",
        precisions=_AnyTiers(least=2, keeps="several precisions"),
        wants=Wants(all_resident=True),
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
        """The allocation that the budget has room for, by what is known of use and losses."""
        hotness, losses = history.hotness(), history.losses(shape.tiers, per_use=True)
        scores = np.zeros((shape.n_layers, shape.n_expert)) if hotness is None else hotness
        hull = Hull(weighted(shape, scores, losses), slot_sizes(shape))
        tiers = hull.at(hull.least_bytes)
        pools = pools_of(shape, settings, tiers)
        spare, beyond = budget_bytes, budget_bytes if fits(pools, budget_bytes) else 0
        while beyond > 0:  # slots in reserve and those of unused tiers come on top
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
        self._weighted: tuple[np.ndarray, np.ndarray] | None = None  # of which scores
        self._pools, self._wanted = self.placement.pools, self.placement.tiers.copy()
        self._used = sorted(set(self._wanted.ravel().tolist()))  # tiers that experts have
        self._moved = self._exchanged = 0
        self._unseen_us = math.inf  # of steps since the last look
        # The states (resident, target) in which no expert found a slot: asking again is of no use.
        self._no_moves: tuple[bytes, bytes] | None = None

    @property
    def weighted(self) -> np.ndarray:
        """w L of each expert in each tier, float64 [n_layers, n_expert, n_tiers]."""
        of = self._weighted
        if of is None or of[0] is not self._scores:
            found = weighted(self.shape, self._scores, self.placement.losses)
            of = self._weighted = self._scores, found
        return of[1]

    def _wants_report(self, phase: Phase) -> bool:
        """As every policy that learns, except that fast tokens do not each look after what is under
        way."""
        looks = not self._at_rest and self._unseen_us >= LOOK_US
        return looks or self._may_end_interval(phase)

    def on_step(self, report: StepReport) -> Sequence[Transition]:
        """Count the step, and return the moves that have slots now."""
        found = self._learn(report)
        self._choose_reports()
        return found

    def _learn(self, report: StepReport) -> Sequence[Transition]:
        self._unseen_us += report.us
        if report.counts is None or report.resident is None or report.target is None:
            self._count(report)
            return ()
        resident, target = report.resident, report.target
        self._unseen_us = report.us  # a step that takes LOOK_US by itself is looked at each time
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
        """What is wanted from now on. free bool [n_layers, n_expert]: experts that are where they
        should be."""
        pool_of = np.full((self.shape.n_layers, len(self.shape.tiers)), -1)
        pool_of[:, self._used] = self._pools.pool_of[:, self._used]
        pairs = exchanges(self.weighted, self._wanted, pool_of, free, self.settings.hysteresis)
        flat = self._wanted.reshape(-1)
        for riser, faller in pairs[:MAX_QUEUE]:
            flat[riser], flat[faller] = flat[faller], flat[riser]
        self._exchanged += len(pairs[:MAX_QUEUE])

    def report(self) -> Mapping[str, Any]:
        """Since the engine started: updates of the hotness, exchanges of two experts, moves that
        they took; experts in each tier; the loss of the plan as a share of what the smallest tier
        alone would lose."""
        losses = self.weighted
        least = float(losses[..., -1].sum())
        return {
            "updates": self.updates,
            "exchanges": self._exchanged,
            "moves": self._moved,
            "experts": dict(zip(self.shape.tiers, self.placement.per_tier, strict=True)),
            "loss": lost(losses, self._wanted) / least if least else 0.0,
        }


def pools_of(shape: ModelShape, settings: MixedSettings, tiers: np.ndarray) -> TierPools:
    """Slots for an allocation. A tier without experts shares those of the next better one that
    has some, where slots can be shared."""
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
    """Whether the slots of these pools are within a budget."""
    return pools.plan().total_bytes <= budget_bytes


def weighted(shape: ModelShape, scores: np.ndarray, losses: np.ndarray | None) -> np.ndarray:
    """w L of each expert in each tier, float64 [n_layers, n_expert, n_tiers]."""
    each = nominal(shape) if losses is None else losses
    found: np.ndarray = weights(scores)[..., None] * each
    return found


def weights(scores: np.ndarray) -> np.ndarray:
    """w of each expert: its share of the layer's use, of which ALIKE is alike for all; float64
    [n_layers, n_expert], each row of sum 1. scores: S; a layer without any counts as used alike."""
    found: np.ndarray = (1 - ALIKE) * shares(scores) + ALIKE / scores.shape[1]
    return found


def nominal(shape: ModelShape) -> np.ndarray:
    """What stands for a loss table where there is none, float64 [n_layers, n_expert, n_tiers]: each
    bit more divides the mean squared error by four, in all experts alike."""
    bits = shape.bits or tuple(map(nominal_bits, shape.tiers))
    return nominal_losses(bits, shape.n_layers, shape.n_expert)
