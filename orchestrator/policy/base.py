"""The policy contract: a placement divides a budget into slots, and the policy chooses tiers.

Both are pure arithmetic. They read no clock, do no I/O and keep no global state, so the same code
runs live and in replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gguf_tools.file.layout import MAX_TIERS
from orchestrator.allocation.slots import FileTier, ModelShape, Rules, SlotPlan, Transition
from orchestrator.errors import MoeEdgeError, PolicyError, TiersError
from orchestrator.events import DecisionBuffer, Phase, RouteEvent, StepReport, StoreView
from orchestrator.settings import Settings

if TYPE_CHECKING:
    from orchestrator.allocation.estimate import KlEstimate

# The phases of a policy that decides in prefill and in decode steps.
EVERY_STEP = tuple(Phase)


class TierOffer:
    """The tiers of a file from which a policy may choose, best first, and their slot sizes.

    names: the tier names. budget_bytes: the budget of the expert slots. low: the low tier that the
    user named, or None.
    """

    def __init__(
        self,
        names: Sequence[str],
        shape_of: Callable[[tuple[FileTier, ...]], ModelShape],
        budget_bytes: int,
        low: FileTier | None = None,
    ) -> None:
        """shape_of: returns the model reduced to the given tiers."""
        self.names, self.budget_bytes, self.low = tuple(names), budget_bytes, low
        self._shape_of = shape_of

    @property
    def tiers(self) -> list[FileTier]:
        """All tiers of the file, best first."""
        return [FileTier(at) for at in range(len(self.names))]

    def shape(self, *tiers: FileTier) -> ModelShape:
        """Return the model reduced to the given tiers."""
        return self._shape_of(tiers)

    def fits_whole(self, tier: FileTier) -> bool:
        """Whether the budget holds every expert in this tier."""
        return self.shape(tier).all_slot_bytes() <= self.budget_bytes


@dataclass(frozen=True, slots=True)
class Precisions:
    """The number of tiers that a policy works with, and its choice if the user names none.

    least, most: the minimum and maximum number of tiers. keeps: for a policy that keeps every
    expert in one of its tiers and never skips, the phrase for these tiers in messages, such as "two
    precisions". skips: the policy may skip experts whatever its lower tiers are, and it uses a
    lower tier only if the user names one. lossless: the settings with which every expert is
    computed in the best tier; {} if that is always the case, None if no settings achieve it.
    """

    least: int = 1
    most: int = MAX_TIERS
    keeps: str | None = None
    skips: bool = False
    lossless: Mapping[str, Any] | None = None

    def high(self, offer: TierOffer) -> FileTier:
        """Return the best tier to use."""
        return offer.tiers[0]

    def low(self, offer: TierOffer, high: FileTier) -> FileTier | None:
        """Return the lowest tier to use, below `high`.

        None stands for as many of the next tiers as the policy works with.
        """
        return offer.low


@dataclass(frozen=True, slots=True)
class PolicyRequirements:
    """The requirements of a policy on the runtime.

    asked_in: phases of the steps in which `decide` is called, once per MoE layer. In other steps
    the store requests every routed expert in default_tier, or uses a better copy if it is resident,
    without calling Python.

    n_ahead: number of following layers whose routers are evaluated early to predict experts; 0 for
    no prediction. importance: route events of prompts carry the attention that each token receives.

    counts, states: step reports carry StepReport.counts, and StepReport.resident and target.
    told_in: phases of the next steps whose reports carry these arrays. Counts of other steps are
    added to the next report that has counts.

    transition_rate: limit in bytes per second for transitions during decoding; 0 for no limit.
    all_resident: every expert is resident, and only transitions change its tier. by_residency:
    decisions depend on which experts are resident, and so on the speed of the disk. whole_layers:
    idle reads load whole layers. waits: the first token of an answer waits for the transitions that
    `warm` returns. learns: decisions depend on earlier steps, so a recording must begin with a new
    policy.
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
    """Records of earlier runs and calibration of a model. This base class holds no records."""

    def hotness(self) -> np.ndarray | None:
        """Return the usage of each expert, float64 [n_layers, n_expert], or None if unknown."""
        return None

    def losses(self, tiers: Sequence[str], per_use: bool = False) -> np.ndarray | None:
        """Return the loss of each expert in these tiers, float64 [n_layers, n_expert, n_tiers].

        Return None if it is unknown.

        per_use: the loss per use with the expert's usual gate weights, in nats, if calibrate fitted
        the model; otherwise the same as without it.
        """
        return None

    def estimate(self, tiers: Sequence[str]) -> KlEstimate | None:
        """Return the estimated KL divergence of these tiers from the first of them.

        Return None if it is unknown. May raise ConfigError if the policy cannot work without the
        estimate.
        """
        return None

    def tuned(self, policy: str) -> Mapping[str, Any] | None:
        """Return the settings that the policy tuned in an earlier run (`Learned.tuned`), if any."""
        return None


