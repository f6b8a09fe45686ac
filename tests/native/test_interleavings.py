"""State machines over promote, demote, publish, evict, running steps and aborted steps.

The store is compared with the rules of the DynaExq paper.
"""

from itertools import accumulate

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

from orchestrator.events import ABSENT, Phase
from orchestrator.native import Library

from .conftest import DEVICES
from .transition_driver import (
    HELD,
    HIGH,
    KINDS,
    LOW,
    N_EXPERT,
    N_LAYERS,
    US,
    Driver,
    ExpertFile,
)

experts = st.tuples(st.integers(0, N_LAYERS - 1), st.integers(0, N_EXPERT - 1))


class Machine(RuleBasedStateMachine):
    """A store at the beginning of a step. in_transition: experts in transition, as (from, to)."""

    file: ExpertFile
    library: Library
    device: str | None
    slots: tuple[int, ...]
    pools: tuple[int, ...] | None  # the pool of each tier
    simulated: bool

    def __init__(self):
        super().__init__()
        self.driver = Driver(
            self.file, self.library, self.slots, self.device, self.pools, self.simulated
        )
        self.in_transition = {}

    @rule()
    def hold(self):
        self.driver.store.set_transition_rate(HELD)

    @rule()
    def arrive(self):
        self.driver.arrive()

    def begin_step(self, phase):
        """Begin a step and return the experts that changed.

        All complete transitions are published. Those that complete meanwhile may be published too.
        """
        store, landed = self.driver.store, self.driver.store.landed()
        complete = {each for each in self.in_transition if landed[each]}
        store.begin_step(phase)
        resident = store.resident()
        changed = []
        for expert, (before, after) in list(self.in_transition.items()):
            if resident[expert] == after:
                changed.append((expert, self.in_transition.pop(expert)))
            else:
                assert expert not in complete and resident[expert] == before
        return changed

    @invariant()
    def counts_agree(self):
        store = self.driver.store
        store.check()
        resident, target = store.states()
        for expert, (before, after) in self.in_transition.items():
            assert (resident[expert], target[expert]) == (before, after)
        stats = store.stats()
        assert stats.slot_bytes_in_use <= stats.slot_bytes_peak <= stats.budget_bytes
        assert stats.transitions_failed == 0

    def teardown(self):
        self.driver.store.close()


class Interleavings(Machine):
    """A slot for every expert, and two in reserve.

    visible: the tier of each expert. free: free slots of each pool. running: routed experts by
    layer.
    """

    def __init__(self):
        super().__init__()
        high = {(0, 0), (0, 1), (1, 0)}
        self.driver.warm(high)
        every_expert = [(layer, e) for layer in range(N_LAYERS) for e in range(N_EXPERT)]
        self.visible = {each: HIGH if each in high else LOW for each in every_expert}
        self.free = [self.slots[HIGH] - 3, self.slots[LOW] - 7, *self.slots[2:]]  # in each pool
        self.running = {}
        self.driver.store.begin_step(Phase.DECODE)

    @rule(expert=experts, tier=st.integers(0, 4))
    def ask(self, expert, tier):
        if tier not in self.file.tiers:
            return
        before, pool = self.visible[expert], self.pool_of(tier)
        possible = expert not in self.in_transition and before != tier and self.free[pool] > 0
        assert self.driver.store.transition([(*expert, tier)]) == possible
        if possible:
            self.in_transition[expert] = before, tier
            self.free[pool] -= 1

    def pool_of(self, tier):
        return tier if self.pools is None else self.pools[tier]

    @rule(expert=experts)
    def swap_into(self, expert):
        """Demote another high expert, so that `ask` sometimes finds a free high slot."""
        for other, tier in self.visible.items():
            if tier == HIGH and other != expert and other not in self.in_transition:
                self.ask(other, LOW)
                return

    @rule()
    def arrive(self):
        super().arrive()
        landed = self.driver.store.landed()
        for expert in self.in_transition:
            assert landed[expert]

    @rule(phase=st.sampled_from(list(Phase)))
    def next_step(self, phase):
        """Begin a step after a complete or an aborted one."""
        for expert, (before, after) in self.begin_step(phase):
            self.free[self.pool_of(before)] += 1
            self.visible[expert] = after
        self.running.clear()

    @precondition(lambda self: len(self.running) < N_LAYERS)
    @rule(layer=st.integers(0, N_LAYERS - 1), chosen=st.sets(st.integers(0, 4), min_size=1))
    def route(self, layer, chosen):
        if layer not in self.running:
            self.driver.apply(layer, sorted(chosen))
            self.running[layer] = sorted(chosen)

    @precondition(lambda self: bool(self.running))
    @rule()
    def compute(self):
        layer, chosen = self.running.popitem()
        seen = self.driver.use(layer, chosen)
        assert seen == {expert: {self.visible[layer, expert]} for expert in chosen}

    @invariant()
    def table_is_what_is_expected(self):
        store = self.driver.store
        resident, target = store.states()
        assert np.array_equal(resident, store.resident())
        assert {expert: resident[expert] for expert in self.visible} == self.visible
        for expert in self.visible.keys() - self.in_transition.keys():
            assert target[expert] == self.visible[expert]
        stats = store.stats()
        assert list(stats.demand_bytes) == list(stats.wait_us) == [0, 0]
        assert list(stats.hits) == list(stats.requests)
        assert stats.evictions == stats.waves == 0


