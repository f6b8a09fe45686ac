"""The resolved plan of a model on this machine.

It serves chat, serve, check, plan and the status line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gguf_tools.experts import ExpertModel
from orchestrator.allocation.estimate import KlEstimate
from orchestrator.cache.profile import HotnessKeeper, TunedKeeper, UsageKeeper
from orchestrator.config import Config
from orchestrator.cost.disk import Bandwidth, kept_bandwidth, slow_disk
from orchestrator.cost.losses import Foreseen, LossModel
from orchestrator.cost.plans import (
    LENGTHS,
    Candidate,
    Frontier,
    TakenPlans,
    faster_lossless,
    settings_of_plans,
)
from orchestrator.cost.speeds import Speeds, spare_bytes
from orchestrator.cost.time import PROMPT_TOKENS, TimeModel, known_uses, skewed
from orchestrator.errors import ConfigError, MoeEdgeError, PolicyError
from orchestrator.native.llama import Bindings
from orchestrator.plan.machine import (
    Probe,
    check_misses,
    find_gpu,
    more_than_there,
    one_of_several,
    planned_device,
    probe,
)
from orchestrator.plan.options import check_unused, notes_of, without_effect
from orchestrator.plan.planning import least, plan, planned, sizes_to_count
from orchestrator.plan.records import Counted, Plan, PlanRequest, Refusal
from orchestrator.policy import ALLOWED_LOSS, PLAIN, policy_settings
from orchestrator.policy.base import History

# The minimum predicted speed-up that is worth a note.
_WORTH_SAYING = 1.1


class ResolvedPlan(NamedTuple):
    """The memory plan with which a model runs on this machine, and its predicted quality loss.

    - request: the input of the plan. It has the configuration, including settings that the planner
      chose, and the needs of the user interface, such as the number of parallel conversations.
    - plan: the memory plan.
    - loses: the predicted quality loss of the model's answers under this plan.
    """

    request: PlanRequest
    plan: Plan
    loses: Foreseen

    @property
    def config(self) -> Config:
        """The configuration with the settings of this plan."""
        return self.request.config


class Planner:
    """Makes memory plans of a model for this machine, and predicts their speed and quality loss.

    A plan has the policy, the precisions and the sizes of the expert slots, KV cache and scratch.
    The planner uses the records of earlier runs.
    """

    def __init__(
        self, request: PlanRequest, model: ExpertModel, disk: Bandwidth | None = None
    ) -> None:
        """Prepare the planning of a model. Nothing is measured yet.

        - request: the configuration, and the memory and sequences that the user interface, such as
          the server, needs. The configuration's memory limit also applies to measurements of this
          machine.
        - disk: the bandwidth of the disk, for a model that is not on this machine. By default, the
          disk that holds the model is measured when its bandwidth is needed.

        Raises ConfigError if the device does not exist, and NativeError if the native library is
        missing.
        """
        config = request.config
        self.bindings = Bindings.load()
        self.gpu = find_gpu(self.bindings, config.device, config.vram)
        check_misses(self.gpu, config)
        self.usage = UsageKeeper(config, model)
        self.losses = LossModel(config, model)
        self.hotness = HotnessKeeper(config, model)
        self.tuned = TunedKeeper(config, model)
        self.history = KnownHistory(self.hotness, self.losses, self.tuned)
        self.request, self._model, self._disk = request, model, disk
        self._probe = Probe(self.bindings, request)
        device = planned_device(self.bindings, self.gpu, model, config.kv)
        self.machine = probe(device)
        # Why the allowed loss chose this plan.
        self.chosen: str | None = None
        # The speed-up that an allowed loss would give.
        self.brings: str | None = None

    @property
    def note(self) -> str | None:
        """Notes for the user, for example about ignored options and slow hardware, or None."""
        notes = (
            self.chosen,
            self.brings,
            without_effect(self.request.config),
            self.hotness.note,
            self.usage.note,
            self.losses.note,
            self.slow_disk,
            one_of_several(self.bindings, self.gpu),
            more_than_there(self.request.config.ram, self.machine),
            *notes_of(self.request.config, self._model),
        )
        return " ".join(filter(None, notes)) or None

    @cached_property
    def slow_disk(self) -> str | None:
        """A note if the model is on a slow disk, or None.

        The first access measures the disk. It must come before the model is loaded, because a
        loaded model leaves no memory for the measurement.
        """
        return slow_disk(self._model, self.request.config)

    def runs(self, config: Config) -> ResolvedPlan:
        """Return the memory plan and the predicted quality loss of a run with these settings.

        If `config` names no policy, the planner chooses the policy. It may choose a faster policy
        than the default policy.

        Raises ConfigError if an option has no effect with the policy, or if a quality loss is
        allowed but the model has no loss table. Raises BudgetError if the model does not fit in
        memory.
        """
        check_unused(config)
        return self.compared(config)

    def compared(self, config: Config) -> ResolvedPlan:
        """Return how the model runs with these settings, for a comparison of several policies.

        The result is the memory plan and its predicted quality loss, as from `runs`. Unlike `runs`,
        this method ignores settings that have no effect with the policy of `config`. A comparison
        can thus use the same settings for each policy.

        Raises BudgetError if the model does not fit in memory. Raises ConfigError if the user
        allows a quality loss, but the model has no loss table.
        """
        if config.policy is None and config.given(ALLOWED_LOSS) is not None:
            found = self._frontier(config)
            self.chosen = found.why
            config = config.compared(**{ALLOWED_LOSS: None, **found.taken.settings})
        with self._probe:
            runs = self._faster(self._laid_out(config))
        self.brings = self._loss_note(runs)
        return runs

    def _may_switch(self, config: Config, plan: Plan) -> bool:
        """Return whether another lossless policy may replace the default policy.

        This is the case in a conversation whose experts are not all in memory, if the options leave
        the policy open. With a seed, the result is False. The choice depends on measured speeds,
        and a seed should always give the same answers. With a GPU, the result is also False.
        """
        left_open = config.policy is None and not config.of_policies and config.seed is None
        converses = self.request.needs.conversations
        return left_open and converses and plan.absent_bytes > 0 and self.gpu is None

    def _faster(self, runs: ResolvedPlan) -> ResolvedPlan:
        """Return the plan of another lossless policy if it is known to be clearly faster.

        Otherwise, or if the default may not be replaced, return the given plan. Nothing is
        measured.
        """
        if not self._may_switch(runs.config, runs.plan) or runs.loses.kl != 0.0:
            return runs
        with suppress(MoeEdgeError, OSError), self.times(measures=False) as times:
            usual, others = self.candidate(times, runs), dict[int, ResolvedPlan]()
            found = [usual]
            for asked in settings_of_plans(runs.config, self._model, None):
                if asked.get("high_tier") == usual.tiers[0] and asked["low_tier"] is None:
                    other = self._possible(runs.config.compared(**asked))
                    if other is not None:
                        found.append(self.candidate(times, other, asked))
                        others[id(found[-1])] = other
            return others.get(id(faster_lossless(usual, found)), runs)
        return runs

    def _loss_note(self, runs: ResolvedPlan) -> str | None:
        """Return a note that the default allowed loss would make a lossless conversation faster.

        The result is None if the user named a policy or an allowed loss. It is also None if the
        speed-up is small, or cannot be predicted without measuring.
        """
        config, plan = runs.config, runs.plan
        asked = config.policy or config.given(ALLOWED_LOSS) is not None or config.exact
        if (
            asked
            or not (self.request.needs.conversations and plan.absent_bytes)
            or runs.loses.kl != 0.0
        ):
            return None
        best, declared = plan.tier_names[0], policy_settings()[ALLOWED_LOSS]
        usual = declared.default
        if self.gpu or self.losses.estimate([best]) is None:
            return None
        with suppress(MoeEdgeError, OSError), self._probe:
            left = {tier.name: usual * (tier.name == best) for tier in self._model.tiers}
            with self.times(measures=False) as times:
                taken = self.candidate(times, runs).token_ms
                found = [
                    taken / self.candidate(times, self._laid_out(config.compared(**each))).token_ms
                    for each in settings_of_plans(config, self._model, left)
                    if ALLOWED_LOSS in each
                ]
            if max(found, default=0.0) >= _WORTH_SAYING:
                return (
                    f"The answers are lossless. With {declared.flag} {usual:g}, decoding would "
                    f"be about {max(found):.1f}x as fast on this machine, but not lossless."
                )
        return None

    def _laid_out(self, config: Config) -> ResolvedPlan:
        found = self._plan(config)
        return ResolvedPlan(self._asked(config), found, self.loses(found))

    def _asked(self, config: Config) -> PlanRequest:
        """Return the front end's request with this configuration."""
        return replace(self.request, config=config)

    def _possible(self, config: Config) -> ResolvedPlan | None:
        """Return the plan for these settings.

        The result is None if the settings do not suit the memory or the model.
        """
        with suppress(PolicyError, ConfigError):
            found = self._try(config)
            if isinstance(found, Plan):
                return ResolvedPlan(self._asked(config), found, self.loses(found))
        return None

    def plan(self, config: Config, more_scratch: int = 0) -> Plan:
        """Return the memory plan for these settings.

        more_scratch: bytes to add to the estimate of llama.cpp's scratch memory, because llama.cpp
        took more than an earlier plan had estimated. Raises BudgetError if the model does not fit.
        Raises PolicyError or ConfigError if the settings do not suit the model.
        """
        with self._probe:
            return self._plan(config, more_scratch)

    def least(self, config: Config) -> int:
        """Return the smallest value of --ram that works with these settings, in bytes.

        With a GPU, the result is the smallest --vram instead. Raises BudgetError if no value works.
        """
        with self._probe:
            request, model = self._asked(config), self._model
            found = least(self._counted(request), model, self.machine, self.history)
            return planned(found).cap_bytes

    def _plan(self, config: Config, more_scratch: int = 0) -> Plan:
        return planned(self._try(config, more_scratch))

    def _try(self, config: Config, more_scratch: int = 0) -> Plan | Refusal:
        request = replace(self._asked(config), more_scratch=more_scratch)
        asked = self._model, self.machine, self.history
        found = plan(self._counted(request, whether_all_fits=True), *asked)
        if self.gpu or (isinstance(found, Plan) and not found.managed):
            return found
        return plan(self._counted(request), *asked)

    def _counted(self, request: PlanRequest, whether_all_fits: bool = False) -> PlanRequest:
        """Return the request with memory sizes that llama.cpp counted.

        whether_all_fits: count only the sizes that decide whether the whole model fits in memory.
        With a GPU, nothing is counted, because memory is estimated first, and measured when the
        model is loaded.
        """
        if self.gpu:
            return request
        few, every = sizes_to_count(request, self._model)
        counted = Counted.of(few if whether_all_fits else every, self._probe.count)
        return replace(request, counted=counted)

    def loses(self, plan: Plan) -> Foreseen:
        """Predict how much quality the model's answers lose under a memory plan.

        The loss is the mean KL divergence from the file's best precision, in nats per token. The
        field `kl` of the result is None if the loss is unknown.

        For a policy that keeps every expert in memory, the prediction uses the precisions at the
        start of a run. For other policies, it uses the expected fraction of each precision, and
        adds the policy's loss budget.
        """
        return self.losses.foreseen(plan, self._uses)

    @cached_property
    def _uses(self) -> np.ndarray:
        """How often a token uses each expert, [n_layers, n_expert], as known from earlier runs."""
        return known_uses(self.request.config, self._model)[0]

    def frontier(self, config: Config) -> Frontier:
        """Return all plans for a configuration that fit in memory, with predicted speed and loss.

        A plan is a policy with its settings. Plans on the Pareto frontier (no other plan is both
        faster and less lossy) are marked as `best`. If the configuration names a policy, the result
        has only one plan.

        Operations that were never timed on this machine are timed now. Raises BudgetError if no
        plan fits, and OSError if the disk cannot be measured. Raises ConfigError for other reasons,
        for example if every plan exceeds the allowed quality loss.
        """
        if config.policy is not None:
            runs = self.runs(config)
            with self.times() as times:
                only = self.candidate(times, runs)
                why = f"{only.label}: chosen by --policy."
                return Frontier((only,), only, why, disturbed=times.speeds.disturbed)
        check_unused(config.with_changes(losses=None))
        return self._frontier(config)

    def _frontier(self, config: Config) -> Frontier:
        allowed, why_not = config.given(ALLOWED_LOSS), self.losses.of_file[1]
        names = [tier.name for tier in self._model.tiers]
        if allowed:
            self.losses.needed(names[:1])
        taken = TakenPlans(self._asked(config), self._model)
        with self._probe, self.times() as times:
            left = None if allowed is None else dict(zip(names, self._left(allowed), strict=True))
            plain = config if allowed is None else config.with_changes(**{ALLOWED_LOSS: None})
            found = []
            for asked in settings_of_plans(plain, self._model, left):
                possible = self._possible(plain.compared(**asked))
                # llama.cpp's own path may not fit
                if possible and possible.plan.total_bytes <= possible.plan.ram_bytes:
                    found.append(self.candidate(times, possible, asked))
            runs = self._laid_out(plain)
            usual, may_switch = self.candidate(times, runs), self._may_switch(plain, runs.plan)
            shown = Frontier.of(found, usual, names[0], allowed, taken.recall(), may_switch)
            disturbed = times.speeds.disturbed
        if allowed is not None:
            taken.keep(shown.taken.settings)
        return replace(shown, why_not=why_not, disturbed=disturbed)

    def _left(self, allowed: float) -> list[float]:
        """Return how much of the allowed loss is left if all experts are in a tier, in nats.

        The result has one value for each tier of the file. A policy whose best tier is this tier
        may cause this additional loss. If the loss table lacks a tier, the result is the whole
        allowed loss for the best tier and 0 for the others.
        """
        estimate = self.losses.of_file[0]
        size, n = self._uses.shape, len(self._model.tiers)
        if estimate is None:
            return [allowed, *[0.0] * (n - 1)]
        return [allowed - estimate.of_uses(self._uses, np.full(size, tier)) for tier in range(n)]

    def candidate(
        self, times: TimeModel, runs: ResolvedPlan, asked: Mapping[str, Any] | None = None
    ) -> Candidate:
        """Return the predicted speed and quality loss of a plan, as a Candidate.

        - times: predicts how long tokens and prompts take under a plan.
        - runs: the plan.
        - asked: the settings that select this plan. The field `settings` of the result has these
          settings; it is empty for None.

        Raises NativeError if the prediction needs an operation that was never timed on this
        machine, and the operation cannot or may not be timed now.
        """
        plan, skips = runs.plan, self.losses.skip_budget(runs.plan)
        short = times.of_plan(plan, runs.config, skips)
        token_ms = {}
        for n in (n for n in LENGTHS if n <= plan.n_ctx):
            # Without shared memory, slots do not depend on the context in use.
            time = times.of_plan(plan, runs.config, skips, n) if plan.shared else short
            token_ms[str(n)] = 1e3 * time.token_s(n)
        other = None
        if not times.profiled and plan.absent_bytes:
            few = times.of_plan(plan, runs.config, skips, uses=skewed(self._model))
            other = 1e3 * few.token_s(PROMPT_TOKENS)
        return Candidate(
            policy=plan.placement.name if plan.placement else PLAIN,
            settings=asked or {},
            tiers=plan.versions,
            expert_bytes=plan.slots.total_bytes if plan.slots else plan.expert_bytes,
            resident=plan.absent_bytes == 0,
            token_ms=1e3 * short.token_s(PROMPT_TOKENS),
            first_prompt_ms=1e3 * short.prompt_s(PROMPT_TOKENS, first=True),
            prompt_ms=1e3 * short.prompt_s(PROMPT_TOKENS),
            hit_rate=short.residency.hit_rate,
            read_bytes=short.read_bytes,
            kl=runs.loses.kl,
            kl_at_most=runs.loses.at_most,
            token_ms_behind=token_ms,
            token_ms_skewed=other,
        )

    @contextmanager
    def times(self, measures: bool = True) -> Iterator[TimeModel]:
        """A context manager for a TimeModel, which predicts how fast plans run on this machine.

        New timings are stored when the `with` block ends. measures: whether operations that were
        never timed may be timed now. If it is False, a prediction that needs an unknown time raises
        NativeError.

        Raises ConfigError if the configuration uses a GPU, because only CPU times are predicted.
        Raises OSError if the speed of the disk is unknown and cannot or may not be measured.
        """
        if self.gpu:
            raise ConfigError(
                "no policy can be chosen by predicted speed, because speeds are predicted only "
                "for the CPU. Add --policy NAME or --device cpu"
            )
        config, model = self.request.config, self._model
        disk = self._disk or kept_bandwidth(model, config, measures)
        threads, pool = config.n_threads, spare_bytes(self.request, model)
        with Speeds(self.bindings, threads, pool, measures) as speeds:
            yield TimeModel(model, disk, speeds, *known_uses(config, model))


