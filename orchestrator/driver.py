"""The loop between a policy and its store, live and in replay.

router -> on_route: the policy decides -> the store acts -> experts compute
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from orchestrator.events import Phase, RouteEvent, StepReport
from orchestrator.native import Store
from orchestrator.policy import Policy
from orchestrator.policy.base import Callback, Transition


class Driver:
    """One policy and the store that it decides for. Another policy with the same slots may take
    its place between two steps."""

    def __init__(self, policy: Policy, store: Store) -> None:
        self.policy = policy
        self.store = store

    def on_route(self, event: RouteEvent) -> None:
        """Once per MoE layer: the policy decides, the store acts."""
        self.policy.decide(event, self.store.view, self.store.decision)
        self.store.apply(self.store.decision)

    def set_route(self, route: Callable[[RouteEvent], None] | None = None) -> None:
        """Lets the policy decide in the way it wants: when it is asked, or by its default tier.
        route: what is called instead, in every step."""
        if route is None and self.policy.callback is not Callback.NEVER:
            route = self.on_route
        self.store.set_route(route, self.policy.default_tier)

    def load_first(
        self,
        first: Sequence[Transition],
        transition_rate: int,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """Reads what the policy wants in memory before the first token; progress gets the share
        that is done. transition_rate: in bytes per second, of what it exchanges later."""
        self.store.set_transition_rate(transition_rate)
        if first:
            self.store.warm(first, progress)
            self.store.reset_stats()

    def step_done(
        self, phase: Phase, n_tokens: int, us: float, states: np.ndarray | None = None
    ) -> Sequence[Transition]:
        """After a step that succeeded: the policy learns. Returns the transitions that it wants.
        states: in the place of the store's own."""
        policy, counts = self.policy, None
        if policy.counts:
            counts = self.store.take_counts()
            states = self.store.states() if states is None else states
        return policy.step_done(StepReport(phase, n_tokens, us, counts, states))
