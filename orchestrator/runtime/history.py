"""What runs know of a model: given to the policy at the start, kept at the end."""

from __future__ import annotations

from orchestrator.cost.planner import Planner
from orchestrator.policy import Policy
from orchestrator.policy.base import Placement
from orchestrator.runtime.driver import PlainDriver


class History:
    """The hotness and usage of a model's experts and the settings that policies tuned, of earlier
    runs and of this one."""

    def __init__(self, planner: Planner) -> None:
        self.usage = planner.usage
        self._planner = planner

    def policy(self, placement: Placement) -> Policy:
        """The policy of a placement, which starts from what is known of the model."""
        return placement.make(self._planner.history)

    def learn(self, driver: PlainDriver) -> None:
        """Add what the driver's store counted and what its policy knows by now."""
        name, learned, used = driver.policy_name, driver.learned(), driver.used()
        if learned.hotness is not None:
            self._planner.hotness.learn(learned.hotness)
        if used is not None:
            self.usage.learn(used)
        if learned.tuned is not None:
            self._planner.tuned.learn(name, learned.tuned)

    def save(self) -> None:
        """Write everything that the config says to keep. Raises OSError if a named profile cannot
        be written."""
        self._planner.tuned.save()
        self.usage.save()
        self._planner.hotness.save()
