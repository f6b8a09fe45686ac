"""What runs know of a model: recalled before the first token, kept at the end."""

from __future__ import annotations

from collections.abc import Sequence

from gguf_tools.experts import ExpertModel
from orchestrator.allocation.slots import Transition
from orchestrator.cache.profile import TunedKeeper
from orchestrator.config import Config
from orchestrator.cost.planner import Planner
from orchestrator.memory.plan import MemoryPlan
from orchestrator.policy.base import Tunes
from orchestrator.runtime.driver import PlainDriver


class History:
    """The hotness and usage of a model's experts and the settings that policies tuned, of earlier
    runs and of this one."""

    def __init__(self, config: Config, model: ExpertModel, planner: Planner) -> None:
        self.usage = planner.usage
        self._tuned = TunedKeeper(config, model)
        self._planner = planner

    def first(self, plan: MemoryPlan) -> Sequence[Transition]:
        """Tell a plan's policy what is known of the model, and return what the policy wants in
        memory before the first token."""
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
        """Add what the driver's store counted and what its policy knows by now."""
        hotness, used, tuned = driver.hotness(), driver.used(), driver.tuned()
        if hotness is not None:
            self._planner.hotness.learn(hotness)
        if used is not None:
            self.usage.learn(used)
        if tuned is not None:
            self._tuned.learn(*tuned)

    def save(self) -> None:
        """Write everything that the config says to keep. Raises OSError if a named profile cannot
        be written."""
        self._tuned.save()
        self.usage.save()
        self._planner.hotness.save()