class KnownHistory(History):
    """Gives policies the knowledge from earlier runs of a model, and from its loss table.

    Earlier runs recorded how often each expert was used, and the settings that policies tuned. The
    loss table, which `moe-edge calibrate` makes, has the error of each expert in each precision.
    """

    def __init__(self, hotness: HotnessKeeper, losses: LossModel, tuned: TunedKeeper) -> None:
        self._hotness, self._losses, self._tuned = hotness, losses, tuned

    def hotness(self) -> np.ndarray | None:
        """Return how often tokens of earlier runs used each expert, or None if it is unknown.

        Raises ProfileError or OSError if a profile that the user named cannot be used.
        """
        return self._hotness.recall()

    def losses(self, tiers: Sequence[str], per_use: bool = False) -> np.ndarray | None:
        """Return the loss of each expert in each of these tiers (precisions).

        The result is float64 [n_layers, n_expert, n_tiers]. It is None if the model has no loss
        table, or if the table lacks one of the tiers.

        - Without per_use, the loss is the mean squared error of the expert's output.
        - With per_use, the loss is the quality loss in nats when one token uses the expert. If the
          loss table cannot convert squared errors into nats, it gives the errors here, too. Callers
          with per_use should therefore only compare the values of one result.

        Raises ConfigError if a loss table that the user named cannot be used.
        """
        return self._losses.recall(tiers, per_use)

    def estimate(self, tiers: Sequence[str]) -> KlEstimate:
        """Return an estimator of the quality loss of computing experts in these tiers (precisions).

        tiers: names, best first. Raises ConfigError if the losses are unknown. The error names the
        command that measures them.
        """
        return self._losses.needed(tiers)

    def tuned(self, policy: str) -> Mapping[str, Any] | None:
        return self._tuned.recall(policy)
