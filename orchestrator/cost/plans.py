"""The plans of a model for one memory size, ordered by speed and loss.

Also the choice among them within an allowed loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gguf_tools.experts import ExpertModel
from gguf_tools.process import processor_name
from orchestrator.cache.files import digest, keep, recalled
from orchestrator.cache.profile import cached_path
from orchestrator.config import Config
from orchestrator.cost.speeds import AGREE
from orchestrator.errors import ConfigError
from orchestrator.events import SKIP_TIER
from orchestrator.plan.records import PlanRequest
from orchestrator.policy import ALLOWED_LOSS, BASELINE, PLAIN, POLICIES, Policy

# Plans whose predicted times differ by less count as equally fast; the least loss decides.
AS_FAST = 1.02
# A lossless plan replaces the default if it is faster by this factor.
CLEARLY_FASTER = 1.05
# Tokens of context in use for which a plan's speed is shown, besides a short conversation.
LENGTHS = (8192, 32768, 131072)
# Tolerance for rounding when losses are compared with the allowed loss.
_ROUNDING = 1 + 1e-9

_FORMAT = "moe-edge plans 1"
# Number of latest commands kept per model.
_MOST = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan, as in --json output.

    policy: its name. settings: the settings that select it. token_ms: milliseconds per token of an
    answer after PROMPT_TOKENS tokens. first_prompt_ms, prompt_ms: milliseconds until the answer to
    a prompt of that length begins, for the first prompt after the start and for a later one.
    hit_rate, read_bytes: per token of an answer.

    kl: mean KL divergence from the file's best tier, in nats per token; an upper bound if
    kl_at_most; None if unknown. token_ms_behind: milliseconds per token by tokens of context in
    use, for LENGTHS up to the context size. token_ms_skewed: token_ms if few experts get most uses;
    only if the usage is unknown and token_ms assumes uniform usage, otherwise None. best: no other
    plan is both faster and closer.
    """

    policy: str
    settings: Mapping[str, Any]
    tiers: list[str]
    expert_bytes: int
    resident: bool
    token_ms: float
    first_prompt_ms: float
    prompt_ms: float
    hit_rate: float
    read_bytes: float
    kl: float | None
    kl_at_most: bool = False
    token_ms_behind: Mapping[str, float] = field(default_factory=dict)
    token_ms_skewed: float | None = None
    best: bool = False

    @property
    def label(self) -> str:
        """The plan in the words of its options, with numbers rounded to three digits."""

        def text(value: Any) -> str:
            return f"{value:.3g}" if isinstance(value, float) else str(value)

        asked = {key: value for key, value in self.settings.items() if value is not None}
        asked.pop("policy", None)
        more = [f"{key.replace('_', '-')} {text(value)}" for key, value in asked.items()]
        return ", ".join([self.policy, *more])

    def is_like(self, other: Candidate) -> bool:
        """Whether the other plan has the same policy, tiers and loss."""
        return (self.policy, self.tiers, self.kl) == (other.policy, other.tiers, other.kl)

    def is_asked_by(self, settings: Mapping[str, Any] | None) -> bool:
        """Whether these are its settings, apart from the loss that they spend.

        The loss depends on the usage in earlier runs.
        """
        mine = {name: value for name, value in self.settings.items() if name != ALLOWED_LOSS}
        return mine == settings

    @property
    def is_redundant(self) -> bool:
        """Whether it duplicates the baseline, or allows a loss without need.

        A duplicate is the baseline under another name. A loss is not needed if no expert is
        missing.
        """
        alone = len(self.tiers) == 1 and self.policy not in (PLAIN, BASELINE)
        return self.resident and (alone or ALLOWED_LOSS in self.settings)


@dataclass(frozen=True, slots=True)
class Frontier:
    """Every plan that fits, fastest first.

    taken: the plan that runs if no policy is named. why: a sentence that explains the choice.
    why_not: why the losses are unknown, empty if they are known. disturbed: other programs ran
    while this machine was measured.
    """

    candidates: tuple[Candidate, ...]
    taken: Candidate
    why: str
    why_not: str = ""
    disturbed: bool = False

    @classmethod
    def of(
        cls,
        found: Sequence[Candidate],
        usual: Candidate,
        best_tier: str,
        allowed: float | None = None,
        before: Mapping[str, Any] | None = None,
        may_switch: bool = False,
    ) -> Frontier:
        """Make a frontier from plans in any order.

        usual: the plan without an allowed loss; it is replaced only by a clearly faster lossless
        plan. allowed: in nats per token. before: the settings chosen the last time. Raises
        ConfigError if no plan meets the allowed loss.
        """
        shown: list[Candidate] = []
        for each in found:
            if not each.is_redundant and not any(map(each.is_like, shown)):
                shown.append(each)
        if not any(map(usual.is_like, shown)):
            shown.append(usual)
        shown = _marked(sorted(shown, key=lambda each: each.token_ms))
        if allowed is not None:
            taken = choose(shown, allowed, before)
            reason = f"the fastest within {allowed:g} nats of {best_tier}"
        else:
            default = next(filter(usual.is_like, shown))
            taken, reason = faster_lossless(default, shown) if may_switch else default, ""
            if taken is not default:
                reason = f"lossless, and {_ahead(taken, default)} {default.label}"
            elif taken.kl != 0.0:
                reason = "as the options request"
            else:
                reason = "lossless, because no option allows a loss"
                first = min(_equals(taken, shown), key=lambda each: each.token_ms)
                if may_switch and first.token_ms < taken.token_ms:
                    reason += (
                        f"; {first.label} is predicted to be {_ahead(first, taken)} it, and would "
                        f"replace it from {CLEARLY_FASTER - 1:.0%} on"
                    )
        kl = "" if taken.kl is None else f", {'estimated ' * bool(taken.kl)}{taken.kl:.2g} nats"
        what = f"{taken.label} ({taken.token_ms:.1f} ms a token{kl})"
        return cls(tuple(shown), taken, f"{what}: {reason}.")