UNKNOWN = History()


@dataclass(frozen=True, slots=True)
class Learned:
    """State of a policy at the end of a run, for the next run.

    hotness: usage of each expert, float64 [n_layers, n_expert]. tuned: settings that the policy
    tuned itself, JSON-ready.
    """

    hotness: np.ndarray | None = None
    tuned: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Placement:
    """The division of a budget into slots by a policy.

    It is the result of the pure function `Policy.place`.

    slots: within the budget, or the minimum with which the policy works if the budget is too small.
    wants: the requirements of the policy with these settings and slots. losses: the loss of each
    expert in each tier, if the placement depends on it. A policy that needs further values defines
    a subclass.
    """

    policy: type[Policy]
    shape: ModelShape
    settings: Any
    rules: Rules
    slots: SlotPlan
    wants: PolicyRequirements
    losses: np.ndarray | None = field(default=None, kw_only=True)

    @property
    def name(self) -> str:
        """The name of the policy."""
        return self.policy.name

    @property
    def text(self) -> str:
        """A phrase for the status line."""
        return f"{self.name} {'/'.join(self.shape.tiers)}"

    @property
    def spends(self) -> float | None:
        """The loss budget of the policy in nats per token.

        None if the policy does not count losses.
        """
        return None

    def fractions(self, uses: np.ndarray) -> np.ndarray:
        """Return the share of each expert's uses that is requested in each tier.

        float64 [n_layers, n_expert, n_tiers]. The rest to 1 is skipped.

        uses: how often tokens of an answer use each expert, [n_layers, n_expert].
        """
        mix = np.zeros((*uses.shape, len(self.shape.tiers)))
        mix[..., 0] = 1.0
        return mix

    def first(self, hotness: np.ndarray | None = None) -> Sequence[Transition]:
        """Return the experts to load before the first token.

        hotness: usage of each expert; it replaces the usage with which the placement was made.
        """
        return ()

    def make(self, history: History = UNKNOWN) -> Policy:
        """Return a new policy with this placement.

        It starts from the usage in history if its reports carry counts.
        """
        made = self.policy(self)
        hotness = history.hotness() if made.wants.counts else None
        if hotness is not None:
            made.recall(hotness)
        return made


@dataclass(frozen=True, slots=True)
class About:
    """The declarations of a policy. Each field also becomes an attribute of the policy's class.

    name: the name that users type. summary: one sentence for the tables of the documentation.
    Settings: the dataclass of its own settings. reason: completes the sentence "NAME, which ..."
    that explains why an option of another policy has no effect. precisions: the tiers that the
    policy works with. wants: the union of the requirements of all placements, for plans that are
    made before a placement exists.
    """

    name: str
    summary: str = ""
    Settings: type[Settings] = Settings
    reason: str = "has settings of its own"
    precisions: Precisions = Precisions()
    wants: PolicyRequirements = PolicyRequirements()


