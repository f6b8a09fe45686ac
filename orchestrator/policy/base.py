"""What a policy is: arithmetic from read-only views to a decision.

No clock, no I/O, no global; the same object runs live and in replay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

import numpy as np

from gguf_tools.file.layout import MAX_TIERS
from orchestrator.allocation.estimate import KlEstimate
from orchestrator.allocation.slots import (
    ModelShape,
    Rules,
    SlotPlan,
    Transition,
)
from orchestrator.errors import PolicyError
from orchestrator.events import ABSENT, DecisionBuffer, Phase, RouteEvent, StepReport, StoreView
from orchestrator.settings import Settings


class Callback(Enum):
    """In which steps a policy is asked once per MoE layer. In the others every routed expert is
    asked for in the policy's default tier, or a better one that is in memory, without Python."""

    NEVER = "never"
    PREFILL = "in prefill only"
    ALWAYS = "always"


class TierOffer:
    """What a policy may choose its high tier from: the tiers of a file, best first, and what their
    slots take. low is the index of the low tier that a user named, or None."""

    def __init__(
        self,
        names: Sequence[str],
        shape_of: Callable[[tuple[int, ...]], ModelShape],
        budget_bytes: int,
        low: int | None = None,
    ) -> None:
        """shape_of: from file tier indices to a ModelShape."""
        self.names, self.budget_bytes, self.low = tuple(names), budget_bytes, low
        self._shape_of = shape_of

    def shape(self, *tiers: int) -> ModelShape:
        """The model reduced to some of its tiers."""
        return self._shape_of(tiers)

    def fits_whole(self, tier: int) -> bool:
        """Whether slots for every expert in this tier fit."""
        return self.shape(tier).all_slot_bytes() <= self.budget_bytes


@dataclass(frozen=True, slots=True)
class Wants:
    """What a policy wants of those who run it. The class has the most that any of its instances
    wants; an instance has its own, by its settings and slots, and may change it in `plan` and in
    `recall`.

    callback: in which steps it is asked. default_tier: what is asked for in the others. n_ahead:
    how many layers ahead the routers are asked, 0 for none. importance: events of prompts carry the
    attention that tokens receive. counts: StepReport.counts. tiers: StepReport.resident and target.
    transition_rate: bytes per second that its transitions may read beside decoding, 0 for no limit.
    all_resident: it has every expert in memory, so that only its transitions change versions.
    by_residency: what it decides depends on what is in memory, and so on the disk.
    """

    callback: Callback = Callback.NEVER
    default_tier: int = 0
    n_ahead: int = 0
    importance: bool = False
    counts: bool = False
    tiers: bool = False
    transition_rate: int = 0
    all_resident: bool = False
    by_residency: bool = False


@dataclass(frozen=True, slots=True)
class Precisions:
    """The precisions that a policy works with.

    least, most: how many. keeps: what every expert is kept in one of, as "two precisions", where
    none may be skipped. skips: it may skip experts, whatever its lower tiers are; where none is
    named, it has none. lossless: values of its settings with which every expert is computed in the
    best tier; None where there are none.
    """

    least: int = 1
    most: int = MAX_TIERS
    keeps: str | None = None
    skips: bool = False
    lossless: Mapping[str, Any] | None = None


