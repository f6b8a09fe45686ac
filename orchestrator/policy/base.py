"""What a policy is: arithmetic from read-only views to a decision.

No clock, no I/O, no global; the same code runs live and in replay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gguf_tools.file.layout import MAX_TIERS
from orchestrator.allocation.slots import FileTier, ModelShape, Rules, SlotPlan, Transition
from orchestrator.errors import TiersError
from orchestrator.events import DecisionBuffer, Phase, RouteEvent, StepReport, StoreView
from orchestrator.settings import Settings

if TYPE_CHECKING:
    from orchestrator.allocation.estimate import KlEstimate

# Steps in which a policy is asked, where it is asked in all of them.
EVERY_STEP = tuple(Phase)


class TierOffer:
    """What the tiers of a policy may be chosen from: those of a file, best first, and what their
    slots take. low: the low tier that a user named, or None."""

    def __init__(
        self,
        names: Sequence[str],
        shape_of: Callable[[tuple[FileTier, ...]], ModelShape],
        budget_bytes: int,
        low: FileTier | None = None,
    ) -> None:
        """shape_of: the model reduced to some of the tiers."""
        self.names, self.budget_bytes, self.low = tuple(names), budget_bytes, low
        self._shape_of = shape_of

    @property
    def tiers(self) -> list[FileTier]:
        """All of them, best first."""
        return [FileTier(at) for at in range(len(self.names))]

    def shape(self, *tiers: FileTier) -> ModelShape:
        """The model reduced to some of its tiers."""
        return self._shape_of(tiers)

    def fits_whole(self, tier: FileTier) -> bool:
        """Whether slots for every expert in this tier fit."""
        return self.shape(tier).all_slot_bytes() <= self.budget_bytes


@dataclass(frozen=True, slots=True)
class Precisions:
    """The precisions that a policy works with, and which ones of a file it takes where the user
    left that open.

    least, most: how many. keeps: for a policy that keeps every expert in one of them and skips
    none, what to call these in a message, as "two precisions". skips: it may skip experts, whatever
    its lower tiers are; it has a lower tier only where one is named. lossless: values of its
    settings with which every expert is computed in the best tier, {} where that is always so, and
    None where there are none.
    """

    least: int = 1
    most: int = MAX_TIERS
    keeps: str | None = None
    skips: bool = False
    lossless: Mapping[str, Any] | None = None

    def high(self, offer: TierOffer) -> FileTier:
        """The one to take as the best."""
        return offer.tiers[0]

    def low(self, offer: TierOffer, high: FileTier) -> FileTier | None:
        """The one to take as the lowest, below the high one; None: as many of those that follow as
        the policy works with."""
        return offer.low


@dataclass(frozen=True, slots=True)
class Wants:
    """What a policy wants of those who run it. An instance has its own, by its settings and slots,
    and may change it in `plan` and in `recall`. Of the class asked_in and importance are read, for
    plans that are made before there is an instance: they are the most that any instance wants.

    asked_in: in the steps of which phases it is asked once per MoE layer. In the others every
    routed expert is asked for in default_tier, or a better one that is in memory, without Python.
    n_ahead: how many layers ahead the routers are asked, 0 for none. importance: events of prompts
    carry the attention that tokens receive. counts: StepReport.counts. states: StepReport.resident
    and target. transition_rate: bytes per second that its transitions may read beside decoding, 0
    for no limit. all_resident: it has every expert in memory, so that only its transitions change
    versions. by_residency: what it decides depends on what is in memory, and so on the disk.
    whole_layers: what is read while nothing is asked for is read layer by layer.
    """

    asked_in: tuple[Phase, ...] = ()
    default_tier: int = 0
    n_ahead: int = 0
    importance: bool = False
    counts: bool = False
    states: bool = False
    transition_rate: int = 0
    all_resident: bool = False
    by_residency: bool = False
    whole_layers: bool = False


class Policy:
    """One way to decide. The class says what a policy wants, its methods what it does. `plan` has
    to be written; `asked_mix` says that everything is asked for in the best tier, and the other
    methods do nothing until a policy has its own.

    name: what a user calls it; summary: what it does, in a sentence for tables of the documents.
    reason: ends the sentence "NAME, which ..." that says why another policy's option has no effect.
    Settings: the record of its own settings. What only some policies do is a class below, which
    they name as a base beside this one.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    reason: ClassVar[str] = "has settings of its own"
    Settings: ClassVar[type[Settings]] = Settings
    precisions: ClassVar[Precisions] = Precisions()
    wants: Wants = Wants()

    def __init_subclass__(cls, **more: Any) -> None:
        """Raises TypeError for a policy whose decisions nobody would ever ask for."""
        super().__init_subclass__(**more)
        if not cls.wants.asked_in and cls.decide is not Policy.decide:
            raise TypeError(f"{cls.__name__} decides, and its wants.asked_in is empty")

    def __init__(self, shape: ModelShape, settings: Any = None, rules: Rules | None = None) -> None:
        """settings: a record of the class's Settings, None for its defaults. Raises PolicyError
        where the policy cannot work with the model's tiers."""
        skips, precisions = rules is not None and rules.skip, self.precisions
        too_few = len(shape.tiers) < precisions.least
        if precisions.keeps is not None and (too_few or skips):
            raise TiersError(
                f"the policy {self.name} keeps each expert in one of {precisions.keeps}",
                "give --low FILE or a file packed with several tiers, and not --low-tier skip",
            )
        if too_few:
            raise TiersError(
                f"the policy {self.name} works with {precisions.least} precisions",
                "give --low FILE or a file packed with as many tiers",
            )
        self.shape = shape
        self.settings = self.Settings() if settings is None else settings
        self.rules = rules or Rules()
        self._set_up()

    def _set_up(self) -> None:
        """Sets what a new policy has besides. Raises PolicyError as __init__ does."""

    @property
    def fresh(self) -> bool:
        """Whether it would decide as a new one: it was told of no step yet, or keeps nothing."""
        return True

    def plan(self, budget_bytes: int) -> SlotPlan:
        """How the budget is divided into slots. It may be called several times with other budgets;
        the last call counts. Raises BudgetError for one that is too small."""
        raise NotImplementedError

    def asked_mix(self, uses: np.ndarray) -> np.ndarray:
        """The share of each expert's uses that is asked for in each tier, float64 [n_layers,
        n_expert, n_tiers]; what is missing to 1 is skipped. uses [n_layers, n_expert]: how often
        tokens of an answer use each. After plan."""
        mix = np.zeros((*uses.shape, len(self.shape.tiers)))
        mix[..., 0] = 1.0
        return mix

    def start(self) -> Sequence[Transition]:
        """What to load before the first token; after plan."""
        return ()

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        """Writes a tier for the routed experts (0 where nothing is written) and what to
        prefetch. Of what it is given it changes `out` alone, and it keeps no reference to it."""

    def step_done(self, report: StepReport) -> Sequence[Transition]:
        """After every step that succeeded; returns the transitions to start."""
        return ()

    def change(self, name: str, value: Any) -> bool:
        """Changes a live setting; False where it has no live setting of this name. Raises
        SettingError, and as go_by does."""
        declared = self.Settings.declared().get(name)
        if declared is None or not declared.live:
            return False
        self.go_by(replace(self.settings, **{name: value}))
        return True

    def go_by(self, settings: Any) -> None:
        """Has a record with other values of live settings from the next step on. Slots stay as
        planned. Raises what _settings_changed raises, and changes nothing then."""
        before, self.settings = self.settings, settings
        try:
            self._settings_changed()
        except BaseException:
            self.settings = before
            raise

    def _settings_changed(self) -> None:
        """After a live setting changed. Changes nothing where it raises PolicyError."""

    def report(self) -> Mapping[str, Any]:
        """What the policy knows about its own work, JSON-ready; empty where nothing."""
        return {}

    def describe(self) -> str:
        """One phrase for the mode line."""
        return f"{self.name} {'/'.join(self.shape.tiers)}"


