"""What runs learn of a model: recalled before the first token, kept at the end."""

from __future__ import annotations

from collections.abc import Sequence

from gguf_tools.experts import ExpertModel
from orchestrator.allocation.slots import Transition
from orchestrator.cache.profile import TunedKeeper, UsageKeeper
from orchestrator.config import Config
from orchestrator.cost.planner import Planner
from orchestrator.engine.driver import PlainDriver
from orchestrator.memory.plan import MemoryPlan
from orchestrator.policy.base import Tunes


class Learned:
    """Which experts are hot, how often each was used and what it put out (usage), and what policies
    tuned: from earlier runs and from this one."""

    def __init__(self, config: Config, model: ExpertModel, planner: Planner) -> None:
        self.usage = UsageKeeper(config, model)
        self._tuned = TunedKeeper(config, model)
        self._planner = planner

    def first(self, plan: MemoryPlan) -> Sequence[Transition]:
        """Teaches a plan's policy, and returns what it wants in memory before the first token."""
        policy = plan.policy
        if policy is None:
            return ()
        self._planner.teach(policy, plan.tier_names)
        if isinstance(policy, Tunes):
            tuned = self._tuned.recall(policy.name)
            if tuned is not None:
                policy.recall(tuned)
        return policy.start()

    def learn(self, driver: PlainDriver) -> None:
        """Takes in what the policy that runs knows of the model."""
        hotness, used, tuned = driver.hotness(), driver.used(), driver.tuned()
        if hotness is not None:
            self._planner.hotness.learn(hotness)
        if used is not None:
            self.usage.learn(used, driver.outputs())
        if tuned is not None:
            self._tuned.learn(*tuned)

    def save(self) -> None:
        """Keeps it where that is asked for. Raises OSError where a named profile cannot be
        written."""
        self._tuned.save()
        self.usage.save()
        self._planner.hotness.save()
