"""What would run: the one place that says it, for chat, serve, check, doctor, plan and the line
about a loaded model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gguf_tools.experts import ExpertModel
from orchestrator.cache.profile import HotnessKeeper
from orchestrator.config import Config
from orchestrator.cost.foreseen import Foreseen, Loses, foreseen
from orchestrator.cost.frontier import Frontier, Knowledge, frontier
from orchestrator.cost.kept_disk import kept_reading
from orchestrator.cost.losses import LossKeeper
from orchestrator.cost.predict import Prediction
from orchestrator.cost.predictor import Predictor, known_uses, uses_or_alike
from orchestrator.cost.spending import spending
from orchestrator.cost.taken import TakenPlans
from orchestrator.errors import ConfigError
from orchestrator.memory import hardware
from orchestrator.memory.accelerator import check_misses, find_gpu, one_of_several, planned_device
from orchestrator.memory.choice import check_unused, without_effect
from orchestrator.memory.plan import MemoryPlan, plan_memory
from orchestrator.memory.probe import Probe
from orchestrator.native.llama import Bindings
from orchestrator.policy import ALLOWED_LOSS, Policy
from orchestrator.policy.base import Learns, SpendsLoss, WeighsLosses


class Runs(NamedTuple):
    """config: with the plan that a loss which is allowed chooses; plan: how it lies in memory;
    loses: what it is foreseen to lose."""

    config: Config
    plan: MemoryPlan
    loses: Foreseen


class Planner:
    """What a model can be on this machine, with what earlier runs learned of both."""

    def __init__(self, config: Config, model: ExpertModel) -> None:
        """config: as opened; measuring this machine keeps to its cap. Raises ConfigError for a
        device that is not here, NativeError without the library."""
        self.bindings = Bindings.load()
        self.gpu = find_gpu(self.bindings, config.device, config.vram)
        check_misses(self.gpu, config)
        self.losses = LossKeeper(config, model)
        self.hotness = HotnessKeeper(config, model)
        self._config, self._model = config, model
        device = planned_device(self.bindings, self.gpu, model, config.kv)
        self.machine = hardware.probe(device)
        # Why the plan that a loss chose was chosen.
        self.chosen: str | None = None

    @property
    def note(self) -> str | None:
        """What was left aside, or will be slow."""
        notes = (
            self.chosen,
            without_effect(self._config),
            self.hotness.note,
            self.losses.note,
            one_of_several(self.bindings, self.gpu),
            hardware.too_many_threads(self._config.threads),
            hardware.more_than_there(self._config.ram, self.machine),
        )
        return " ".join(filter(None, notes)) or None

    def runs(self, config: Config) -> Runs:
        """What runs with these settings. Raises what plan_memory and frontier do, and ConfigError
        for an option that is of no use with the policy."""
        check_unused(config)
        return self.compared(config)

    def compared(self, config: Config) -> Runs:
        """As runs, with another policy than what was asked for: options that it has no use for are
        left aside."""
        config = self._settled(config)
        plan = self.plan(config)
        return Runs(config, plan, self.loses(plan))

    def plan(self, config: Config, more_scratch: int = 0) -> MemoryPlan:
        """How the model is laid out with these settings; see plan_memory."""
        if self.gpu:
            return plan_memory(config, self._model, self.machine, more_scratch, teach=self.teach)
        with Probe(self.bindings, config) as probe:
            return plan_memory(
                config, self._model, self.machine, more_scratch, probe.scratch, self.teach
            )

    def loses(self, plan: MemoryPlan) -> Foreseen:
        """What a plan is foreseen to lose, with its policy's settings as they are now. Where every
        expert is in memory, as the policy would start: ask before it runs, since it learns."""
        uses, estimate = self._losing
        return foreseen(plan, uses, estimate, self._model.tiers[0].name)

    @cached_property
    def _losing(self) -> tuple[np.ndarray, Loses | None]:
        """How often tokens use each expert, as Knowledge has it, and what the file's tiers cost."""
        model = self._model
        uses = uses_or_alike(known_uses(self._config, model), model)
        return uses, self._estimate([tier.name for tier in model.tiers])[0]

    def frontier(self, config: Config) -> tuple[Frontier, str]:
        """The plans under a config that names no policy, and why nobody knows what they lose, empty
        where that is known. A table of losses that is named says what they lose. Raises what
        `known` and orchestrator.cost.frontier do, and ConfigError for an option without use."""
        check_unused(config.with_changes(losses=None))
        return self._frontier(config)

    def _frontier(self, config: Config) -> tuple[Frontier, str]:
        with self.known(config) as known:
            taken = TakenPlans(config, self._model)
            found = frontier(config, self._model, replace(known, before=taken.recall()))
            if config.given(ALLOWED_LOSS) is not None:
                taken.keep(found.taken.asked)
        return found, known.why_not

    @contextmanager
    def known(self, config: Config) -> Iterator[Knowledge]:
        """What the frontier of plans goes by. Raises ConfigError beside a GPU, OSError for a disk
        that cannot be measured."""
        if self.gpu:
            raise ConfigError(
                "plans are predicted for the CPU alone: give --device cpu, or name a --policy"
            )
        reading = kept_reading(self._model, config)
        names = [tier.name for tier in self._model.tiers]
        with (
            Probe(self.bindings, config) as probe,
            Predictor(self.bindings, self._config, self._model, reading) as predictor,
        ):

            def plan(asked: Config) -> MemoryPlan:
                return plan_memory(asked, self._model, self.machine, 0, probe.scratch, self.teach)

            def time(plan: MemoryPlan, asked: Config) -> Prediction:
                return self._spending(predictor.of_plan(plan, asked), plan)

            estimate, why = self._estimate(names)
            yield Knowledge(plan, time, predictor.uses, estimate, why, lambda: predictor.disturbed)

    def teach(self, policy: Policy, tier_names: Sequence[str]) -> None:
        """What earlier runs learned of the model in these tiers, as far as the policy wants it."""
        if isinstance(policy, WeighsLosses) and policy.losses_matter:
            losses = self.losses.recall(tier_names, policy.per_use)
            if losses is not None:
                policy.set_losses(losses)
        if isinstance(policy, SpendsLoss):
            policy.set_estimate(self.losses.needed(tier_names))
        if isinstance(policy, Learns):
            learned = self.hotness.recall()
            if learned is not None:
                policy.set_hotness(learned)

    def _settled(self, config: Config) -> Config:
        """With the plan that a loss which is allowed chooses, where no policy is named."""
        if config.policy is not None or config.given(ALLOWED_LOSS) is None:
            return config
        found, _ = self._frontier(config)
        self.chosen = found.why
        return found.settled(config)

    def _spending(self, found: Prediction, plan: MemoryPlan) -> Prediction:
        """With what a policy that foresees its loss skips."""
        policy = plan.policy
        if policy is None or not isinstance(policy, SpendsLoss):
            return found
        estimate = self.losses.needed(plan.tier_names)
        nats = estimate.nats[..., -1] * estimate.gates
        allowed, sizes = getattr(policy.settings, ALLOWED_LOSS), found.costs.expert_bytes[:, 0]
        return replace(found, residency=spending(found.residency, nats, sizes, allowed))

    def _estimate(self, names: Sequence[str]) -> tuple[Loses | None, str]:
        """What the file's tiers cost, and what to say where nobody knows."""
        try:
            return self.losses.needed(names), ""
        except ConfigError as error:
            return None, str(error)
