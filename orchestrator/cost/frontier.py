"""The plans of one model in one memory, by how fast they are and what they lose, and the one that
is taken within a loss that the user allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.cost.foreseen import Loses, foreseen
from orchestrator.cost.timings import AGREE
from orchestrator.errors import BudgetError, ConfigError, PolicyError
from orchestrator.events import SKIP_TIER
from orchestrator.memory.plan import MemoryPlan
from orchestrator.policy import (
    ALLOWED_LOSS,
    BASELINE,
    PLAIN,
    POLICIES,
    Policy,
)

# Tokens of the prompts that are predicted, and of the context behind which a token is.
PROMPT_TOKENS = 512
# Plans whose predicted times differ by less are as fast as each other: the one that loses least is
# taken.
AS_FAST = 1.02
# What is spent and what is lost besides add up to what is allowed, but for this.
_ROUNDING = 1 + 1e-9


class Timed(Protocol):
    """What a plan takes, as orchestrator.cost.predict says it."""

    @property
    def hit_rate(self) -> float: ...
    @property
    def read_bytes(self) -> float: ...
    def token_s(self, cells: int = 0) -> float: ...
    def prompt_s(self, n_tokens: int, first: bool = False) -> float: ...


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What is known of a model on this machine. plan: how it lies with a config; raises
    BudgetError. time: what a plan with its config takes. uses: float64 [n_layers, n_expert], how
    often a token uses each expert. estimate: what tiers of the file cost, all of them, best first;
    None where that was not fitted, and why_not says so, with what to run. disturbed: whether other
    programs ran while this machine was measured for the times that were asked for."""

    plan: Callable[[Config], MemoryPlan]
    time: Callable[[MemoryPlan, Config], Timed]
    uses: np.ndarray
    estimate: Loses | None
    why_not: str = ""
    disturbed: Callable[[], bool] = lambda: False
    before: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan. name: of its policy; asked: the settings that ask for it. Seconds: of a token of an
    answer behind PROMPT_TOKENS, and until the answer to a prompt of as many, the first one after
    the start and a later one. kl: mean KL from the file's best tier, in nats a token; an upper
    estimate where at_most; None where it is not known. best: no other plan is both faster and
    closer."""

    name: str
    asked: Mapping[str, Any]
    tiers: tuple[str, ...]
    expert_bytes: int
    resident: bool
    token_s: float
    first_prompt_s: float
    prompt_s: float
    hit_rate: float
    read_bytes: float
    kl: float | None
    at_most: bool = False
    best: bool = False

    @property
    def label(self) -> str:
        """As a user would ask for it, with three digits of what is a number."""

        def text(value: Any) -> str:
            return f"{value:.3g}" if isinstance(value, float) else str(value)

        asked = {key: value for key, value in self.asked.items() if value is not None}
        more = [f"{key.replace('_', '-')} {text(value)}" for key, value in asked.items()]
        shown = [each for each in more if not each.startswith("policy ")]
        return ", ".join([self.name, *shown])

    def is_asked_by(self, settings: Mapping[str, Any]) -> bool:
        """Whether these are its settings, whatever they spend: what is left to spend follows from
        what earlier runs used."""
        mine = {name: value for name, value in self.asked.items() if name != ALLOWED_LOSS}
        return mine == settings

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "policy": self.name,
            "settings": dict(self.asked),
            "tiers": list(self.tiers),
            "expert_bytes": self.expert_bytes,
            "resident": self.resident,
            "token_ms": 1e3 * self.token_s,
            "first_prompt_ms": 1e3 * self.first_prompt_s,
            "prompt_ms": 1e3 * self.prompt_s,
            "hit_rate": self.hit_rate,
            "read_bytes": self.read_bytes,
            "kl": self.kl,
            "kl_at_most": self.at_most,
            "best": self.best,
        }


@dataclass(frozen=True, slots=True)
class Frontier:
    """Every plan that fits, the fastest first. taken: the one that runs where no policy is named;
    why: a sentence about it. disturbed: as of Knowledge."""

    candidates: tuple[Candidate, ...]
    taken: Candidate
    why: str
    disturbed: bool = False

    def settled(self, config: Config) -> Config:
        """The config with the plan that is taken in the place of the loss that is allowed."""
        return config.compared(**{ALLOWED_LOSS: None, **self.taken.asked})


def frontier(config: Config, model: ExpertModel, known: Knowledge) -> Frontier:
    """The plans of a model under a config that names no policy. Raises BudgetError where none fits,
    ConfigError for a loss that is allowed where nobody knows what plans lose, or that no plan keeps
    to."""
    allowed = config.given(ALLOWED_LOSS)
    if allowed is not None and known.estimate is None:
        raise ConfigError(known.why_not)
    plain = config.with_changes(**{ALLOWED_LOSS: None}) if allowed is not None else config
    found = list(_candidates(plain, model, known, allowed))
    usual = _measured(plain, {}, known.plan(plain), known, model)
    if not any(_same(usual, each) for each in found):
        found.append(usual)
    found = _marked(sorted(found, key=lambda each: each.token_s))
    if allowed is None:
        taken = next(each for each in found if _same(each, usual))
        lossless = "lossless, as nothing less is asked for"
        reason = lossless if taken.kl == 0.0 else "what the options ask for"
        why = f"{_what(taken)}: {reason}."
    else:
        taken = choose(found, allowed, known.before)
        why = f"{_what(taken)}: the fastest within {allowed:g} nats of {model.tiers[0].name}."
    return Frontier(tuple(found), taken, why, known.disturbed())


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
    fastest = min(each.token_s for each in within)
    near = (each for each in within if each.token_s <= AS_FAST * fastest)
    best = min(near, key=lambda each: (each.kl or 0.0, each.token_s))
    stays = (each for each in within if before is not None and each.is_asked_by(before))
    return next((each for each in stays if each.token_s <= AGREE * best.token_s), best)


def _what(taken: Candidate) -> str:
    kl = "" if taken.kl is None else f", {'at most ' * taken.at_most}{taken.kl:.2g} nats"
    return f"{taken.label} ({1e3 * taken.token_s:.1f} ms a token{kl})"


def _marked(found: list[Candidate]) -> list[Candidate]:
    """With those that no other one beats in both; found by rising time."""
    least = np.inf
    marked = []
    for each in found:
        better = each.kl is not None and each.kl < least
        least = each.kl if better and each.kl is not None else least
        marked.append(replace(each, best=better))
    return marked


def _same(one: Candidate, other: Candidate) -> bool:
    return one.name == other.name and one.tiers == other.tiers and one.kl == other.kl


def _candidates(
    config: Config, model: ExpertModel, known: Knowledge, allowed: float | None
) -> Iterator[Candidate]:
    """Each plan that the registry of policies and the file's tiers offer, and that fits."""
    every = [tier.name for tier in model.tiers]
    names = every
    if config.high_tier is not None:
        names = [every[model.tier_index(config.high_tier)]]
    asked: list[dict[str, Any]] = [{"policy": PLAIN}]
    for name, policy in POLICIES.items():
        if ALLOWED_LOSS in policy.Settings.declared():
            spending = _by_budget(name, every, known, allowed)
            asked += [each for each in spending if each["high_tier"] in names]
            continue
        asked += _asked(name, policy, names, every, config.low_tier)
    seen: list[Candidate] = []
    for settings in asked:
        with suppress(BudgetError, PolicyError, ConfigError):
            changed = config.compared(**settings)
            plan = known.plan(changed)
            if plan.total_bytes > plan.ram_bytes and not plan.device:
                continue  # plain, where it does not fit
            found = _measured(changed, settings, plan, known, model)
            alone = found.resident and len(found.tiers) == 1
            if alone and found.name not in (PLAIN, BASELINE):
                continue  # the baseline, by another name
            if found.resident and ALLOWED_LOSS in settings:
                continue  # nothing is missing that a loss could save
            if not any(_same(found, each) for each in seen):
                seen.append(found)
                yield found


