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
    """The precisions (tiers) of a model file from which a policy may choose.

    - names: the names of the tiers, best first.
    - budget_bytes: the memory budget for all expert slots.
    - low: the low tier that the user named, or None.
    """

    def __init__(
        self,
        names: Sequence[str],
        shape_of: Callable[[tuple[FileTier, ...]], ModelShape],
        budget_bytes: int,
        low: FileTier | None = None,
    ) -> None:
        """Make an offer from tier names (best first) and a memory budget for expert slots.

        shape_of: a function that returns the layers, experts and slot sizes of the model for the
        tiers in its argument.
        """
        self.names, self.budget_bytes, self.low = tuple(names), budget_bytes, low
        self._shape_of = shape_of

    @property
    def tiers(self) -> list[FileTier]:
        """All tiers of the file, best first."""
        return [FileTier(at) for at in range(len(self.names))]

    def shape(self, *tiers: FileTier) -> ModelShape:
        """Return the layers and experts of the model, and its slot sizes for these tiers.

        A tier is a precision. A slot is memory for one matrix of an expert.
        """
        return self._shape_of(tiers)

    def fits_whole(self, tier: FileTier) -> bool:
        """Return whether the budget is large enough to hold every expert in this tier."""
        return self.shape(tier).all_slot_bytes() <= self.budget_bytes


@dataclass(frozen=True, slots=True)
class Precisions:
    """How many precisions (tiers) of experts a policy can use, and which tiers it uses by default.

    - least, most: the minimum and maximum number of tiers.
    - keeps: a phrase such as "two precisions", if the policy works neither with fewer tiers nor
      with skipped experts. `place` quotes it in an error message. Otherwise None.
    - skips: whether the policy skips experts by default. It then uses a second tier only if the
      user names one.
    - lossless: the settings with which the policy computes every expert in the best tier. {} means
      that it always does. None means that no settings have this effect.
    """

    least: int = 1
    most: int = MAX_TIERS
    keeps: str | None = None
    skips: bool = False
    lossless: Mapping[str, Any] | None = None

    def high(self, offer: TierOffer) -> FileTier:
        """Return the best tier (precision) that the policy should use for a model file.

        This base class returns the best tier of the file. The subclass of a policy may return a
        lower tier, for example to fit into the memory budget. offer: the tiers of the file, and the
        budget.
        """
        return offer.tiers[0]

    def low(self, offer: TierOffer, high: FileTier) -> FileTier | None:
        """Return the lowest tier (precision) to use, or None to let the caller choose.

        This base class returns the low tier that the user named, or None if the user named none.

        offer: the tiers of the model file. high: the best tier that the policy will use.
        """
        return offer.low


