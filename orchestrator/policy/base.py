"""What a policy is: a placement, which divides a budget into slots, and a decision for each event.

Both are arithmetic: no clock, no I/O, no global. The same code runs live and in replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
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
    """What a policy requires of the program that runs it.

    asked_in: the phases of the steps in which `decide` is called once per MoE layer. In other steps
    every routed expert is requested in default_tier, or in a better one that is in memory, without
    Python. n_ahead: how many layers ahead the routers are asked; 0 for none. importance: events of
    prompts carry the attention that tokens receive. counts, states: what a step's report carries,
    StepReport.counts, and StepReport.resident with target. told_in: the phases of the next steps
    whose reports carry these; the counts of the other steps come with the next report that has
    them. transition_rate: bytes per second that transitions may read beside decoding; 0 for no
    limit. all_resident: every expert is in memory, and only transitions change versions.
    by_residency: decisions depend on what is in memory, and so on the disk. whole_layers: idle
    reads bring whole layers. waits: the first token of an answer waits for what `warm` asks for.
    learns: decisions depend on earlier steps, so that a recording begins with a new policy.
    """

    asked_in: tuple[Phase, ...] = ()
    default_tier: int = 0
    n_ahead: int = 0
    importance: bool = False
    counts: bool = False
    states: bool = False
    told_in: tuple[Phase, ...] = EVERY_STEP
    transition_rate: int = 0
    all_resident: bool = False
    by_residency: bool = False
    whole_layers: bool = False
    waits: bool = False
    learns: bool = False


class History:
    """What earlier runs and calibration know of a model. This one knows nothing."""

    def hotness(self) -> np.ndarray | None:
        """How much each expert is used, float64 [n_layers, n_expert]."""
        return None

    def losses(self, tiers: Sequence[str], per_use: bool = False) -> np.ndarray | None:
        """What each expert loses in these tiers, float64 [n_layers, n_expert, n_tiers]. per_use:
        times what gates the expert usually has, in nats where a fit is known."""
        return None

    def estimate(self, tiers: Sequence[str]) -> KlEstimate | None:
        """What these tiers cost against the first of them. May raise ConfigError where that is not
        known, for a policy that cannot work without it."""
        return None

    def tuned(self, policy: str) -> Mapping[str, Any] | None:
        """What a policy found out about its own settings, as `Learned.tuned` has it."""
        return None


UNKNOWN = History()


@dataclass(frozen=True, slots=True)
class Learned:
    """What a policy knows at the end of a run and the next run may use: hotness, float64
    [n_layers, n_expert], how much each expert is used; tuned, JSON-ready, what the policy found out
    about its own settings."""

    hotness: np.ndarray | None = None
    tuned: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Placement:
    """How a policy divides a budget: the result of `Policy.place`, which is a pure function.

    slots: within the budget, or, where that is too small, the fewest with which the policy works.
    wants: what the policy requires with these settings and slots. losses: what experts lose in each
    tier, where the placement depends on it. A policy with more to remember has a subclass.
    """

    policy: type[Policy]
    shape: ModelShape
    settings: Any
    rules: Rules
    slots: SlotPlan
    wants: Wants
    losses: np.ndarray | None = field(default=None, kw_only=True)

    @property
    def name(self) -> str:
        """The name of the policy."""
        return self.policy.name

    @property
    def text(self) -> str:
        """A phrase for the mode line."""
        return f"{self.name} {'/'.join(self.shape.tiers)}"

    @property
    def spends(self) -> float | None:
        """The loss that the policy spends on purpose, in nats a token; None for a policy that does
        not count losses."""
        return None

    def fractions(self, uses: np.ndarray) -> np.ndarray:
        """The share of each expert's uses that is requested in each tier, float64 [n_layers,
        n_expert, n_tiers]; what is missing to 1 is skipped. uses [n_layers, n_expert]: how often
        tokens of an answer use each expert."""
        mix = np.zeros((*uses.shape, len(self.shape.tiers)))
        mix[..., 0] = 1.0
        return mix

    def first(self, hotness: np.ndarray | None = None) -> Sequence[Transition]:
        """The experts to load before the first token. hotness: how much each expert is used, in
        place of what the placement was made with."""
        return ()

    def make(self, history: History = UNKNOWN) -> Policy:
        """The policy that decides with this placement."""
        made = self.policy(self)
        hotness = history.hotness() if made.wants.counts else None
        if hotness is not None:
            made.recall(hotness)
        return made


@dataclass(frozen=True, slots=True)
class About:
    """What a policy declares of itself. Each field is also an attribute of the policy's class.

    name: as users write it. summary: what it does, a sentence for tables of the documents.
    Settings: the record of its own settings. reason: ends the sentence "NAME, which ..." that says
    why another policy's option has no effect. precisions: those that it works with. wants: the most
    that any placement requires, for plans that are made before there is one.
    """

    name: str
    summary: str = ""
    Settings: type[Settings] = Settings
    reason: str = "has settings of its own"
    precisions: Precisions = Precisions()
    wants: Wants = Wants()


class Policy:
    """One way to decide. This table is the whole contract:

    | member | what it is |
    |---|---|
    | about | required: what the policy declares of itself |
    | place | required: divides a budget into slots; pure |
    | decide | required where `about.wants.asked_in` is not empty: the tiers of a layer's experts |
    | on_step | told of each step; returns transitions. Default: none |
    | warm | what is loaded before the first token. Default: what the placement says |
    | update_settings | live settings changed. Default: has the new record |
    | report | what the policy knows of its own work. Default: empty |
    | describe | a phrase for the mode line. Default: the placement's text |
    | recall, learned | optional: state that lives across runs. Default: none |
    | save_sequence, restore_sequence | optional: state of one sequence. Default: none |

    A policy is made of a placement, and has its parts: shape, settings, rules, wants. It may
    replace its own `wants` between steps.
    """

    about: ClassVar[About]
    name: ClassVar[str]
    summary: ClassVar[str]
    Settings: ClassVar[type[Settings]]
    reason: ClassVar[str]
    precisions: ClassVar[Precisions] = Precisions()
    wants: Wants

    def __init_subclass__(cls, **more: Any) -> None:
        """Raises TypeError for a policy whose decisions nobody would ever ask for."""
        super().__init_subclass__(**more)
        about = cls.__dict__.get("about")
        if about is None:
            return
        for each in fields(About):
            setattr(cls, each.name, getattr(about, each.name))
        if not about.wants.asked_in and cls.decide is not Policy.decide:
            raise TypeError(f"{cls.__name__} decides, and about.wants.asked_in is empty")

    @classmethod
    def place(
        cls,
        shape: ModelShape,
        settings: Any,
        rules: Rules,
        budget_bytes: int,
        history: History,
    ) -> Placement:
        """Divide a budget into slots. Where it is too small, the slots are the fewest with which
        the policy works: that is the placement at budget 0. Raises PolicyError where the policy
        cannot work with the model's tiers and these settings; and what `History.estimate` raises.
        """
        raise NotImplementedError

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.shape, self.settings = placement.shape, placement.settings
        self.rules, self.wants = placement.rules, placement.wants
        self._set_up()

    def _set_up(self) -> None:
        """Set what a new policy has besides."""

    def warm(
        self, resident: np.ndarray | None = None, target: np.ndarray | None = None
    ) -> Sequence[Transition] | None:
        """What has to be in memory before the first token, of the run or, where `wants.waits`, of
        an answer. Then resident and target are given as of StepReport, and the call is repeated
        each time its transitions are done: () where only those under way are left, None to wait for
        nothing."""
        return self.placement.first()

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        """Write a tier for the routed experts (0 where nothing is written) and what to prefetch.
        It changes `out` alone, and keeps no reference to its arguments."""

    def on_step(self, report: StepReport) -> Sequence[Transition]:
        """Called after every step that succeeded. Returns the transitions to start."""
        return ()

    def update_settings(self, settings: Any) -> None:
        """Go by a record with other values of live settings from the next step on. Slots stay.
        Raises PolicyError for values that the policy cannot work with, and changes nothing then."""
        self.placement = replace(self.placement, settings=settings)
        self.settings = settings

    def report(self) -> Mapping[str, Any]:
        """What the policy knows about its own work, JSON-ready; empty where nothing."""
        return {}

    def describe(self) -> str:
        """A phrase for the mode line."""
        return self.placement.text

    def recall(self, hotness: np.ndarray) -> None:
        """Start from what an earlier run learned, `Learned.hotness`. Called before `warm`."""

    def learned(self) -> Learned:
        """What the next run may use."""
        return Learned()

    def save_sequence(self, sequence: int) -> bytes | None:
        """What the policy knows of one sequence, for whoever keeps its tokens; None for nothing."""
        return None

    def restore_sequence(self, sequence: int, state: bytes) -> None:
        """A sequence goes on; state is what save_sequence returned. Raises PolicyError for other
        bytes."""


def place(
    policy: type[Policy],
    shape: ModelShape,
    settings: Any = None,
    rules: Rules | None = None,
    budget_bytes: int = 0,
    history: History = UNKNOWN,
) -> Placement:
    """The placement of a policy. settings: None for its defaults. Raises what `Policy.place`
    raises, and TiersError for a model with fewer tiers than the policy works with."""
    rules, precisions = rules or Rules(), policy.precisions
    too_few = len(shape.tiers) < precisions.least
    if precisions.keeps is not None and (too_few or rules.skip):
        raise TiersError(
            f"the policy {policy.name} keeps each expert in one of {precisions.keeps}",
            "give --low FILE or a file packed with several tiers, and not --low-tier skip",
        )
    if too_few:
        raise TiersError(
            f"the policy {policy.name} works with {precisions.least} precisions",
            "give --low FILE or a file packed with as many tiers",
        )
    settings = policy.Settings() if settings is None else settings
    return policy.place(shape, settings, rules, max(0, budget_bytes), history)
