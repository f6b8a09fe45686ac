"""The plans of one model in one memory, by how fast they are and what they lose, and the one that
is taken within a loss that the user allows."""

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
from orchestrator.policy import ALLOWED_LOSS, BASELINE, PLAIN, POLICIES, Policy

# Plans whose predicted times differ by less are as fast as each other: the one that loses least is
# taken.
AS_FAST = 1.02
# Of plans that lose nothing, another one than the default is taken if it is this much faster.
CLEARLY_FASTER = 1.05
# Tokens of context in use for which a plan's speed is said beside that of a short conversation.
LENGTHS = (8192, 32768, 131072)
# What is spent and what is lost besides add up to what is allowed, but for this.
_ROUNDING = 1 + 1e-9

_FORMAT = "moe-edge plans 1"
# So many commands of a model are kept, the latest ones.
_MOST = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan, as --json has it. policy: its name; settings: what asks for it. Milliseconds: of
    a token of an answer behind PROMPT_TOKENS, and until the answer to a prompt of as many, the
    first one after the start and a later one. hit_rate, read_bytes: of such a token. kl: mean KL
    from the file's best tier, in nats a token; an upper estimate where kl_at_most; None where it is
    not known. token_ms_behind: of a token with so many tokens of context in use, of LENGTHS as far
    as the context goes. token_ms_skewed: as token_ms where few experts are used mostly, if nobody
    knows how they are used and token_ms takes them as used alike; else None. best: no other plan is
    both faster and closer."""

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
        """As a user would ask for it, with three digits of what is a number."""

        def text(value: Any) -> str:
            return f"{value:.3g}" if isinstance(value, float) else str(value)

        asked = {key: value for key, value in self.settings.items() if value is not None}
        asked.pop("policy", None)
        more = [f"{key.replace('_', '-')} {text(value)}" for key, value in asked.items()]
        return ", ".join([self.policy, *more])

    def is_like(self, other: Candidate) -> bool:
        """Whether it computes the same by the same policy."""
        return (self.policy, self.tiers, self.kl) == (other.policy, other.tiers, other.kl)

    def is_asked_by(self, settings: Mapping[str, Any] | None) -> bool:
        """Whether these are its settings, whatever they spend: what is left to spend follows from
        what earlier runs used."""
        mine = {name: value for name, value in self.settings.items() if name != ALLOWED_LOSS}
        return mine == settings

    @property
    def is_another_ones(self) -> bool:
        """Whether it is what the baseline would do, by another name; or allows a loss where nothing
        is missing that a loss could save."""
        alone = len(self.tiers) == 1 and self.policy not in (PLAIN, BASELINE)
        return self.resident and (alone or ALLOWED_LOSS in self.settings)


@dataclass(frozen=True, slots=True)
class Frontier:
    """Every plan that fits, the fastest first. taken: the one that runs where no policy is named;
    why: a sentence about it. why_not: why nobody knows what they lose, empty where that is known.
    disturbed: other programs ran while this machine was measured for it."""

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
        """Make it of plans in any order. usual: what runs if no loss is allowed, in nats; it stays
        unless a plan that loses nothing either is clearly faster. before: the settings that were
        taken the last time. Raises ConfigError for a loss that no plan keeps to."""
        shown: list[Candidate] = []
        for each in found:
            if not each.is_another_ones and not any(map(each.is_like, shown)):
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
                reason = "what the options ask for"
            else:
                reason = "lossless, as nothing less is asked for"
                first = min(_equals(taken, shown), key=lambda each: each.token_ms)
                if may_switch and first.token_ms < taken.token_ms:
                    reason += (
                        f"; {first.label} is predicted to be {_ahead(first, taken)} it, and takes "
                        f"its place from {CLEARLY_FASTER - 1:.0%} on"
                    )
        kl = "" if taken.kl is None else f", {'estimated ' * bool(taken.kl)}{taken.kl:.2g} nats"
        what = f"{taken.label} ({taken.token_ms:.1f} ms a token{kl})"
        return cls(tuple(shown), taken, f"{what}: {reason}.")


def _equals(usual: Candidate, found: Sequence[Candidate]) -> list[Candidate]:
    """The plans that compute what `usual` computes, without a loss, itself among them."""
    same = [each for each in found if each.kl == usual.kl == 0.0 and each.tiers == usual.tiers]
    return [usual, *same]


def _ahead(faster: Candidate, slower: Candidate) -> str:
    return f"{slower.token_ms / faster.token_ms - 1:.1%} faster than"


def faster_lossless(usual: Candidate, found: Sequence[Candidate]) -> Candidate:
    """Return the fastest plan that computes what `usual` computes, without a loss, if it is
    CLEARLY_FASTER; else `usual`."""
    first = min(_equals(usual, found), key=lambda each: each.token_ms)
    return first if usual.token_ms > CLEARLY_FASTER * first.token_ms else usual


def behind_text(token_ms: Mapping[str, float]) -> str:
    """A sentence about the speeds of a plan as its context fills, token_ms_behind of Candidate;
    empty without any."""
    said = [f"{1e3 / took:.1f} behind {n}" for n, took in token_ms.items()]
    return f"Tokens/s as the context fills: {', '.join(said)} tokens." if said else ""


def choose(
    found: Sequence[Candidate], allowed: float, before: Mapping[str, Any] | None = None
) -> Candidate:
    """The fastest plan whose KL is within what is allowed; of those that are AS_FAST the one that
    loses least. The one that was taken before stays, unless another one is faster by more than
    timings of the same thing differ. Raises ConfigError where there is none."""
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
    """With those that no other one beats in both; found by rising time."""
    least, marked = float("inf"), []
    for each in found:
        best = each.kl is not None and each.kl < least
        least = each.kl if best and each.kl is not None else least
        marked.append(replace(each, best=best))
    return marked


def settings_of_plans(
    config: Config, model: ExpertModel, left: Mapping[str, float] | None
) -> list[dict[str, Any]]:
    """The settings of each plan that the registry of policies and the file's tiers offer. left: of
    the loss that is allowed, in nats, by the names of the file's tiers; None where none is."""
    every = [tier.name for tier in model.tiers]
    names = every
    if config.high_tier is not None:
        names = [every[model.tier_index(config.high_tier)]]
    asked: list[dict[str, Any]] = [{"policy": PLAIN}]
    for name, policy in POLICIES.items():
        if ALLOWED_LOSS not in policy.Settings.declared():
            asked += _settings_of(name, policy, names, every, config.low_tier)
        elif left is not None:
            # What spends a loss while it decodes: what the best tier in use leaves of it.
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
    """Settings of the plans that one policy has. Where it has a lossless form: that in each of
    some tiers of the file, and each of them with the low one that was asked for, or else with the
    next lower one, and with skipping. Else as it chooses, where the file has several."""
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
    """The settings of the plan that was taken under a config's options for this model on this
    processor, in the user cache: the same command runs the same tomorrow. What cannot be read or
    written there is done without."""

    def __init__(self, config: Config, model: ExpertModel) -> None:
        self._key = digest(processor_name(), config.of_run())
        self._path = cached_path(model, "plans")

    def recall(self) -> Mapping[str, Any] | None:
        """The settings, without the loss that they spend; None where nothing was taken."""
        found = recalled(self._path, _FORMAT, "taken").get(self._key)
        return found if isinstance(found, dict) else None

    def keep(self, settings: Mapping[str, Any]) -> None:
        """Keeps what was taken now."""
        known = recalled(self._path, _FORMAT, "taken")
        known.pop(self._key, None)
        known[self._key] = {k: v for k, v in settings.items() if k != ALLOWED_LOSS}
        latest = dict([*known.items()][-_MOST:])
        keep(self._path, _FORMAT, "taken", latest)