@dataclass(frozen=True, slots=True)
class PolicyRequirements:
    """The calls, data and guarantees that a policy requires from the runtime.

    - asked_in: the phases (prefill, decode) in which the policy itself chooses the tiers of
      experts. In these phases, the runtime calls the policy's method `decide` for each MoE layer.
    - default_tier: the tier of every routed expert in a phase in which the policy does not choose.
      If the expert is in memory in a better tier, that tier is used instead.
    - n_ahead: the number of following layers whose routers are evaluated early to predict experts.
      0 means no prediction.
    - importance: whether route events of prompts carry the attention that each token receives.
    - counts: whether step reports carry the number of tokens routed to each expert.
    - states: whether step reports carry the tier of each expert in memory and after its transition.
    - told_in: the phases of the steps whose reports carry the counts and states. Counts of other
      steps are added to the next report that has counts.
    - transition_rate: the limit in bytes per second for changes of experts' tiers (transitions)
      during decoding. 0 means no limit.
    - all_resident: whether every expert stays in memory, so that only transitions change its tier.
    - by_residency: whether decisions depend on which experts are in memory, and so on disk speed.
    - whole_layers: whether the reads while no request runs go layer by layer. Otherwise, the most
      used experts of all layers come first.
    - waits: whether the first token of an answer waits for the transitions that `warm` returns.
    - learns: whether decisions depend on earlier steps. A recording must then begin with a new
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
    """Knowledge about a model from earlier runs and from calibration.

    This base class knows nothing: each of its methods returns None.
    """

    def hotness(self) -> np.ndarray | None:
        """Return the fraction of tokens that used each expert, according to earlier runs.

        The result is float64 [n_layers, n_expert], or None if no earlier run was recorded.
        """
        return None

    def losses(self, tiers: Sequence[str], per_use: bool = False) -> np.ndarray | None:
        """Return the quality loss of computing each expert in each of the given tiers (precisions).

        The result is float64 [n_layers, n_expert, n_tiers], or None if the losses are unknown. The
        unit depends on `per_use`:

        - False: the mean squared error of the expert's output.
        - True: the KL divergence in nats for each use of the expert by a token. If the model's loss
          table cannot convert errors into nats, the values are the errors.

        The result does not tell its unit. Compare its values only with each other.
        """
        return None

    def estimate(self, tiers: Sequence[str]) -> KlEstimate | None:
        """Return an object that estimates the quality loss of computing experts in these tiers.

        tiers: names of precisions, best first. The quality loss is the KL divergence in nats,
        relative to the first tier. If the loss cannot be estimated, the result is None. A subclass
        of History may raise ConfigError instead.
        """
        return None

    def tuned(self, policy: str) -> Mapping[str, Any] | None:
        """Return the settings that the policy tuned itself in an earlier run, or None."""
        return None


UNKNOWN = History()


@dataclass(frozen=True, slots=True)
class Learned:
    """The knowledge that a policy has at the end of a run and that the next run starts from.

    - hotness: the fraction of tokens that used each expert, float64 [n_layers, n_expert].
    - tuned: the settings that the policy tuned itself, JSON-ready.

    Each field is None if the policy does not learn it.
    """

    hotness: np.ndarray | None = None
    tuned: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Placement:
    """The result of `Policy.place`: how a policy divides a memory budget into expert slots.

    Expert slots are the memory that holds experts.

    - policy, settings: the class of the policy, and its own settings.
    - rules: options of the user that every policy obeys, such as whether experts may be skipped.
    - shape: the model's layers, experts and slot sizes.
    - slots: the slots. If the budget is too small, they are the minimum for the policy to work.
    - wants: what the runtime must provide for the policy, such as predictions of experts.
    - losses: the quality loss of each expert in each tier; None if it is unknown or not used.

    A policy that needs further values defines a subclass.
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
        """A short description of the policy and its tiers for the status line of chat and serve."""
        return f"{self.name} {'/'.join(self.shape.tiers)}"

    @property
    def spends(self) -> float | None:
        """The quality loss that the policy may cause, in nats per token.

        None if the policy has no such limit.
        """
        return None

    def fractions(self, uses: np.ndarray) -> np.ndarray:
        """Return how often the policy requests each tier (precision) of each expert.

        The result is float64 [n_layers, n_expert, n_tiers]. The values of an expert are fractions
        of its uses by tokens. For example, 0.7 and 0.2 mean that 70 % of the uses request tier 0,
        20 % request tier 1, and 10 % skip the expert. By default, all uses request tier 0.

        uses: how often tokens of answers use each expert, [n_layers, n_expert].
        """
        mix = np.zeros((*uses.shape, len(self.shape.tiers)))
        mix[..., 0] = 1.0
        return mix

    def first(self, hotness: np.ndarray | None = None) -> Sequence[Transition]:
        """Return the experts to load before the first token, each as (layer, expert, tier).

        The base class returns no experts. A subclass may load the most used experts.

        hotness: the fraction of tokens that use each expert, [n_layers, n_expert]. None stands for
        the usage in earlier runs.
        """
        return ()

    def make(self, history: History = UNKNOWN) -> Policy:
        """Return a new policy object that works with the expert slots of this placement.

        If the policy counts the uses of experts, it starts from the counts of earlier runs in
        `history`.
        """
        made = self.policy(self)
        hotness = history.hotness() if made.wants.counts else None
        if hotness is not None:
            made.recall(hotness)
        return made