class Policy:
    """One way to decide. The class says what a policy wants, its methods what it does; what a
    policy leaves alone does nothing.

    name: what a user calls it; summary: what it does, in a sentence for tables of the documents.
    reason: why other policies' options have no effect with it, the end of "NAME, which ...".
    Settings: the record of its own settings, all of which become options. learns: its hotness is
    kept for the next start. weighs_losses: what each expert loses in each tier is wanted, where it
    is known; per_use: with its usual gate weights, in nats where that was fitted. What only some
    policies do is a class below, which they name as a base beside this one.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    reason: ClassVar[str] = "has settings of its own"
    Settings: ClassVar[type[Settings]] = Settings
    precisions: ClassVar[Precisions] = Precisions()
    learns: ClassVar[bool] = False
    per_use: ClassVar[bool] = False
    weighs_losses: bool = False
    wants: Wants = Wants()

    # How often it renewed what it wants in memory.
    updates: int = 0

    def __init_subclass__(cls, **more: Any) -> None:
        """Raises TypeError for a policy whose decisions nobody would ever ask for."""
        super().__init_subclass__(**more)
        if cls.wants.callback is Callback.NEVER and cls.decide is not Policy.decide:
            raise TypeError(f"{cls.__name__} decides, and its callback is Callback.NEVER")

    def __init__(self, shape: ModelShape, settings: Any = None, rules: Rules | None = None) -> None:
        """settings: a record of the class's Settings, None for its defaults. Raises PolicyError
        where the policy cannot work with the model's tiers."""
        skips, precisions = rules is not None and rules.skip, self.precisions
        too_few = len(shape.tiers) < precisions.least
        if precisions.keeps is not None and (too_few or skips):
            raise PolicyError(
                f"the policy {self.name} keeps each expert in one of {precisions.keeps}: give "
                f"--low FILE or a file packed with several tiers, and not --low-tier skip"
            )
        if too_few:
            raise PolicyError(
                f"the policy {self.name} works with {precisions.least} precisions: give --low FILE "
                f"or a file packed with as many tiers"
            )
        self.shape = shape
        self.settings = self.Settings() if settings is None else settings
        self.rules = rules or Rules()

    @classmethod
    def high_tier(cls, offer: TierOffer) -> int:
        """The file tier to take as the best one, where the user left that open."""
        return 0

    @classmethod
    def low_tier(cls, offer: TierOffer, high: int) -> int | None:
        """The file tier to take as the lowest one below the high one; None: as many of those that
        follow as it works with."""
        return offer.low

    @classmethod
    def without_effect(cls, asked: Mapping[str, Any]) -> str | None:
        """A sentence about a setting that can do nothing beside the others that were asked for."""
        return None

    @property
    def fresh(self) -> bool:
        """Whether it would decide as a new one: it was told of no step yet, or keeps nothing."""
        return True

    @property
    def hotness(self) -> np.ndarray | None:
        """What it has learned, float64 [n_layers, n_expert], a copy; None for nothing."""
        return None

    def set_hotness(self, scores: np.ndarray) -> None:
        """Starts from what an earlier run learned, [n_layers, n_expert]."""

    @property
    def losses(self) -> np.ndarray | None:
        """What set_losses said, None where nothing."""
        return None

    def set_losses(self, losses: np.ndarray) -> None:
        """What experts lose in each tier, float64 [n_layers, n_expert, n_tiers]; before start."""

    def plan(self, budget_bytes: int) -> SlotPlan:
        """How the budget is divided into slots. Raises BudgetError when it is too small."""
        raise NotImplementedError

    def asked_shares(self) -> Sequence[float]:
        """Of an answer's experts, the shares asked for in each tier, else skipped. After plan."""
        return (1.0, *[0.0] * (len(self.shape.tiers) - 1))

    def asked_mix(self, uses: np.ndarray) -> np.ndarray:
        """asked_shares, of each expert's uses [n_layers, n_expert] by itself: [.., n_tiers]."""
        return np.broadcast_to(self.asked_shares(), (*uses.shape, len(self.shape.tiers)))

    def start(self) -> Sequence[Transition]:
        """What to load before the first token; after plan."""
        return ()

    def likely(self, resident: np.ndarray, used: np.ndarray) -> Sequence[Transition]:
        """Experts to read into free slots while nothing is asked for, the likeliest first: those
        that are absent, by the share of its layer's uses that each had; none where all are there.

        resident: uint8 [n_layers, n_expert] as of StepReport. used: how often tokens used each
        expert, not negative, [n_layers, n_expert]; where nobody did, they come last, by layers.
        """
        if self.wants.all_resident:
            return ()
        share = used / np.maximum(used.sum(axis=1, keepdims=True), 1e-300)
        order = np.argsort(-share, axis=None, kind="stable")
        layers, experts = np.unravel_index(order, share.shape)
        absent = resident[layers, experts] == ABSENT
        tier = self.wants.default_tier
        pairs = zip(layers[absent].tolist(), experts[absent].tolist(), strict=True)
        return [(layer, expert, tier) for layer, expert in pairs]

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        """Writes a tier for the routed experts (0 where nothing is written) and what to
        prefetch. Mutates only `out`; keeps no reference to what it was given."""

    def wants_report(self, phase: Phase) -> bool:
        """Whether the report of a step of this phase has to carry what it asks for. Where not, its
        counts come with the next one that does, and no expert may be on its way until then."""
        return True

    def step_done(self, report: StepReport) -> Sequence[Transition]:
        """After every step that succeeded; returns the transitions to start."""
        return ()

    def change(self, name: str, value: Any) -> bool:
        """Changes a live setting; False where the policy has none of this name. Slots stay as
        planned. Raises SettingError and what settings_changed raises, and changes nothing then."""
        declared = self.Settings.declared().get(name)
        if declared is None or not declared.live:
            return False
        before = self.settings
        self.settings = replace(before, **{name: value})
        try:
            self.settings_changed()
        except BaseException:
            self.settings = before
            raise
        return True

    def settings_changed(self) -> None:
        """After a live setting changed. Changes nothing where it raises PolicyError."""

    def report(self) -> Mapping[str, Any]:
        """What the policy knows about its own work, JSON-ready; empty where nothing."""
        return {}

    def describe(self) -> str:
        """One phrase for the mode line."""
        return f"{self.name} {'/'.join(self.shape.tiers)}"


class Tunes(ABC):
    """A policy that finds out something about its own settings, kept for the next start."""

    @property
    @abstractmethod
    def tuned(self) -> Mapping[str, Any] | None:
        """What it found out, JSON-ready; None where nothing."""

    @abstractmethod
    def recall(self, tuned: Mapping[str, Any]) -> None:
        """Starts from what an earlier run tuned, as far as it goes with this one; after plan."""


class Foresees(ABC):
    """A policy that decides by what its choices cost."""

    @abstractmethod
    def set_estimate(self, estimate: KlEstimate) -> None:
        """What the tiers in use cost against the best of them; before start."""


class WaitsBeforeAnswer(ABC):
    """A policy for which the first token of an answer may wait."""

    @abstractmethod
    def before_answer(
        self, resident: np.ndarray, target: np.ndarray
    ) -> Sequence[Transition] | None:
        """Transitions that an answer's first token waits for, as for those under way, by what is in
        memory between two steps: resident, target as of StepReport. It is asked again when all are
        done, until there are none. None: nothing is waited for."""


class KeepsSequences(ABC):
    """A policy that knows something of each sequence."""

    @abstractmethod
    def save_sequence(self, sequence: int) -> bytes | None:
        """What it knows of one sequence, for whoever keeps its tokens; None for nothing."""

    @abstractmethod
    def restore_sequence(self, sequence: int, state: bytes) -> None:
        """A sequence goes on, with what save_sequence gave. Raises PolicyError for other bytes."""
