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
from orchestrator.errors import ConfigError
from orchestrator.events import SKIP_TIER
from orchestrator.plan.records import PlanRequest
from orchestrator.policy import ALLOWED_LOSS, BASELINE, PLAIN, POLICIES, Policy

# Plans whose predicted times differ by less count as equally fast; the least loss decides.
AS_FAST = 1.02
# A lossless plan replaces the default if it is faster by this factor.
CLEARLY_FASTER = 1.05
# A plan replaces that of the previous command if it is faster by more than this factor.
REPLACES = 1.2
# Tokens of context in use for which a plan's speed is shown, besides a short conversation.
LENGTHS = (8192, 32768, 131072)
# Tolerance for rounding when losses are compared with the allowed loss.
_ROUNDING = 1 + 1e-9

_FORMAT = "moe-edge plans 1"
# Number of latest commands kept per model.
_MOST = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan with its predicted speed and quality loss, as in the output of --json.

    - policy, settings: the name of the policy, and the settings that select this plan.
    - tiers: the precisions in which an expert may be computed, best first.
    - resident: whether every expert is in memory.
    - token_ms: milliseconds per token of an answer to a prompt of 512 tokens (PROMPT_TOKENS).
    - first_prompt_ms: milliseconds until the answer to such a prompt begins, right after the start.
    - prompt_ms: milliseconds until the answer to a later prompt of 512 tokens begins.
    - hit_rate: the fraction of the experts requested by tokens of an answer that are in memory.
    - read_bytes: the mean number of bytes that a token of an answer reads from disk.
    - kl: mean KL divergence from the file's best tier, in nats per token; None if unknown.
    - kl_at_most: whether kl is an upper bound.
    - best: whether no other plan is both faster and less lossy.
    - token_ms_behind: maps numbers of context tokens in use (LENGTHS) to milliseconds per token.
    - token_ms_skewed: token_ms if few experts get most uses. It is given only if the usage of
      experts is unknown, because token_ms then assumes uniform usage.
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
        """The policy and the settings of the plan in a few words, for tables."""

        def text(value: Any) -> str:
            return f"{value:.3g}" if isinstance(value, float) else str(value)

        asked = {key: value for key, value in self.settings.items() if value is not None}
        asked.pop("policy", None)
        more = [f"{key.replace('_', '-')} {text(value)}" for key, value in asked.items()]
        return ", ".join([self.policy, *more])

    def is_like(self, other: Candidate) -> bool:
        """Return whether another plan has the same policy, tiers and predicted loss."""
        return (self.policy, self.tiers, self.kl) == (other.policy, other.tiers, other.kl)

    def matches(self, settings: Mapping[str, Any] | None) -> bool:
        """Return whether these settings ask for this plan.

        settings: the settings of a plan, by name, as an earlier command stored them. None means
        that nothing was stored, and the result is False. Otherwise, the settings must equal the
        field `settings` of this plan. The loss budget is not compared, because it is not stored.
        """
        mine = {name: value for name, value in self.settings.items() if name != ALLOWED_LOSS}
        return mine == settings

    @property
    def is_redundant(self) -> bool:
        """Whether the list of plans omits this plan, because the plan has no advantage.

        Two kinds of plans are redundant. Both keep all experts in memory:

        - A plan with a loss budget. The budget serves to avoid reads of experts from disk, and this
          plan does not read any.
        - A plan with a single tier (precision), unless its policy is the baseline policy or
          llama.cpp's own path. The baseline policy with this tier gives the same output.
        """
        alone = len(self.tiers) == 1 and self.policy not in (PLAIN, BASELINE)
        return self.resident and (alone or ALLOWED_LOSS in self.settings)


@dataclass(frozen=True, slots=True)
class Frontier:
    """The plans that fit in memory, fastest first, and the chosen plan.

    A plan is a policy with its settings, with which a model can run. taken: the chosen plan. why: a
    sentence that explains this choice. why_not: why the quality losses of plans are unknown; empty
    if they are known. disturbed: whether other programs ran while this machine was measured.
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
        """Sort plans by predicted speed, and choose the plan with which the model will run.

        With `allowed`, the fastest plan that loses at most `allowed` is chosen. Without `allowed`,
        the default plan `usual` is chosen.

        - found: the plans. A plan with the policy, tiers and loss of an earlier plan is left out.
          So is a plan without advantages (Candidate.is_redundant).
        - usual: the default plan.
        - best_tier: the name of the file's best precision, for the text that explains the choice.
        - allowed: the maximum quality loss in nats per token, or None.
        - before: only with `allowed`: the settings of the plan that an earlier command chose. This
          plan is chosen again unless another plan is clearly faster.
        - may_switch: only without `allowed`: a clearly faster plan with the same output replaces
          `usual`.

        Raises ConfigError if every plan loses more than `allowed`.
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
            reason = (
                f"the fastest plan with a quality loss of at most {allowed:g} nats per token "
                f"relative to {best_tier}"
            )
        else:
            default = next(filter(usual.is_like, shown))
            taken, reason = faster_lossless(default, shown) if may_switch else default, ""
            if taken is not default:
                gain = _gain(taken, default)
                reason = f"a lossless plan, predicted to be {gain} faster than {default.label}"
            elif taken.kl != 0.0:
                reason = "as the options request"
            else:
                reason = "a lossless plan, because no option allows a quality loss"
                first = min(_equals(taken, shown), key=lambda each: each.token_ms)
                if may_switch and first.token_ms < taken.token_ms:
                    gain = _gain(first, taken)
                    reason = (
                        f"{reason}. The default plan {taken.label} is kept, because the plan "
                        f"{first.label} is less than {CLEARLY_FASTER - 1:.0%} faster (predicted: "
                        f"{gain})"
                    )
        guess = "estimated " if taken.kl else ""
        kl = "" if taken.kl is None else f", {guess}{taken.kl:.2g} nats"
        what = f"{taken.label} ({taken.token_ms:.1f} ms a token{kl})"
        return cls(tuple(shown), taken, f"{what}: {reason}.")