class Policy:
    """A rule that chooses tiers, prefetches and transitions.

    This table is the whole contract:

    | member | meaning |
    |---|---|
    | about | required: the declarations of the policy |
    | place | required: divides a budget into slots; pure |
    | decide | required if `about.wants.asked_in` is not empty: chooses tiers of a layer's experts |
    | on_step | called after each step; returns transitions. Default: none |
    | warm | what is loaded before the first token. Default: the placement's `first` |
    | update_settings | replaces the live settings. Default: stores the new record |
    | report | figures of the policy's own work. Default: empty |
    | describe | a phrase for the status line. Default: the placement's text |
    | recall, learned | optional: state that lives across runs. Default: none |
    | save_sequence, restore_sequence | optional: state of one sequence. Default: none |

    A policy is made from a placement and shares its attributes shape, settings, rules and wants. It
    may replace its own `wants` between steps.
    """

    about: ClassVar[About]
    name: ClassVar[str]
    summary: ClassVar[str]
    Settings: ClassVar[type[Settings]]
    reason: ClassVar[str]
    precisions: ClassVar[Precisions] = Precisions()
    wants: PolicyRequirements

    def __init_subclass__(cls, **more: Any) -> None:
        """Raise TypeError for a policy with an inconsistent declaration.

        Such a policy defines `decide` but declares no phase in which it is called.
        """
        super().__init_subclass__(**more)
        about = cls.__dict__.get("about")
        if about is None:
            return
        for each in fields(About):
            setattr(cls, each.name, getattr(about, each.name))
        if not about.wants.asked_in and cls.decide is not Policy.decide:
            raise TypeError(f"{cls.__name__} defines decide, but about.wants.asked_in is empty")

    @classmethod
    def place(
        cls,
        shape: ModelShape,
        settings: Any,
        rules: Rules,
        budget_bytes: int,
        history: History,
    ) -> Placement:
        """Divide a budget into slots.

        If the budget is too small, return the minimum with which the policy works, which is the
        placement for budget 0.

        Raises PolicyError if the policy cannot work with the model's tiers and these settings, and
        whatever `History.estimate` raises.
        """
        raise NotImplementedError

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.shape, self.settings = placement.shape, placement.settings
        self.rules, self.wants = placement.rules, placement.wants
        self._set_up()

    def _set_up(self) -> None:
        """Initialise the state of a new policy."""

    def warm(
        self, resident: np.ndarray | None = None, target: np.ndarray | None = None
    ) -> Sequence[Transition] | None:
        """Return the transitions that must finish before the first token.

        This is the first token of the run, or of an answer if `wants.waits` is set.

        At the start of an answer, resident and target are given as in StepReport, and the call is
        repeated each time its transitions finish. It then returns () if only transitions under way
        are left, and None if the answer need not wait.
        """
        return self.placement.first()

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        """Write a tier for each routed expert and request prefetches.

        Experts without a written tier get tier 0. Changes only `out`, and keeps no reference to its
        arguments.
        """

    def on_step(self, report: StepReport) -> Sequence[Transition]:
        """Called after every successful step. Returns the transitions to start."""
        return ()

    def update_settings(self, settings: Any) -> None:
        """Replace the live settings.

        Takes effect at the next step; slots stay unchanged. Raises PolicyError for values that the
        policy cannot work with, and then changes nothing.
        """
        self.placement = replace(self.placement, settings=settings)
        self.settings = settings

    def report(self) -> Mapping[str, Any]:
        """Return figures of the policy's own work, JSON-ready; empty by default."""
        return {}

    def describe(self) -> str:
        """Return a phrase for the status line."""
        return self.placement.text

    def recall(self, hotness: np.ndarray) -> None:
        """Start from the usage that an earlier run learned (`Learned.hotness`).

        Called before `warm`.
        """

    def learned(self) -> Learned:
        """Return the state to keep for the next run."""
        return Learned()

    def save_sequence(self, sequence: int) -> bytes | None:
        """Return the policy's state of one sequence, to be kept with its tokens.

        Return None if it has none.
        """
        return None

    def restore_sequence(self, sequence: int, state: bytes) -> None:
        """Restore the state of a sequence from the bytes that save_sequence returned.

        Raises PolicyError for other bytes.
        """


def place(
    policy: type[Policy],
    shape: ModelShape,
    settings: Any = None,
    rules: Rules | None = None,
    budget_bytes: int = 0,
    history: History = UNKNOWN,
) -> Placement:
    """Return the placement of a policy. settings: None for the policy's defaults.

    Raises what `Policy.place` raises, and TiersError for a model with fewer tiers than the policy
    needs. Any other exception of a policy that is not ours becomes a PolicyError, so that plans of
    the other policies can be made.
    """
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
    try:
        return policy.place(shape, settings, rules, max(0, budget_bytes), history)
    except MoeEdgeError:
        raise
    except Exception as error:
        if policy.__module__.startswith("orchestrator."):
            raise
        raise PolicyError(
            f"the policy {policy.name} failed in place: {type(error).__name__}: {error}"
        ) from error