def _asked(
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


def _by_budget(
    name: str, names: Sequence[str], known: Knowledge, allowed: float | None
) -> Iterator[dict[str, Any]]:
    """Plans that spend a loss while they decode: what the best tier in use leaves of it."""
    if allowed is None or known.estimate is None:
        return
    for tier, high in enumerate(names):
        spent = known.estimate.of_uses(known.uses, np.full(known.uses.shape, tier, np.uint8))
        if spent < allowed:
            yield {"policy": name, "high_tier": high, ALLOWED_LOSS: allowed - spent}


def _measured(
    config: Config,
    asked: Mapping[str, Any],
    plan: MemoryPlan,
    known: Knowledge,
    model: ExpertModel,
) -> Candidate:
    time = known.time(plan, config)
    loses = foreseen(plan, known.uses, known.estimate, model.tiers[0].name)
    return Candidate(
        name=plan.policy.name if plan.policy else PLAIN,
        asked=asked,
        tiers=(*plan.tier_names, *([SKIP_TIER] if plan.skip else [])),
        expert_bytes=plan.slots.total_bytes if plan.slots else plan.expert_bytes,
        resident=plan.absent_bytes == 0,
        token_s=time.token_s(PROMPT_TOKENS),
        first_prompt_s=time.prompt_s(PROMPT_TOKENS, first=True),
        prompt_s=time.prompt_s(PROMPT_TOKENS),
        hit_rate=time.hit_rate,
        read_bytes=time.read_bytes,
        kl=loses.kl,
        at_most=loses.at_most,
    )