@dataclass(frozen=True, slots=True)
class About:
    """The declarations of a policy. Each field also becomes an attribute of the policy's class.

    - name: the name that users type.
    - summary: a few sentences for the tables of the documentation.
    - Settings: the dataclass of the policy's own settings.
    - reason: a few words for the message "OPTION has no effect with --policy NAME, which REASON".
    - precisions: how many precisions (tiers) the policy can use, and which it uses by default.
    - wants: the calls and data that the policy requires from the runtime. `Placement.wants` has the
      requirements after the user's settings are known.
    """

    name: str
    summary: str = ""
    Settings: type[Settings] = Settings
    reason: str = "has settings of its own"
    precisions: Precisions = Precisions()
    wants: PolicyRequirements = PolicyRequirements()


class Policy:
    """A rule that chooses tiers of experts, requests prefetches, and starts transitions.

    A transition is a change of an expert's tier in the background.

    This table lists all members that a policy may define:

    | member | meaning |
    |---|---|
    | about | required: the declarations of the policy |
    | place | required: divides a memory budget into expert slots; a pure function |
    | decide | chooses a layer's tiers in prefill, decode or both, as `about.wants.asked_in` says |
    | on_step | called after each step; returns transitions. Default: none |
    | warm | returns the experts to load before the first token. Default: `placement.first()` |
    | update_settings | replaces the settings between two tokens. Default: stores the new settings |
    | report | returns figures about the policy's work. Default: empty |
    | describe | returns a phrase for the status line. Default: the text of the placement |
    | recall, learned | optional: knowledge that lives across runs. Default: none |
    | save_sequence, restore_sequence | optional: the state of one sequence. Default: none |

    If `asked_in` names no phase, the runtime never calls `decide`, and the policy does not define
    it.

    A policy is made from a placement and shares its attributes shape, settings, rules and wants.
    The policy may replace its own `wants` between steps.
    """

    about: ClassVar[About]
    name: ClassVar[str]
    summary: ClassVar[str]
    Settings: ClassVar[type[Settings]]
    reason: ClassVar[str]
    precisions: ClassVar[Precisions] = Precisions()
    wants: PolicyRequirements

    def __init_subclass__(cls, **more: Any) -> None:
        """Copy the declarations in `about` to the class, and check them.

        Raises TypeError for a class that defines `decide` but declares no phase in which it is
        called.
        """
        super().__init_subclass__(**more)
        about = cls.__dict__.get("about")
        if about is None:
            return
        for each in fields(About):
            setattr(cls, each.name, getattr(about, each.name))
        if not about.wants.asked_in and cls.decide is not Policy.decide:
            raise TypeError(
                f"the policy class {cls.__name__} defines the method decide, but the runtime never "
                f"calls decide: declare the phases of its calls, for example with "
                f"about = About(..., wants=PolicyRequirements(asked_in=(Phase.DECODE,)))"
            )

    @classmethod
    def place(
        cls,
        shape: ModelShape,
        settings: Any,
        rules: Rules,
        budget_bytes: int,
        history: History,
    ) -> Placement:
        """Return the division of a memory budget into expert slots, the memory that holds experts.

        If the budget is too small, such as 0, the result has the fewest slots with which the policy
        works.

        - settings: the policy's own settings.
        - rules: the user's rules for all policies, such as whether experts may be skipped.
        - history: knowledge from earlier runs, such as how often each expert was used.

        Raises PolicyError if the policy cannot work with the model's tiers and these settings.
        Errors of `history` are passed on.
        """
        raise NotImplementedError

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.shape, self.settings = placement.shape, placement.settings
        self.rules, self.wants = placement.rules, placement.wants
        self._set_up()

    def _set_up(self) -> None:
        """Initialise the state of a new policy. The constructor calls this method last."""

    def warm(
        self, resident: np.ndarray | None = None, target: np.ndarray | None = None
    ) -> Sequence[Transition] | None:
        """Return the experts to load before the next token, each as (layer, expert, tier).

        At the start of a run, the runtime calls this method without arguments, and loads the
        experts. If `wants.waits` is True, it also calls the method before each answer, with both
        arguments. The result then means:

        - None: begin the answer.
        - An empty list: begin the answer if no expert is changing its tier. Otherwise wait until
          no expert is, and call the method again.
        - A list of experts: load them, wait likewise, and call the method again. If some cannot be
          loaded, begin the answer.

        resident, target: the tier (precision) of each expert now, and after the changes in
        progress, uint8 [n_layers, n_expert]. ABSENT means not in memory.
        """
        return self.placement.first()

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        """Choose the tiers of the experts that a layer's tokens use, and request prefetches.

        The runtime calls this method in each MoE layer. The method writes its choice to `out` and
        changes nothing else. Experts without a written tier get tier 0. The method must not keep
        references to its arguments, because they are valid only during the call.
        """

    def on_step(self, report: StepReport) -> Sequence[Transition]:
        """Process the report of a finished step, and return the transitions to start now.

        A transition changes the tier of an expert in the background. By default, none is started.
        """
        return ()

    def update_settings(self, settings: Any) -> None:
        """Replace the settings of the policy, from the next step on.

        The expert slots stay unchanged. Raises PolicyError, without a change, if the policy cannot
        work with the new values.
        """
        self.placement = replace(self.placement, settings=settings)
        self.settings = settings

    def report(self) -> Mapping[str, Any]:
        """Return statistics that the policy collects while it runs, as {name: JSON value}.

        An example is the number of experts that changed their tier. By default, the dict is empty.
        """
        return {}

    def describe(self) -> str:
        """Return a short description of the policy for the status line of chat and serve."""
        return self.placement.text

    def recall(self, hotness: np.ndarray) -> None:
        """Start from the expert usage that an earlier run learned.

        The runtime calls this method before `warm`. hotness: the fraction of tokens that used each
        expert, [n_layers, n_expert].
        """

    def learned(self) -> Learned:
        """Return expert usage and tuned settings of this run, from which the next run starts.

        By default, the result is empty.
        """
        return Learned()

    def save_sequence(self, sequence: int) -> bytes | None:
        """Return the policy's state of one sequence as bytes, or None if the policy has none.

        The caller stores these bytes together with the tokens of the sequence.
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
    """Return how a policy divides a memory budget into expert slots, the memory that holds experts.

    - settings: the policy's own settings; None for the defaults.
    - rules: the user's rules for all policies, such as whether experts may be skipped.
    - history: knowledge from earlier runs, such as how often each expert was used.

    Raises TiersError if the model has fewer tiers than the policy needs, or if experts may be
    skipped but the policy cannot skip. MoeEdgeErrors of the policy are passed on. Other exceptions
    become a PolicyError if the policy is from another package.
    """
    rules, precisions = rules or Rules(), policy.precisions
    too_few = len(shape.tiers) < precisions.least
    if precisions.keeps is not None and (too_few or rules.skip):
        raise TiersError(
            f"the policy {policy.name} needs every expert in {precisions.keeps}, so it works "
            "neither with fewer precisions nor with skipped experts",
            "leave out --low-tier skip, and give either --low FILE or a file packed with several "
            "precisions",
        )
    if too_few:
        raise TiersError(
            f"the policy {policy.name} needs at least {precisions.least} precisions",
            f"give --low FILE, or a file packed with {precisions.least} precisions or more",
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
            f"the method place() of the policy {policy.name} failed: {type(error).__name__}: "
            f"{error}"
        ) from error