def _equals(usual: Candidate, found: Sequence[Candidate]) -> list[Candidate]:
    """Return `usual` and the lossless plans that compute the same."""
    same = [each for each in found if each.kl == usual.kl == 0.0 and each.tiers == usual.tiers]
    return [usual, *same]


def _ahead(faster: Candidate, slower: Candidate) -> str:
    return f"{slower.token_ms / faster.token_ms - 1:.1%} faster than"


def faster_lossless(usual: Candidate, found: Sequence[Candidate]) -> Candidate:
    """Return the fastest lossless plan that computes the same as `usual`.

    Return `usual` if that plan is not CLEARLY_FASTER.
    """
    first = min(_equals(usual, found), key=lambda each: each.token_ms)
    return first if usual.token_ms > CLEARLY_FASTER * first.token_ms else usual


def behind_text(token_ms: Mapping[str, float]) -> str:
    """Return a sentence about a plan's speed as its context fills; empty without figures.

    token_ms: Candidate.token_ms_behind.
    """
    said = [f"{1e3 / took:.1f} after {n}" for n, took in token_ms.items()]
    return f"Tokens/s as the context fills: {', '.join(said)} tokens." if said else ""


def choose(
    found: Sequence[Candidate], allowed: float, before: Mapping[str, Any] | None = None
) -> Candidate:
    """Return the fastest plan within the allowed loss.

    Among plans that are AS_FAST, return the one with the least loss.

    The previous choice stays unless another plan is faster by more than the variation of timings.
    Raises ConfigError if no plan qualifies.
    """
    within = [each for each in found if each.kl is not None and each.kl <= allowed * _ROUNDING]
    if not within:
        least = min(each.kl for each in found if each.kl is not None)
        raise ConfigError(
            f"no plan in this memory keeps to {allowed:g} nats: the closest has {least:.2g}; allow "
            f"more, or give more memory"
        )
    fastest = min(each.token_ms for each in within)
    near = (each for each in within if each.token_ms <= AS_FAST * fastest)
    best = min(near, key=lambda each: (each.kl or 0.0, each.token_ms))
    stays = (each for each in within if each.is_asked_by(before))
    return next((each for each in stays if each.token_ms <= AGREE * best.token_ms), best)


def _marked(found: Sequence[Candidate]) -> list[Candidate]:
    """Mark the plans that no other plan beats in both speed and loss. found: by rising time."""
    least, marked = float("inf"), []
    for each in found:
        best = each.kl is not None and each.kl < least
        least = each.kl if best and each.kl is not None else least
        marked.append(replace(each, best=best))
    return marked


def settings_of_plans(
    config: Config, model: ExpertModel, left: Mapping[str, float] | None
) -> list[dict[str, Any]]:
    """Return the settings of every plan that the registered policies and the file's tiers offer.

    left: the rest of the allowed loss in nats by name of the file's tiers; None if no loss is
    allowed.
    """
    every = [tier.name for tier in model.tiers]
    names = every
    if config.high_tier is not None:
        names = [every[model.tier_index(config.high_tier)]]
    asked: list[dict[str, Any]] = [{"policy": PLAIN}]
    for name, policy in POLICIES.items():
        if ALLOWED_LOSS not in policy.Settings.declared():
            asked += _settings_of(name, policy, names, every, config.low_tier)
        elif left is not None:
            # The policy may spend what its best tier leaves of the allowed loss.
            asked += [
                {"policy": name, "high_tier": high, ALLOWED_LOSS: left[high]}
                for high in names
                if left[high] > 0.0
            ]
    return asked


def _settings_of(
    name: str,
    policy: type[Policy],
    names: Sequence[str],
    every: Sequence[str],
    low_tier: str | None,
) -> Iterator[dict[str, Any]]:
    """Yield the settings of one policy's plans.

    A policy with a lossless form yields that form in each of the tiers `names`. It also yields each
    of these tiers with the requested low tier, or with the next lower tier and with skipping.
    Another policy chooses its own tiers, if the file has several.
    """
    mixes = policy.precisions.most > 1
    if policy.precisions.lossless is None:
        if not mixes or len(every) > 1:
            yield {"policy": name}
        return
    for high in names:
        yield {"policy": name, "high_tier": high, "low_tier": None, **policy.precisions.lossless}
        if mixes:
            below = every[every.index(high) + 1 :][:1]
            for low in [low_tier] if low_tier else [*below, SKIP_TIER]:
                yield {"policy": name, "high_tier": high, "low_tier": low}


class TakenPlans:
    """The settings of the plan chosen for a request, for this model on this processor.

    They are kept in the user cache, so that the same command runs the same plan later. Read and
    write errors are ignored.
    """

    def __init__(self, request: PlanRequest, model: ExpertModel) -> None:
        self._key = digest(processor_name(), request.of_run())
        self._path = cached_path(model, "plans")

    def recall(self) -> Mapping[str, Any] | None:
        """Return the settings, without the loss that they spend.

        Return None if no plan was chosen before.
        """
        found = recalled(self._path, _FORMAT, "taken").get(self._key)
        return found if isinstance(found, dict) else None

    def keep(self, settings: Mapping[str, Any]) -> None:
        """Store the settings of the chosen plan."""
        known = recalled(self._path, _FORMAT, "taken")
        known.pop(self._key, None)
        known[self._key] = {k: v for k, v in settings.items() if k != ALLOWED_LOSS}
        latest = dict([*known.items()][-_MOST:])
        keep(self._path, _FORMAT, "taken", latest)
