"""The history of a model: given to the policy at the start of a run, and saved at its end."""

from __future__ import annotations

from orchestrator.cost.planner import Planner
from orchestrator.policy import Policy
from orchestrator.policy.base import Placement
from orchestrator.runtime.driver import NoopDriver


class History:
    """The hotness and usage of a model's experts and the settings that policies tuned.

    They are from earlier runs and from this one.
    """

    def __init__(self, planner: Planner) -> None:
        self.usage = planner.usage
        self._planner = planner

    def policy(self, placement: Placement) -> Policy:
        """Return the policy of a placement, with the history of the model."""
        return placement.make(self._planner.history)

    def learn(self, driver: NoopDriver) -> None:
        """Add the counts of the driver's store and the state that its policy has learned."""
        name, learned, used = driver.policy_name, driver.learned(), driver.used()
        if learned.hotness is not None:
            self._planner.hotness.learn(learned.hotness)
        if used is not None:
            self.usage.learn(used)
        if learned.tuned is not None:
            self._planner.tuned.learn(name, learned.tuned)

    def save(self) -> None:
        """Write the history that the config says to keep.

        Raises OSError if a named profile cannot be written.
        """
        self._planner.tuned.save()
        self.usage.save()
        self._planner.hotness.save()