class Learns(ABC):
    """A policy that places experts by how much they are used, which is kept for the next start.

    updates: how often it placed them anew.
    """

    updates: int = 0

    @property
    @abstractmethod
    def hotness(self) -> np.ndarray:
        """What it has learned, float64 [n_layers, n_expert], a copy; zeros for nothing yet."""

    @abstractmethod
    def set_hotness(self, scores: np.ndarray) -> None:
        """Starts from what an earlier run learned, [n_layers, n_expert]; before plan, and again
        before start."""

    def wants_report(self, phase: Phase) -> bool:
        """Whether the report of a step of this phase has to carry what it asks for. Where not, its
        counts come with the next one that does, and `step_done` gets no states."""
        return True


class WeighsLosses:
    """A policy that goes by what each expert loses in each tier, where that is known.

    per_use: it wants losses that are multiplied by what gates their expert usually has, in nats
    where a fit is known. losses: what set_losses said, None where nothing.
    """

    per_use: ClassVar[bool] = False
    losses: np.ndarray | None = None

    @property
    def losses_matter(self) -> bool:
        """Whether it goes by losses with the settings that it has."""
        return True

    def set_losses(self, losses: np.ndarray) -> None:
        """What experts lose in each tier, float64 [n_layers, n_expert, n_tiers]; before plan, and
        again before start."""
        self.losses = np.array(losses, np.float64)


class SpendsLoss(ABC):
    """A policy that has a loss to spend, its setting max_loss, and has to know what choices
    cost."""

    @property
    @abstractmethod
    def allowed(self) -> float:
        """What it may lose now, in nats a token: its setting max_loss, or half of it."""

    @abstractmethod
    def halve(self, on: bool) -> None:
        """Spend half of max_loss from now on, or all of it again."""

    @abstractmethod
    def set_estimate(self, estimate: KlEstimate) -> None:
        """What the tiers in use cost against the best of them; before plan, and again before
        start."""


class Tunes(ABC):
    """A policy that finds out something about its own settings, kept for the next start."""

    @property
    @abstractmethod
    def tuned(self) -> Mapping[str, Any] | None:
        """What it found out, JSON-ready; None where nothing."""

    @abstractmethod
    def recall(self, tuned: Mapping[str, Any]) -> None:
        """Starts from what an earlier run tuned, as far as it goes with this one; after plan."""


class WaitsBeforeAnswer(ABC):
    """A policy for which the first token of an answer may wait."""

    @abstractmethod
    def before_answer(
        self, resident: np.ndarray, target: np.ndarray
    ) -> Sequence[Transition] | None:
        """Called between a prompt and its answer, and again each time what it returned is done.
        Returns transitions to wait for, () where only those under way are left, and None to wait
        for nothing. resident, target: as of StepReport."""


class KeepsSequences(ABC):
    """A policy that knows something of each sequence."""

    @abstractmethod
    def save_sequence(self, sequence: int) -> bytes | None:
        """What it knows of one sequence, for whoever keeps its tokens; None for nothing."""

    @abstractmethod
    def restore_sequence(self, sequence: int, state: bytes) -> None:
        """A sequence goes on, with what save_sequence gave. Raises PolicyError for other bytes."""
