"""The choice of policy, tiers and settings from the user's options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from gguf_tools.experts import ExpertModel
from orchestrator.allocation.slots import FileTier, ModelShape, Rules
from orchestrator.config import Config
from orchestrator.errors import ConfigError, PolicyError
from orchestrator.events import SKIP_TIER
from orchestrator.policy import (
    ALLOWED_LOSS,
    BASELINE,
    DEFAULT,
    PLAIN,
    PLAIN_REASON,
    Policy,
    owners,
    policy_class,
)
from orchestrator.policy.base import TierOffer
from orchestrator.settings import Settings, flag_of

# Returns the slot sizes of a model reduced to some of its tiers, in the memory that holds its
# experts.
ShapeOf = Callable[[tuple[FileTier, ...]], ModelShape]


class Choice(NamedTuple):
    """A policy and the tiers of the file that it works with, best first.

    skip: experts may also be skipped.
    """

    policy: type[Policy]
    tiers: tuple[FileTier, ...]
    skip: bool


def check_unused(config: Config) -> None:
    """Raise ConfigError for an option that has no effect with the requested policy.

    Only for options of a command line. When a command switches policies to compare them, options of
    other policies are ignored.
    """
    name = config.policy
    by_loss = config.given(ALLOWED_LOSS) is not None
    for given in config.of_policies:
        having = owners(given)
        if name is None and (given == ALLOWED_LOSS or (given == "losses" and by_loss)):
            continue  # the allowed loss chooses the policy, with the help of the loss table
        if name is None and DEFAULT not in having:
            raise ConfigError(
                f"{flag_of(given)} is for --policy {' or '.join(having)}: leave it out, or ask "
                f"for that policy"
            )
        if name is not None and name not in having:
            raise unused_option(given, name)
    if name is not None and name != PLAIN:
        complaint = policy_class(name).Settings.without_effect(config.of_policies)
        if complaint is not None:
            raise ConfigError(complaint)
    if config.exact and (config.low is not None or config.low_tier is not None):
        raise ConfigError(
            "--exact computes every expert in the high precision: leave --low and --low-tier out"
        )
    if config.renormalize and config.low_tier != SKIP_TIER:
        raise ConfigError(
            f"--renormalize is for --low-tier {SKIP_TIER}: leave it out, or ask for that"
        )
    if name is not None and (name == PLAIN or policy_class(name).precisions.most == 1):
        for lower in ("low", "low_tier"):
            if getattr(config, lower) is not None:
                raise unused_option(lower, name)


def unused_option(given: str, policy: str) -> ConfigError:
    """Return the error for a setting that has no effect with the named policy."""
    reason = PLAIN_REASON if policy == PLAIN else policy_class(policy).reason
    return ConfigError(
        f"{flag_of(given)} has no effect with --policy {policy}, which {reason}: leave one of "
        f"the two out"
    )


def rules_of(config: Config, choice: Choice) -> Rules:
    """Return the rules that follow from the options and the chosen tiers."""
    return Rules(choice.skip, config.renormalize, config.exact_tiers)


def settings_of(config: Config, choice: Choice) -> Settings:
    """Return the settings of the chosen policy.

    With --exact, raises ConfigError for settings with which the policy would not be lossless.
    """
    settings = config.settings_of(choice.policy)
    if not config.exact:
        return settings
    needed = choice.policy.precisions.lossless or {}
    for name, value in needed.items():
        if config.of_policies.get(name, value) != value:
            raise ConfigError(
                f"--exact computes every expert in the high precision, which {flag_of(name)} "
                f"{config.of_policies[name]} does not: leave one of the two out"
            )
    return replace(settings, **needed)


def without_effect(config: Config) -> str | None:
    """Return a note that lower precisions have no effect, or None.

    They have none with a setting that computes every expert in the best tier.

    None if no lower precision was given, or if the allowed loss chooses the policy.
    """
    lower = [each for each in ("low", "low_tier") if getattr(config, each) is not None]
    by_loss = config.policy is None and config.given(ALLOWED_LOSS) is not None
    if not lower or by_loss or config.policy == PLAIN:
        return None
    settings = policy_class(config.policy or DEFAULT).precisions.lossless or {}
    if not settings or any(config.given(name) != value for name, value in settings.items()):
        return None
    flags = " and ".join(f"{flag_of(name)} {value:g}" for name, value in settings.items())
    return (
        f"{' and '.join(map(flag_of, lower))}: no effect with {flags}, which computes every "
        f"expert in the high precision."
    )


def wants_plain(config: Config, model: ExpertModel) -> bool:
    """Whether llama.cpp's own path could satisfy the options, given enough memory.

    Raises ConfigError for --policy plain with options that it cannot satisfy.
    """
    best = config.high_tier is None or model.tier_index(config.high_tier) == 0
    if config.policy == PLAIN:
        if not best or config.force_managed or config.expert_ram:
            raise ConfigError(
                "--policy plain computes the best tier of the file without expert slots: leave out "
                "--high-tier and --expert-ram, or choose another policy"
            )
        return True
    less = config.asks_less(policy_class(DEFAULT))
    managed = config.force_managed or config.expert_ram is not None or less
    return config.policy is None and best and not managed


def choose(config: Config, model: ExpertModel, shape_of: ShapeOf, budget: int) -> Choice:
    """Choose the policy and its tiers, unless the user named them.

    Without --policy, the policy is the baseline if every expert fits the slots and no lower
    precision or policy setting was given, otherwise the default. Every expert is in the best tier
    unless an option asks for lower precisions. Raises PolicyError for a low tier that is not below
    the high tier.
    """
    names = [tier.name for tier in model.tiers]
    policy = None if config.policy is None else policy_class(config.policy)
    mixes = policy is not None and policy.precisions.lossless is None and policy.precisions.most > 1
    if config.exact and policy is not None and mixes:
        raise PolicyError(
            f"--exact computes every expert in the high precision, and the policy {policy.name} "
            f"keeps some in lower ones: choose another --policy, or leave --exact out"
        )
    asking = policy or policy_class(DEFAULT)
    lower = asking.precisions.most > 1 and config.asks_less(asking)
    # The low tier that the user named; None for any.
    named = None
    if lower and config.low_tier not in (None, SKIP_TIER):
        named = FileTier(model.tier_index(config.low_tier or ""))
    offer = TierOffer(names, shape_of, budget, named)
    if config.high_tier is not None:
        high = FileTier(model.tier_index(config.high_tier))
    else:
        high = (policy or Policy).precisions.high(offer)
    named = (policy or Policy).precisions.low(offer, high) if lower else None
    low = named
    if lower and named is None and high + 1 < len(names):
        low = FileTier(high + 1)
    if low is not None and low <= high:
        raise PolicyError(
            f"the low tier {names[low]} is not below the high tier {names[high]}; the file "
            f"holds {', '.join(names)}, best first"
        )
    if policy is None:
        tunes = config.low is not None or config.low_tier is not None or config.of_policies
        policy = policy_class(BASELINE if offer.fits_whole(high) and not tunes else DEFAULT)
    asked = config.low_tier == SKIP_TIER and policy.precisions.most > 1
    skip = (policy.precisions.skips or asked) and not config.exact
    if low is None or asked or (policy.precisions.skips and named is None):
        return Choice(policy, (high,), skip)
    return Choice(policy, tiers_between(policy, high, named, len(names)), skip)


def tiers_between(
    policy: type[Policy], high: FileTier, low: FileTier | None, n: int
) -> tuple[FileTier, ...]:
    """Return the tiers that a policy works with, of n in the file.

    They start at the high tier and are at most as many as the policy supports. If the user named a
    low tier, it is the last of them.
    """
    if policy.precisions.most == 1:
        return (high,)
    end = n if low is None else low + 1
    tiers = tuple(FileTier(at) for at in range(high, end))[: policy.precisions.most]
    return tiers if low is None else (*tiers[:-1], low)
