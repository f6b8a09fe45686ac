"""Versions of experts that change in a replay where they changed in the recorded run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from orchestrator.allocation.slots import Transition
from orchestrator.engine.driver import Driver
from orchestrator.errors import TraceError
from orchestrator.lab.replay.trace import Step, Trace
from orchestrator.native import Simulation, Store
from orchestrator.policy import Policy
from orchestrator.policy.base import Learns, WaitsBeforeAnswer


class RecordedVersions:
    """Keeps what a policy asks for until the step before which the run published it.

    So the policy sees its experts under way as long as it did. Only then the store gets the
    transition, and reads it in no time: fewer slots are taken meanwhile than were, so there is
    always one. bytes_per_s and latency_us are the speed of all other reads.
    """

    def __init__(
        self, store: Store, policy: Policy, clock: Simulation, bytes_per_s: int, latency_us: int
    ) -> None:
        self._store, self._policy, self._clock = store, policy, clock
        self._speed = bytes_per_s, latency_us
        self._under_way: set[Transition] = set()
        self._settled: set[Transition] = set()
        self._updates = 0
        self._steps = 0
        store.set_transition_rate(0)

    def check_start(self, trace: Trace) -> None:
        """Raises TraceError where the policy starts with other versions than it did."""
        if not np.array_equal(self._store.resident(), trace.arrays["start_tier"]):
            raise self._astray("starts with other experts in memory")

    def begin_step(self, step: Step) -> None:
        """Before the store's own begin_step. Raises TraceError for a version that was not on its
        way."""
        published = [each for each in step.published if each not in self._settled]
        if len(step.published) - len(published) < len(self._settled):
            raise self._astray("waits for other versions")
        self._settled.clear()
        if not published:
            return
        if not self._under_way.issuperset(published):
            raise self._astray("asks for other versions")
        self._under_way.difference_update(published)
        with self._at_once():
            admitted = self._store.transition(published)
            self._clock.advance(0)
        if admitted < len(published):
            raise self._astray("has other slots")

    @contextmanager
    def _at_once(self) -> Iterator[None]:
        """Reads take no time."""
        self._clock.set_speed(0, 0)
        try:
            yield
        finally:
            self._clock.set_speed(*self._speed)

    def _before_answer(self, driver: Driver) -> None:
        """What the run waited for behind a prompt is in place."""
        if not isinstance(self._policy, WaitsBeforeAnswer):
            return
        moves = self._policy.before_answer(*self.states())
        if moves is None:
            return
        before = self._store.resident()
        with self._at_once():
            self._store.transition([*self._under_way, *moves])
            self._under_way.clear()
            driver.before_answer()
        after = self._store.resident()
        self._settled = {
            (layer, expert, int(after[layer, expert]))
            for layer, expert in np.argwhere(before != after).tolist()
        }

    def states(self) -> tuple[np.ndarray, np.ndarray]:
        """Store.states(), with what is under way."""
        resident, target = self._store.states()
        for layer, expert, tier in self._under_way:
            target[layer, expert] = tier
        return resident, target

    def step_done(self, step: Step, moves: Sequence[Transition], driver: Driver | None) -> None:
        """After all of a step, of which the policy's step_done returned moves. driver: given where
        an answer begins behind it. Raises TraceError where the policy renewed its hot sets after
        another step than it did."""
        self._under_way.update(moves)
        if driver is not None:
            self._before_answer(driver)
        updates = self._policy.updates if isinstance(self._policy, Learns) else 0
        if step.ticks != (updates > self._updates):
            raise self._astray("renews its hot sets after other steps")
        self._updates = updates
        self._steps += 1

    def _astray(self, what: str) -> TraceError:
        return TraceError(
            f"the policy {what} than the recorded run (step {self._steps}): it was recorded with "
            f"another version of moe-edge, record it again or give --clock simulated"
        )