class Evictions(Machine):
    """Fewer slots than experts: a request evicts the least recently used expert.

    Transitions, aborted steps and delayed reads happen meanwhile. high: the matrices of each expert
    that may be high. apart: experts of which some matrices may have been evicted and others not.
    """

    def __init__(self):
        super().__init__()
        self.driver.store.warm([(0, 0, HIGH), (0, 1, LOW), (0, 2, LOW), (1, 0, LOW)])
        self.driver.store.reset_stats()
        self.driver.store.begin_step(Phase.DECODE)
        self.high = {(0, 0): set(KINDS)}
        self.apart = set()
        self.uneven = False
        self.n_cancelled = 0  # cancelled transitions before this step

    def published(self):
        stats = self.driver.store.stats()
        return int(stats.experts_promoted + stats.experts_demoted)

    def begin_step(self, phase):
        """Begin a step and return the experts that changed."""
        return self.concluding(lambda: self.driver.store.begin_step(phase), is_step=True)

    def concluding(self, act, is_step):
        """Call act, which publishes transitions. Return the experts that changed.

        At the beginning of a step all complete transitions are published, otherwise some of them. A
        transition is cancelled if a token needs its slot. Reads of an aborted step hold slots too.
        """
        store, landed = self.driver.store, self.driver.store.landed()
        complete = {each for each in self.in_transition if landed[each]}
        published = self.published()
        act()
        resident, target = store.states()
        changed, n_cancelled = [], published - self.published()
        for expert, (before, after) in list(self.in_transition.items()):
            if (resident[expert], target[expert]) == (before, after):
                assert expert not in complete or not is_step
                continue
            if not is_step and target[expert] != resident[expert]:
                continue  # cancelled; the next step counts it
            del self.in_transition[expert]
            n_cancelled += 1
            assert target[expert] == resident[expert]
            if resident[expert] == after:
                changed.append((expert, (before, after)))
            elif after == HIGH:  # a limit may have evicted some matrices at publication
                self.high[expert] = set(KINDS)
        self.n_cancelled += n_cancelled
        failed = store.stats().transitions_failed
        assert failed == self.n_cancelled or (failed > self.n_cancelled and not is_step)
        for expert, (_, after) in changed:
            self.high[expert] = set(KINDS) if after == HIGH else set()
            self.apart.discard(expert)
        return changed

    @rule(expert=experts)
    def ask(self, expert):
        """Request a transition. At most two run at once, so that most tokens find free slots."""
        store = self.driver.store
        before = int(store.resident()[expert])
        after = LOW if before == HIGH else HIGH
        if expert in self.in_transition:
            assert store.transition([(*expert, after)]) == 0
        elif len(self.in_transition) < 2 and store.transition([(*expert, after)]):
            # an absent expert is accepted only if a read of an aborted step has just completed
            assert store.resident()[expert] == 1 - after
            self.in_transition[expert] = 1 - after, after

    @rule(
        abort=st.booleans(), layer=st.integers(0, 1), chosen=st.sets(st.integers(0, 4), max_size=2)
    )
    def run_step(self, abort, layer, chosen):
        """Run or abort a step. It computes the tier that an expert had at the step's beginning."""
        self.begin_step(Phase.DECODE)
        if not chosen:
            return
        self.experts_go_as_wholes()
        before = self.driver.store.resident()[layer]
        in_transition = dict(self.in_transition)
        self.driver.apply(layer, sorted(chosen))
        if abort:
            self.uneven = True
            return
        seen = self.driver.use_matrices(layer, sorted(chosen))
        for expert, tiers in seen.items():
            each = layer, expert
            state = f"{seen}, {before}, {in_transition}, {self.high}, {self.apart}"
            high = {kind for kind, tier in tiers.items() if tier == HIGH}
            assert max(tiers.values()) == (HIGH if before[expert] == HIGH else LOW), state
            assert high <= self.high.get(each, set()), state
            one = self.pools is None or each not in self.apart
            assert len(set(tiers.values())) == 1 or not one, state
            if each in in_transition:
                assert max(tiers.values()) == in_transition[each][0], state
            self.high[each] = high

    @precondition(lambda self: self.simulated)
    @rule(us=st.integers(0, 6))
    def pass_time(self, us):
        """Advance the virtual clock, so that a later step meets reads that are half complete."""
        self.driver.clock.advance(us * US)

    @invariant()
    def counts_agree(self):
        store = self.driver.store
        store.check()
        resident, target = store.states()
        stats = store.stats()
        moved = sum(resident[each] != before for each, (before, _) in self.in_transition.items())
        assert moved <= stats.transitions_failed - self.n_cancelled <= len(self.in_transition)
        assert all(target[each] == after for each, (_, after) in self.in_transition.items())
        assert stats.slot_bytes_in_use <= stats.slot_bytes_peak <= stats.budget_bytes

    @invariant()
    def experts_go_as_wholes(self):
        """Track which experts may be partly evicted (`apart`).

        Until a step is aborted or a limit waits for a read, experts are evicted with all their
        matrices. After that, some matrices of an expert may be resident and others not.
        """
        for layer, e in np.argwhere(self.driver.store.resident() == ABSENT).tolist():
            expert = layer, e
            if self.uneven:
                self.apart.add(expert)
            else:
                self.high[expert] = set()


