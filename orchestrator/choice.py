"""What the options ask for, and what they leave open: the policy, its tiers, its settings."""

from __future__ import annotations

from collections.abc import Callable

from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.errors import ConfigError, PolicyError
from orchestrator.footprint import slots_of_all
from orchestrator.policy import PolicySettings
from orchestrator.policy.base import ModelShape
from orchestrator.policy.versions import resident_plan

# A model reduced to some of its tiers, as it lies in the memory of its experts.
ShapeOf = Callable[[tuple[int, ...]], ModelShape]

PLAIN, LRU, DYMOE, DYNAEXQ = "plain", "lru", "dymoe", "dynaexq"
SKIP_TIER = "skip"
USUAL_HIGH = "q4_k"
USUAL_RETENTION = 0.75

# Why a policy has no use for which options.
_UNUSED: dict[str | None, tuple[str, tuple[str, ...]]] = {
    PLAIN: ("runs the best precision alone", ("low", "low_tier", "retention")),
    LRU: ("runs one precision", ("low", "low_tier", "retention")),
    DYNAEXQ: ("fills the budget with high copies", ("retention",)),
}


def prefetch_mode(config: Config) -> str:
    """ "auto", "on" or "off": what was asked for, as far as there is a look-ahead and what is
    computed may depend on what is in memory."""
    return config.prefetch if config.n_ahead and not config.exact_tiers else "off"


def check_unused(config: Config) -> None:
    """Raises ConfigError for an option that the policy asked for has no use for.

    For what a command line asks for at once: a policy that is changed later, to compare, just
    leaves such options alone.
    """
    for name in ("profile", "transition_rate"):
        if config.policy != DYNAEXQ and getattr(config, name) is not None:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option} is for --policy dynaexq: leave it out, or ask for that policy"
            )
    if config.renormalize and config.low_tier != SKIP_TIER:
        raise ConfigError("--renormalize is for --low-tier skip: leave it out, or ask for that")
    if config.policy not in _UNUSED:
        return
    reason, unused = _UNUSED[config.policy]
    for name in unused:
        if getattr(config, name) is not None:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option} has no effect with --policy {config.policy}, which {reason}: leave one "
                f"of the two out"
            )


def policy_settings(config: Config, tiers: tuple[int, ...]) -> PolicySettings:
    """The options that policies have a use for; tiers: the file's tier indices in use."""
    return PolicySettings(
        retention=_retention(config, tiers),
        skip_low=config.low_tier == SKIP_TIER,
        prefetch=prefetch_mode(config),
        renormalize=config.renormalize,
        schedule=config.schedule,
        heavy_hitters=config.heavy_hitters,
        prompts_pass=config.prompts_pass,
        exact=config.exact_tiers,
        update_steps=config.update_steps,
        hotness_decay=config.hotness_decay,
        hysteresis=config.hysteresis,
        rank_slack=config.rank_slack,
        hot_experts=config.hot_experts,
    )


def _retention(config: Config, tiers: tuple[int, ...]) -> float:
    """What was asked for; else 1 where there is nothing below the high tier."""
    if config.retention is not None:
        return config.retention
    return 1.0 if len(tiers) == 1 and config.low_tier != SKIP_TIER else USUAL_RETENTION


def wants_plain(config: Config, model: ExpertModel) -> bool:
    """Whether the plain path could serve what is asked for, were there memory enough."""
    best = config.high_tier is None or model.tier_index(config.high_tier) == 0
    if config.policy == PLAIN:
        if not best or config.force_managed or config.expert_ram:
            raise ConfigError(
                "the plain path runs the best tier of the file and no expert slots: leave out "
                "--high-tier and --expert-ram, or choose another policy"
            )
        return True
    low_asked = config.low is not None or config.low_tier is not None
    managed = config.force_managed or config.expert_ram is not None or low_asked
    return config.policy is None and best and not managed


def choose(
    config: Config, model: ExpertModel, shape_of: ShapeOf, budget: int
) -> tuple[str, tuple[int, ...]]:
    """(policy name, file tier indices) where the user left them open."""
    names = [tier.name for tier in model.tiers]
    # Experts below the high tier, as far as the user said: a tier of that name, or any.
    named = None
    if config.policy != LRU and config.low_tier not in (None, SKIP_TIER):
        named = model.tier_index(config.low_tier or "")
    if config.high_tier is not None:
        high = model.tier_index(config.high_tier)
    elif config.policy == DYNAEXQ and len(names) > 1:
        high = _above_what_fits(model, shape_of, budget) if named is None else max(0, named - 1)
    else:
        high = _best_that_fits(config, model, shape_of, budget, named)
    low = named if named is not None else high + 1 if high + 1 < len(names) else None
    if low is not None and low <= high:
        raise PolicyError(
            f"the low tier {names[low]} is not below the high tier {names[high]}; the file "
            f"holds {', '.join(names)}, best first"
        )
    if config.policy is not None:
        name = config.policy
    elif config.low is not None or config.low_tier is not None or config.retention is not None:
        name = DYMOE
    else:
        name = LRU if slots_of_all(shape_of((high,))) <= budget else DYMOE
    if name == LRU or low is None or config.low_tier == SKIP_TIER:
        return name, (high,)
    return name, (high, low)


def _best_that_fits(
    config: Config, model: ExpertModel, shape_of: ShapeOf, budget: int, low: int | None
) -> int:
    """The best tier where all of it fits, else q4_k where the file has it above a low tier that
    was asked for, else the best one after all."""
    names = [tier.name for tier in model.tiers]
    if slots_of_all(shape_of((0,))) <= budget or USUAL_HIGH not in names:
        return 0
    usual = names.index(USUAL_HIGH)
    above = usual < (len(names) - 1 if low is None else low)
    return usual if above or (low is None and config.low is None) else 0


def _above_what_fits(model: ExpertModel, shape_of: ShapeOf, budget: int) -> int:
    """The tier above the best one whose copies all fit; else the one above the lowest."""
    above = range(len(model.tiers) - 1)
    fits = (at for at in above if resident_plan(shape_of((at, at + 1)), budget, None))
    return next(fits, above[-1])
