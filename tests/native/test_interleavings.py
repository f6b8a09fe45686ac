"""Every interleaving of promote, demote, publish, evict, a running step and an aborted one, beside
what a reader of the paper would expect."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from orchestrator.events import Phase
from orchestrator.native import Library

from .conftest import DEVICES
from .transition_driver import HELD, HIGH, LOW, N_EXPERT, N_LAYERS, Driver, ExpertFile

experts = st.tuples(st.integers(0, N_LAYERS - 1), st.integers(0, N_EXPERT - 1))


class Machine(RuleBasedStateMachine):
    """A store at the beginning of a step. under_way: experts in transition, (from, to)."""

    file: ExpertFile
    library: Library
    device: str | None
    slots: tuple[int, ...]
    pools: tuple[int, ...] | None = None  # of each tier

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(self.file, self.library, self.slots, self.device, self.pools)
        self.under_way: dict[tuple[int, int], tuple[int, int]] = {}

    @rule()
    def hold(self) -> None:
        self.driver.store.set_transition_rate(HELD)

    @rule()
    def arrive(self) -> None:
        self.driver.arrive()

    def begin_step(self, phase: Phase) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """The experts that changed at the boundary: all that were complete, and of what else is
        under way perhaps some that came meanwhile."""
        store, landed = self.driver.store, self.driver.store.landed()
        complete = {each for each in self.under_way if landed[each]}
        store.begin_step(phase)
        resident = store.resident()
        changed = []
        for expert, (before, after) in list(self.under_way.items()):
            if resident[expert] == after:
                changed.append((expert, self.under_way.pop(expert)))
            else:
                assert expert not in complete and resident[expert] == before
        return changed

    @invariant()
    def nothing_is_lost(self) -> None:
        store = self.driver.store
        store.check()
        resident, target = store.states()
        for expert, (before, after) in self.under_way.items():
            assert (resident[expert], target[expert]) == (before, after)
        stats = store.stats()
        assert stats.slot_bytes_in_use <= stats.slot_bytes_peak <= stats.budget_bytes
        assert stats.transitions_failed == 0

    def teardown(self) -> None:
        self.driver.store.close()


class Interleavings(Machine):
    """A slot for every expert and two in reserve. visible: the version of each expert; free:
    slots of each tier; running: the experts of the layers that a step has routed."""

    slots = (3, 9)

    def __init__(self) -> None:
        super().__init__()
        high = {(0, 0), (0, 1), (1, 0)}
        self.driver.warm(high)
        everyone = [(layer, e) for layer in range(N_LAYERS) for e in range(N_EXPERT)]
        self.visible = {each: HIGH if each in high else LOW for each in everyone}
        self.free = [self.slots[HIGH] - 3, self.slots[LOW] - 7, *self.slots[2:]]  # of each pool
        self.running: dict[int, list[int]] = {}
        self.driver.store.begin_step(Phase.DECODE)

    @rule(expert=experts, tier=st.integers(0, 4))
    def ask(self, expert: tuple[int, int], tier: int) -> None:
        if tier not in self.file.tiers:
            return
        before, pool = self.visible[expert], self.pool_of(tier)
        possible = expert not in self.under_way and before != tier and self.free[pool] > 0
        assert self.driver.store.transition([(*expert, tier)]) == possible
        if possible:
            self.under_way[expert] = before, tier
            self.free[pool] -= 1

    def pool_of(self, tier: int) -> int:
        return tier if self.pools is None else self.pools[tier]

    @rule(expert=experts)
    def swap_into(self, expert: tuple[int, int]) -> None:
        """Demotes somebody high, so that `ask` finds a free high slot now and then."""
        for other, tier in self.visible.items():
            if tier == HIGH and other != expert and other not in self.under_way:
                self.ask(other, LOW)
                return

    @rule()
    def arrive(self) -> None:
        super().arrive()
        landed = self.driver.store.landed()
        for expert in self.under_way:
            assert landed[expert]

    @rule(phase=st.sampled_from(list(Phase)))
    def next_step(self, phase: Phase) -> None:
        """A step boundary, after a whole step or an aborted one."""
        for expert, (before, after) in self.begin_step(phase):
            self.free[self.pool_of(before)] += 1
            self.visible[expert] = after
        self.running.clear()

    @precondition(lambda self: len(self.running) < N_LAYERS)
    @rule(layer=st.integers(0, N_LAYERS - 1), chosen=st.sets(st.integers(0, 4), min_size=1))
    def route(self, layer: int, chosen: set[int]) -> None:
        if layer not in self.running:
            self.driver.apply(layer, sorted(chosen))
            self.running[layer] = sorted(chosen)

    @precondition(lambda self: bool(self.running))
    @rule()
    def compute(self) -> None:
        layer, chosen = self.running.popitem()
        seen = self.driver.use(layer, chosen)
        assert seen == {expert: {self.visible[layer, expert]} for expert in chosen}

    @invariant()
    def table_is_what_is_expected(self) -> None:
        store = self.driver.store
        resident, target = store.states()
        assert np.array_equal(resident, store.resident())
        assert {expert: resident[expert] for expert in self.visible} == self.visible
        for expert in self.visible.keys() - self.under_way.keys():
            assert target[expert] == self.visible[expert]
        stats = store.stats()
        assert list(stats.demand_bytes) == list(stats.wait_us) == [0, 0]
        assert list(stats.hits) == list(stats.requests)
        assert stats.evictions == stats.waves == 0


class FiveTiers(Interleavings):
    """Where there are five tiers to go to, and few slots in each."""

    slots = (3, 8, 2, 1, 2)


class SharedSlots(Interleavings):
    """Where all tiers but the best one share slots."""

    slots = (3, 9)
    pools = (0, 1, 1, 1)


class Evictions(Machine):
    """Fewer slots than experts: what a token asks for evicts what was used longest ago, beside
    transitions, aborted steps and reads that are held back."""

    slots: tuple[int, ...] = (2, 5)

    def __init__(self) -> None:
        super().__init__()
        self.driver.store.warm([(0, 0, HIGH), (0, 1, LOW), (0, 2, LOW), (1, 0, LOW)])
        self.driver.store.reset_stats()
        self.driver.store.begin_step(Phase.DECODE)

    @rule(expert=experts)
    def ask(self, expert: tuple[int, int]) -> None:
        """Of what is there, two at most: a token must find slots that nobody holds."""
        before = int(self.driver.store.resident()[expert])
        possible = before in (HIGH, LOW) and expert not in self.under_way
        if not possible:
            assert self.driver.store.transition([(*expert, LOW)]) == 0
        elif len(self.under_way) < 2 and self.driver.store.transition([(*expert, 1 - before)]):
            self.under_way[expert] = before, 1 - before

    @rule(
        abort=st.booleans(), layer=st.integers(0, 1), chosen=st.sets(st.integers(0, 4), max_size=2)
    )
    def run_step(self, abort: bool, layer: int, chosen: set[int]) -> None:
        self.begin_step(Phase.DECODE)
        if not chosen:
            return
        self.driver.apply(layer, sorted(chosen))
        if abort:
            return
        seen = self.driver.use(layer, sorted(chosen))
        assert all(len(tiers) == 1 for tiers in seen.values())
        for expert, tiers in seen.items():
            if (layer, expert) in self.under_way:
                assert tiers == {self.under_way[layer, expert][0]}


class SharedEvictions(Evictions):
    """The same where both tiers share slots."""

    slots = (7,)
    pools = (0, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "rules", [Interleavings, FiveTiers, SharedSlots, Evictions, SharedEvictions]
)
def test_every_interleaving(
    rules: type[Machine], library: Library, device: str | None, tmp_path: Path
) -> None:
    if device is not None and rules.pools is not None:
        pytest.skip("on a device a slot holds one tier")
    file = ExpertFile(tmp_path / "experts.bin", n_tiers=len(rules.pools or rules.slots))
    given = {"file": file, "library": library, "device": device}
    run_state_machine_as_test(
        type("Here", (rules,), given),
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