class Limited(Evictions):
    """Limits on the slots between steps. Every kind keeps the same number of slots."""

    def __init__(self):
        super().__init__()
        pools = self.driver.store.spec.groups[: len(self.slots)]  # of one kind
        turns = sorted((i / n, size) for size, n in pools for i in range(n))
        sums = list(accumulate(len(KINDS) * size for _, size in turns))
        self.limits = sums[len(pools) - 1 :]

    @rule(which=st.integers(0, 6))
    def limit(self, which):
        store, n_bytes = self.driver.store, self.limits[which % len(self.limits)]
        to_come = 0

        def limited():
            nonlocal to_come
            to_come = store.limit(n_bytes)

        self.concluding(limited, is_step=False)
        stats = store.stats()
        assert stats.slot_bytes == n_bytes
        assert stats.slot_bytes_in_use <= n_bytes + to_come
        self.uneven |= to_come > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rules", "slots", "pools", "in_time"),
    [
        (Interleavings, (3, 9), None, False),
        (Interleavings, (3, 8, 2, 1, 2), None, False),  # five tiers
        (Interleavings, (3, 9), (0, 1, 1, 1), False),  # all tiers except the best share slots
        *((Evictions, (2, 5), None, in_time) for in_time in (False, True)),
        *((Evictions, (7,), (0, 0), in_time) for in_time in (False, True)),
        *((Limited, (2, 5), None, in_time) for in_time in (False, True)),
        (Limited, (7,), (0, 0), True),
    ],
)
def test_every_interleaving(rules, slots, pools, in_time, library, device, tmp_path):
    """in_time: reads take virtual time."""
    if device is not None and (pools is not None or rules is Limited or in_time):
        pytest.skip("on a device a slot holds one tier, slots stay, and nothing is simulated")
    file = ExpertFile(tmp_path / "experts.bin", n_tiers=len(pools or slots))
    given = {"file": file, "library": library, "device": device, "slots": slots}
    given |= {"pools": pools, "simulated": in_time}
    run_state_machine_as_test(
        type("Here", (rules,), given),
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
