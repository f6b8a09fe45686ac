"""What a policy is: arithmetic from read-only views to a decision.

No clock, no I/O, no global; the same object runs live and in replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from orchestrator.errors import BudgetError
from orchestrator.events import DecisionBuffer, RouteEvent, StepReport, StoreView

Transition = tuple[int, int, int]  # layer, expert, tier to bring it to


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as policies see it, reduced to the tiers in use (tier 0 the best of them).

    slots[layer][tier] maps a matrix kind to its slot size in bytes.
    """

    n_expert: int
    n_expert_used: int
    tiers: tuple[str, ...]
    slots: tuple[tuple[dict[int, int], ...], ...]

    @property
    def n_layers(self) -> int:
        return len(self.slots)

    def expert_slot_bytes(self, layer: int, tier: int) -> int:
        """Slot bytes of one whole expert: all of its matrices."""
        return sum(self.slots[layer][tier].values())


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What a user can tune. skip_low: experts that are not critical are skipped (4/0).
    schedule: "cosine", "linear" or "flat"; prefetch: "on", "off", or "auto", which stops it
    while it does not pay; heavy_hitters: the share of a prompt's tokens that count as such;
    prompts_pass: a prompt's experts pass through a part of the slots; exact: what is decided
    does not depend on what is in memory.

    Of dynaexq: update_steps, decode steps between two updates of the hot sets, 0 for none;
    hotness_decay, its alpha; hysteresis, in mean scores of a layer, and rank_slack, in ranks;
    hot_experts, the most that a layer may have in the high tier.
    """

    retention: float = 0.75
    skip_low: bool = False
    prefetch: str = "auto"
    renormalize: bool = False
    schedule: str = "cosine"
    heavy_hitters: float = 0.4
    prompts_pass: bool = True
    exact: bool = False
    update_steps: int = 32
    hotness_decay: float = 0.8
    hysteresis: float = 0.25
    rank_slack: int = 0
    hot_experts: int | None = None


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """Slots of one size that evict each other in least-recently-used order. n_passing: how
    many of them passing requests may take from the others."""

    slot_bytes: int
    n_slots: int
    n_passing: int = 1


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Slot groups, and which one holds each (layer, kind, tier)."""

    groups: tuple[SlotGroup, ...]
    group_of: dict[tuple[int, int, int], int]

    @property
    def total_bytes(self) -> int:
        return sum(group.slot_bytes * group.n_slots for group in self.groups)


class Policy(Protocol):
    """One way to decide. needs_callback False: every routed expert is asked for in tier 0
    and Python is never called."""

    name: str
    needs_callback: bool
    retention: float | None  # None where nothing is retained

    @property
    def needs_importance(self) -> bool:
        """Whether prefill events must carry the attention that tokens receive."""

    def plan(self, budget_bytes: int) -> SlotPlan:
        """How the budget is divided into slots. Raises BudgetError when it is too small."""

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        """Writes a tier for the routed experts (0 where nothing is written) and what to
        prefetch. Mutates only `out`; keeps no reference to what it was given."""

    def step_done(self, report: StepReport) -> Sequence[Transition] | None:
        """After every step that succeeded; returns the transitions to start, if any."""

    def report(self) -> dict[str, Any]:
        """What the policy knows about its own work, JSON-ready; empty where nothing."""

    def describe(self) -> str:
        """One phrase for the mode line."""

    def set_retention(self, retention: float) -> bool:
        """Changes the share of critical experts while running; False where there is none."""


@runtime_checkable
class Counting(Protocol):
    """What a policy has besides, where it decides between steps and not during them: it needs no
    callback, and gets counts and states with each StepReport.

    default_tier: what every routed expert is asked for; a better copy in memory is used.
    """

    default_tier: int
    caching: bool  # not every expert is in memory, so that tokens may wait
    updates: int  # so often the hot sets were renewed

    @property
    def fresh(self) -> bool:
        """Whether no step was reported yet."""

    @property
    def hotness(self) -> np.ndarray:
        """What it has learned, float64 [n_layers, n_expert], a copy."""

    def set_hotness(self, scores: np.ndarray) -> None:
        """Starts from what an earlier run learned."""

    def start(self) -> Sequence[Transition]:
        """(layer, expert, tier) to load before the first token; after plan."""


@dataclass(frozen=True, slots=True)
class Share:
    """One claim on a budget: at least `floor` units, at most `full`, in proportion to weight."""

    unit_bytes: int
    floor: int
    full: int
    weight: float


def divide(shares: Sequence[Share], budget_bytes: int) -> list[int]:
    """Units for each share: clamp(s * weight, floor, full) with the largest s whose sum fits
    the budget; what rounding left over goes, unit by unit, to the share that is furthest
    below its proportion. Raises BudgetError when the floors alone do not fit.
    """
    needed = sum(share.unit_bytes * share.floor for share in shares)
    if needed > budget_bytes:
        raise BudgetError(
            f"{budget_bytes} bytes are too few for the expert slots: "
            f"the smallest budget that works is {needed} bytes",
            needed,
        )

    def counts(scale: float) -> list[int]:
        return [max(share.floor, min(share.full, int(scale * share.weight))) for share in shares]

    def cost(units: Sequence[int]) -> int:
        return sum(share.unit_bytes * n for share, n in zip(shares, units, strict=True))

    positive = [share for share in shares if share.weight > 0]
    low, high = 0.0, max((share.full / share.weight for share in positive), default=0.0) + 1.0
    if cost(counts(high)) <= budget_bytes:
        return counts(high)
    for _ in range(64):
        middle = (low + high) / 2
        if cost(counts(middle)) <= budget_bytes:
            low = middle
        else:
            high = middle
    units = counts(low)
    rest = budget_bytes - cost(units)
    waiting = [i for i, share in enumerate(shares) if share.weight > 0]
    while waiting:
        waiting = [i for i in waiting if units[i] < shares[i].full and shares[i].unit_bytes <= rest]
        if not waiting:
            break
        neediest = min(waiting, key=lambda i: (units[i] + 1) / shares[i].weight)
        units[neediest] += 1
        rest -= shares[neediest].unit_bytes
    return units
