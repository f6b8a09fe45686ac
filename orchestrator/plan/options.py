"""Options without effect, and notes about a model, for commands."""

from __future__ import annotations

from gguf_tools.experts import ExpertModel
from gguf_tools.verify.structure import foreign_problems
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.events import SKIP_TIER
from orchestrator.policy import ALLOWED_LOSS, DEFAULT, PLAIN, PLAIN_REASON, owners, policy_class
from orchestrator.settings import flag_of


def check_unused(config: Config) -> None:
    """Raise ConfigError if an option of the command line has no effect with the policy.

    The policy is the one that the user named, otherwise the default policy.
    """
    name = config.policy
    by_loss = config.given(ALLOWED_LOSS) is not None
    for given in config.of_policies:
        having = owners(given)
        if name is None and (given == ALLOWED_LOSS or (given == "losses" and by_loss)):
            continue  # the allowed loss chooses the policy, with the help of the loss table
        if name is None and DEFAULT not in having:
            raise ConfigError(
                f"{flag_of(given)} is for --policy {' or '.join(having)}: leave it out, or choose "
                f"that policy"
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
            f"--renormalize needs --low-tier {SKIP_TIER}: give both options, or leave "
            f"--renormalize out"
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


def without_effect(config: Config) -> str | None:
    """Return a note for the user if the options --low and --low-tier have no effect, else None.

    The two options give the policy a lower precision for some experts. They have no effect if a
    setting of the policy, such as `--retention 1`, requires the high precision for every expert.
    The note names the given options and this setting.

    If the user gave `--max-loss` without `--policy`, the result is None, because the policy is
    chosen later.
    """
    lower = [each for each in ("low", "low_tier") if getattr(config, each) is not None]
    by_loss = config.policy is None and config.given(ALLOWED_LOSS) is not None
    if not lower or by_loss or config.policy == PLAIN:
        return None
    settings = policy_class(config.policy or DEFAULT).precisions.lossless or {}
    if not settings or any(config.given(name) != value for name, value in settings.items()):
        return None
    lossless = " and ".join(f"{flag_of(name)} {value:g}" for name, value in settings.items())
    options = " and ".join(map(flag_of, lower))
    return f"{options}: no effect, because every expert has the high precision with {lossless}."


def notes_of(config: Config, model: ExpertModel) -> list[str]:
    """Return notes that the user should read before the model runs.

    One note says that --ctx exceeds the training context. Other notes name a part of the file whose
    quantization differs from the other parts. Such a model runs, but the file is probably a
    mistake.
    """
    own, asked, notes = model.hparams.context_length, config.ctx, []
    if own and asked is not None and asked > own:
        notes.append(f"--ctx {asked} is reduced to the model's training context, {own} tokens.")
    for parts in model.split_files:
        notes += [f"{each.text}." for each in foreign_problems(parts)]
    return notes