def _equals(usual: Candidate, found: Sequence[Candidate]) -> list[Candidate]:
    """Return `usual` and all lossless plans that compute the same result."""
    same = [each for each in found if each.kl == usual.kl == 0.0 and each.tiers == usual.tiers]
    return [usual, *same]


def _gain(faster: Candidate, slower: Candidate) -> str:
    return f"{slower.token_ms / faster.token_ms - 1:.1%}"


def faster_lossless(usual: Candidate, found: Sequence[Candidate]) -> Candidate:
    """Return the fastest of the plans `found` that gives the same output as `usual`.

    Return `usual` itself if no such plan is clearly faster (by the factor CLEARLY_FASTER). Two
    plans give the same output if both are lossless and have the same tiers (precisions). So the
    result is also `usual` if `usual` is not lossless.
    """
    first = min(_equals(usual, found), key=lambda each: each.token_ms)
    return first if usual.token_ms > CLEARLY_FASTER * first.token_ms else usual


def context_speeds_text(token_ms: Mapping[str, float]) -> str:
    """Return a sentence with a plan's tokens per second for several lengths of the context.

    token_ms: maps the number of context tokens in use to milliseconds per token. If it is empty,
    the sentence is empty.
    """
    said = [f"{1e3 / took:.1f} tokens/s after {n} tokens" for n, took in token_ms.items()]
    if not said:
        return ""
    return f"Speed of the chosen plan as the context fills: {', '.join(said)}."


def choose(
    found: Sequence[Candidate], allowed: float, before: Mapping[str, Any] | None = None
) -> Candidate:
    """Return the fastest plan whose quality loss is within the allowed loss.

    Of several plans that are about equally fast (AS_FAST), the least lossy one is chosen. before:
    the settings of the plan that was chosen the last time, or None. That plan stays chosen unless
    another plan is clearly faster (REPLACES). Raises ConfigError if no plan is within the allowed
    loss.
    """
    within = [each for each in found if each.kl is not None and each.kl <= allowed * _ROUNDING]
    if not within:
        least = min(each.kl for each in found if each.kl is not None)
        raise ConfigError(
            f"an allowed quality loss of {allowed:g} nats per token is too small for this memory: "
            f"the smallest possible loss is {least:.2g}. Allow a larger loss, or give more memory"
        )
    fastest = min(each.token_ms for each in within)
    near = (each for each in within if each.token_ms <= AS_FAST * fastest)
    best = min(near, key=lambda each: (each.kl or 0.0, each.token_ms))
    stays = (each for each in within if each.matches(before))
    return next((each for each in stays if each.token_ms <= REPLACES * best.token_ms), best)


def _marked(found: Sequence[Candidate]) -> list[Candidate]:
    """Return the plans with `best` set if no other plan is both faster and less lossy.

    found: the plans in the order of rising time per token.
    """
    least, marked = float("inf"), []
    for each in found:
        best = each.kl is not None and each.kl < least
        least = each.kl if best and each.kl is not None else least
        marked.append(replace(each, best=best))
    return marked


def settings_of_plans(
    config: Config, model: ExpertModel, left: Mapping[str, float] | None
) -> list[dict[str, Any]]:
    """Return the settings of each possible plan for a model file, one dictionary for each plan.

    A plan is a policy with precisions (tiers) of the file. Its settings are values such as the
    name of the policy, the best tier and a loss budget. `config` may limit the tiers.

    - left: maps the best tier of a plan to the plan's loss budget, in nats per token. This is the
      allowed quality loss minus the loss if all experts are in this tier. `left` is None if no loss
      is allowed.

    A plan that needs a loss budget is omitted if `left` is None, or if its budget is not positive.
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

    names: precisions (tiers) that may be the high tier. every: all tiers of the file, best first.

    A policy with a lossless form yields this form for each high tier. It also yields each high tier
    with the low tier that the user requested. Without such a request, it yields the next lower tier
    and skipping as low tiers. A policy without a lossless form chooses its tiers itself, and yields
    one plan.
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
    """Remembers which plan (policy with settings) was chosen for a request, in the user cache.

    A request has the user's settings and the requirements of the user interface. The same command
    thus runs the same plan later. Plans are stored for each combination of request, model and
    processor. Read and write errors are ignored.
    """

    def __init__(self, request: PlanRequest, model: ExpertModel) -> None:
        self._key = digest(processor_name(), request.plan_settings())
        self._path = cached_path(model, "plans")

    def recall(self) -> Mapping[str, Any] | None:
        """Return the settings of the plan that an earlier command chose for the same request.

        The request is the one with which this object was made. The result maps names of settings to
        values. It lacks the policy's loss budget, which is computed again for each run. It is None
        if no such plan is stored.
        """
        found = recalled(self._path, _FORMAT, "taken").get(self._key)
        return found if isinstance(found, dict) else None

    def keep(self, settings: Mapping[str, Any]) -> None:
        """Store the settings of the chosen plan in the user cache, where `recall` finds them.

        settings: the values by name. The loss budget of the policy is not stored, because it is
        computed again for each run.
        """
        known = recalled(self._path, _FORMAT, "taken")
        known.pop(self._key, None)
        known[self._key] = {k: v for k, v in settings.items() if k != ALLOWED_LOSS}
        latest = dict([*known.items()][-_MOST:])
        keep(self._path, _FORMAT, "taken", latest)
