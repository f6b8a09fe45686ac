"""Loads the history of a model for its policy at the start of a run, and saves it at the end."""

from __future__ import annotations

from orchestrator.cost.planner import Planner
from orchestrator.policy import Policy
from orchestrator.policy.base import Placement
from orchestrator.runtime.driver import BaseDriver


class History:
    """The history of a model: how often tokens used each expert, and settings that policies tuned.

    It covers earlier runs and this run. usage: how often tokens used each expert.
    """

    def __init__(self, planner: Planner) -> None:
        self.usage = planner.usage
        self._planner = planner

    def policy(self, placement: Placement) -> Policy:
        """Make a policy that knows how often earlier runs of the model used each expert.

        Some policies do not use this knowledge. placement: the settings of the policy, and its
        slots for experts.
        """
        return placement.make(self._planner.history)

    def learn(self, driver: BaseDriver) -> None:
        """Add a run to the history, so that later runs of the model can use it.

        The history gets the number of tokens that used each expert, the policy's own counts of
        expert usage, and the settings that the policy has tuned. driver: the driver of the run.
        """
        name, learned, used = driver.policy_name, driver.learned(), driver.used()
        if learned.hotness is not None:
            self._planner.hotness.learn(learned.hotness)
        if used is not None:
            self.usage.learn(used)
        if learned.tuned is not None:
            self._planner.tuned.learn(name, learned.tuned)

    def save(self) -> None:
        """Write the history to files, for later runs.

        The files hold the expert usage, and the settings that policies have tuned. Without the
        setting `remember`, only the file that the setting `profile` names is written.
        Raises OSError if this file cannot be written.
        """
        self._planner.tuned.save()
        self.usage.save()
        self._planner.hotness.save()
