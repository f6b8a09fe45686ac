"""Transitions of the real store: every interleaving of promote, demote, publish, evict, a running
step and an aborted one. Bytes are checked against the file, at every moment."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

from gguf_tools.layout import BLOCK, DOWN, GATE, UP, GGMLType, pad
from orchestrator.events import ExpertState, Phase
from orchestrator.llama import Bindings
from orchestrator.native import Library, Slices, Store, StoreSpec
from orchestrator.native.abi import VISIT_CB

from .conftest import DEVICES

pytestmark = pytest.mark.usefixtures("library_folder")

N_LAYERS, N_EXPERT, KINDS = 2, 5, (UP, GATE, DOWN)
EXPERT_BYTES, TYPES = (20000, 9000), (12, 10)  # q4_k, q2_k by number only: nothing computes
HOST_BYTES = 1 << 20  # behind a device: more than all slices take
HIGH, LOW = 0, 1
UNDER_WAY = (ExpertState.PROMOTING, ExpertState.DEMOTING)
HELD = 1  # byte per second: after one part, nothing arrives


class ExpertFile:
    """Random bytes, and where each slice lies in them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset: dict[tuple[int, int, int], int] = {}
        at = 100  # slices do not start on a block
        for layer in range(N_LAYERS):
            for kind in KINDS:
                for tier in (HIGH, LOW):
                    self.offset[layer, kind, tier] = at
                    at += EXPERT_BYTES[tier] * N_EXPERT
        self.data = np.random.default_rng(0).integers(0, 256, at, np.uint8).tobytes()
        path.write_bytes(self.data)

    def slice(self, layer: int, kind: int, tier: int, expert: int) -> bytes:
        start = self.offset[layer, kind, tier] + EXPERT_BYTES[tier] * expert
        return self.data[start : start + EXPERT_BYTES[tier]]

    def spec(self, n_high: int, n_low: int, device: str | None) -> StoreSpec:
        """Pools that both layers share, one for each kind and tier."""
        sizes = [8192 * 3, 8192 * 2]
        if device is not None:
            blocks = [BLOCK[GGMLType(each)].bytes for each in TYPES]
            sizes = [pad(n, block) for n, block in zip(EXPERT_BYTES, blocks, strict=True)]
        groups = [(sizes[tier], (n_high, n_low)[tier]) for _ in KINDS for tier in (HIGH, LOW)]
        layers = []
        for layer in range(N_LAYERS):
            slices = {
                (kind, tier): Slices(
                    0,
                    self.offset[layer, kind, tier],
                    EXPERT_BYTES[tier],
                    TYPES[tier],
                    2 * KINDS.index(kind) + tier,
                )
                for kind in KINDS
                for tier in (HIGH, LOW)
            }
            layers.append((layer, slices))
        return StoreSpec(
            files=(self.path,),
            layers=tuple(layers),
            groups=tuple(groups),
            budget_bytes=sum(size * n for size, n in groups),
            n_tiers=2,
            n_expert=N_EXPERT,
            n_expert_used=2,
            max_tokens=4,
            n_ahead=0,
            n_io_threads=3,
            device=device,
            host_bytes=HOST_BYTES,
        )


class Driver:
    """A store, and the part of the graph."""

    def __init__(
        self,
        file: ExpertFile,
        library: Library,
        n_high: int,
        n_low: int,
        device: str | None = None,
    ) -> None:
        self.file = file
        self.store = Store.create(library, file.spec(n_high, n_low, device))
        self.store.set_route(None, LOW)

    def warm(self, high: set[tuple[int, int]]) -> None:
        self.store.warm(
            [
                (layer, expert, HIGH if (layer, expert) in high else LOW)
                for layer in range(N_LAYERS)
                for expert in range(N_EXPERT)
            ]
        )
        self.store.reset_stats()

    def apply(self, layer: int, experts: list[int]) -> None:
        ids = (ctypes.c_int32 * len(experts))(*experts)
        assert (
            self.store.library.apply(self.store.handle, layer, ids, None, None, len(experts)) == 0
        )

    def use(self, layer: int, experts: list[int]) -> dict[int, set[int]]:
        """The tiers in which the matrices of each expert came; every byte is checked."""
        ids = (ctypes.c_int32 * len(experts))(*experts)
        seen: dict[int, set[int]] = {expert: set() for expert in experts}
        wrong: list[str] = []
        for kind in KINDS:

            def visit(
                expert: int,
                tier: int,
                _type: int,
                data: Any,
                size: int,
                _user: Any,
                kind: int = kind,
            ) -> None:
                seen[expert].add(tier)
                if ctypes.string_at(data, size) != self.file.slice(layer, kind, tier, expert):
                    wrong.append(f"layer {layer}, kind {kind}, tier {tier}, expert {expert}")

            done = self.store.library.use(
                self.store.handle, layer, kind, ids, len(experts), VISIT_CB(visit), None
            )
            assert done == 0, self.store.library.error(self.store.handle)
        assert not wrong
        return seen

    def arrive(self) -> None:
        """Until every read of a transition is done."""
        self.store.set_transition_rate(0)
        end = time.monotonic() + 30
        while np.isin(self.store.states(), UNDER_WAY).any():
            assert time.monotonic() < end, "a transition does not arrive"
            time.sleep(0.0005)


@pytest.fixture(scope="module")
def library(library_folder: Path) -> Library:
    return Bindings.load().library()


@pytest.fixture(scope="module")
def expert_file(tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    return ExpertFile(tmp_path_factory.mktemp("transitions") / "experts.bin")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str | None:
    """Whose memory the slots are in: the host's, or a device's with late copies."""
    name: str | None = request.param
    return name


@pytest.fixture
def driver(expert_file: ExpertFile, library: Library, device: str | None) -> Iterator[Driver]:
    made = Driver(expert_file, library, n_high=4, n_low=8, device=device)
    made.warm({(layer, expert) for layer in range(N_LAYERS) for expert in (0, 1)})
    yield made
    made.store.close()


def step(driver: Driver, layer: int = 0) -> dict[int, set[int]]:
    driver.store.begin_step(Phase.DECODE)
    everyone = list(range(N_EXPERT))
    driver.apply(layer, everyone)
    return driver.use(layer, everyone)


def test_a_swap(driver: Driver) -> None:
    """Demotion into the reserve, then promotion into the slot that it freed; each is visible from
    the next step on, and never sooner."""
    store = driver.store
    assert store.transition([(0, 3, HIGH)]) == 0  # the high pool is full
    assert store.transition([(0, 0, LOW)]) == 1
    driver.store.begin_step(Phase.DECODE)
    driver.arrive()
    assert store.states()[0, 0] == ExpertState.EVICTING
    assert driver.use(0, [0]) == {0: {HIGH}}  # the step began with that version
    assert step(driver)[0] == {LOW}
    assert store.states()[0].tolist() == [2, 1, 2, 2, 2]

    assert store.transition([(0, 3, HIGH)]) == 1
    assert store.transition([(0, 3, HIGH), (0, 4, HIGH), (0, 2, LOW)]) == 0
    driver.arrive()
    assert step(driver) == {0: {LOW}, 1: {HIGH}, 2: {LOW}, 3: {HIGH}, 4: {LOW}}
    stats = store.stats()
    assert (stats.experts_promoted, stats.experts_demoted) == (1, 1)
    assert stats.transitions_rejected == 4
    assert stats.transition_bytes == 3 * sum(EXPERT_BYTES)
    assert list(stats.demand_bytes) == list(stats.wait_us) == [0, 0]
    assert stats.evictions == 0
    store.check()


def test_a_step_sees_one_version(driver: Driver) -> None:
    """What arrives while a step runs waits for the next one, also where its expert was not asked
    for yet."""
    driver.store.begin_step(Phase.DECODE)
    driver.apply(0, [0, 1])
    driver.store.transition([(0, 0, LOW), (1, 0, LOW)])
    driver.arrive()
    assert driver.use(0, [0, 1]) == {0: {HIGH}, 1: {HIGH}}
    driver.apply(1, [0])
    assert driver.use(1, [0]) == {0: {HIGH}}
    assert step(driver)[0] == {LOW}


def test_the_rate_holds_reads_back(driver: Driver) -> None:
    """One part goes through at once, the rest waits; a demand read does not."""
    driver.store.set_transition_rate(HELD)
    assert driver.store.transition([(0, 0, LOW)]) == 1
    for _ in range(20):
        assert step(driver)[0] == {HIGH}
        time.sleep(0.002)
    assert driver.store.states()[0, 0] == ExpertState.DEMOTING
    assert driver.store.stats().transition_bytes <= EXPERT_BYTES[LOW]
    driver.arrive()
    assert step(driver)[0] == {LOW}


def test_a_rate_is_kept(driver: Driver) -> None:
    rate = 200_000
    driver.store.set_transition_rate(rate)
    start = time.monotonic()
    assert driver.store.transition([(0, 0, LOW), (1, 0, LOW)]) == 2
    while np.isin(driver.store.states(), UNDER_WAY).any():
        time.sleep(0.001)
    took_s = time.monotonic() - start
    read = driver.store.stats().transition_bytes
    assert read == 6 * EXPERT_BYTES[LOW]
    assert took_s >= (read - EXPERT_BYTES[LOW]) / rate  # the first part needs no wait


def test_a_failed_read_leaves_the_old_version(
    library: Library, tmp_path: Path, device: str | None
) -> None:
    file = ExpertFile(tmp_path / "cut.bin")
    driver = Driver(file, library, n_high=4, n_low=8, device=device)
    driver.warm({(layer, expert) for layer in range(N_LAYERS) for expert in (0, 1)})
    with driver.store as store:
        os.truncate(file.path, file.offset[1, GATE, LOW])
        assert store.transition([(1, 0, LOW), (0, 0, LOW)]) == 2
        end = time.monotonic() + 30
        while store.stats().transitions_failed + store.stats().experts_demoted < 2:
            assert time.monotonic() < end
            assert step(driver, 1)[0] == {HIGH}
        store.check_step()  # no step failed for it
        store.check()
        assert store.states()[:, 0].tolist() == [ExpertState.LO, ExpertState.HI]
        file.path.write_bytes(file.data)
        assert store.transition([(1, 0, LOW)]) == 1
        driver.arrive()
        assert step(driver, 1)[0] == {LOW}


def test_a_token_does_not_lose_an_expert_in_transition(
    expert_file: ExpertFile, library: Library, device: str | None
) -> None:
    """A policy that also asks for tiers: its demand takes over a promotion under way, and what is
    in transition is not evicted for others."""
    driver = Driver(expert_file, library, n_high=2, n_low=10, device=device)
    driver.warm(set())
    with driver.store as store:
        store.set_transition_rate(HELD)
        assert store.transition([(0, 0, HIGH), (0, 1, HIGH)]) == 2
        store.begin_step(Phase.DECODE)
        store.set_route(None, HIGH)
        driver.apply(0, [0])
        assert driver.use(0, [0]) == {0: {HIGH}}
        driver.arrive()
        store.set_route(None, LOW)
        assert step(driver)[1] == {HIGH}
        store.check()


def test_a_token_that_needs_the_slot_takes_it(
    expert_file: ExpertFile, library: Library, device: str | None
) -> None:
    """Transitions hold every high slot, and a token cannot go on without one: it does not wait
    for the next step, which would never come."""
    driver = Driver(expert_file, library, n_high=2, n_low=10, device=device)
    driver.warm(set())
    with driver.store as store:
        store.set_transition_rate(HELD)
        store.begin_step(Phase.DECODE)
        assert store.transition([(0, 0, HIGH), (0, 1, HIGH)]) == 2
        store.set_route(None, HIGH)
        driver.apply(1, [2, 3])
        assert driver.use(1, [2, 3]) == {2: {HIGH}, 3: {HIGH}}
        store.check()
        assert store.stats().transitions_failed == 2
        store.set_transition_rate(0)
        store.begin_step(Phase.DECODE)
        assert store.states()[0].tolist() == [ExpertState.LO] * N_EXPERT
        store.check()


def test_unknown_experts_are_refused(driver: Driver) -> None:
    from orchestrator.errors import NativeError

    for wrong in [(2, 0, 0), (0, 5, 0), (0, 0, 2), (-1, 0, 0)]:
        with pytest.raises(NativeError, match="does not have"):
            driver.store.transition([(0, 0, LOW), wrong])
    assert not np.isin(driver.store.states(), UNDER_WAY).any()


experts = st.tuples(st.integers(0, N_LAYERS - 1), st.integers(0, N_EXPERT - 1))


class Interleavings(RuleBasedStateMachine):
    """What a reader of the paper would expect, beside the store. visible: the version of each
    expert; under_way: what a transition brings; free: slots of each tier."""

    file: ExpertFile
    library: Library
    device: str | None
    n_high, n_low = 3, 9  # two in reserve

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(self.file, self.library, self.n_high, self.n_low, self.device)
        high = {(0, 0), (0, 1), (1, 0)}
        self.driver.warm(high)
        everyone = [(layer, e) for layer in range(N_LAYERS) for e in range(N_EXPERT)]
        self.visible = {each: HIGH if each in high else LOW for each in everyone}
        self.under_way: dict[tuple[int, int], int] = {}
        self.free = [self.n_high - 3, self.n_low - 7]
        self.running: dict[int, list[int]] = {}
        self.driver.store.begin_step(Phase.DECODE)

    @rule(expert=experts, tier=st.sampled_from([HIGH, LOW]))
    def ask(self, expert: tuple[int, int], tier: int) -> None:
        possible = (
            expert not in self.under_way and self.visible[expert] != tier and self.free[tier] > 0
        )
        admitted = self.driver.store.transition([(*expert, tier)])
        assert admitted == possible
        if admitted:
            self.under_way[expert] = tier
            self.free[tier] -= 1

    @rule(expert=experts)
    def swap_into(self, expert: tuple[int, int]) -> None:
        """Demotes somebody high, so that `ask` finds a free high slot now and then."""
        for other, tier in self.visible.items():
            if tier == HIGH and other != expert and other not in self.under_way:
                self.ask(other, LOW)
                return

    @rule()
    def hold(self) -> None:
        self.driver.store.set_transition_rate(HELD)

    @rule()
    def arrive(self) -> None:
        self.driver.arrive()
        states = self.driver.store.states()
        for expert in self.under_way:
            assert states[expert] == ExpertState.EVICTING

    @rule(phase=st.sampled_from(list(Phase)))
    def next_step(self, phase: Phase) -> None:
        """A step boundary, after a whole step or an aborted one: what is complete is published,
        and nothing else changes."""
        complete = {
            expert
            for expert in self.under_way
            if self.driver.store.states()[expert] == ExpertState.EVICTING
        }
        self.driver.store.begin_step(phase)
        self.running.clear()
        resident = self.driver.store.resident()
        for expert, tier in list(self.under_way.items()):
            if resident[expert] != tier:
                assert expert not in complete
                continue
            self.free[self.visible[expert]] += 1
            self.visible[expert] = tier
            del self.under_way[expert]

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
        store.check()
        resident = store.resident()
        assert {expert: resident[expert] for expert in self.visible} == self.visible
        states = store.states()
        for expert, tier in self.visible.items():
            if expert in self.under_way:
                assert states[expert] >= ExpertState.PROMOTING
            else:
                assert states[expert] == (ExpertState.HI, ExpertState.LO)[tier]
        stats = store.stats()
        assert stats.slot_bytes_in_use <= stats.slot_bytes_peak <= stats.budget_bytes
        assert list(stats.demand_bytes) == list(stats.wait_us) == [0, 0]
        assert list(stats.hits) == list(stats.requests)
        assert stats.evictions == stats.waves == stats.transitions_failed == 0

    def teardown(self) -> None:
        self.driver.store.close()


class Evictions(RuleBasedStateMachine):
    """Fewer slots than experts: what a token asks for evicts what was used longest ago, beside
    transitions, aborted steps and reads that are held back. under_way: experts in transition."""

    file: ExpertFile
    library: Library
    device: str | None
    n_high, n_low = 2, 5

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(self.file, self.library, self.n_high, self.n_low, self.device)
        self.driver.store.warm([(0, 0, HIGH), (0, 1, LOW), (0, 2, LOW), (1, 0, LOW)])
        self.driver.store.reset_stats()
        self.under_way: dict[tuple[int, int], tuple[int, int]] = {}  # (from, to)
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

    @rule()
    def hold(self) -> None:
        self.driver.store.set_transition_rate(HELD)

    @rule()
    def arrive(self) -> None:
        self.driver.arrive()

    @rule(
        abort=st.booleans(), layer=st.integers(0, 1), chosen=st.sets(st.integers(0, 4), max_size=2)
    )
    def run_step(self, abort: bool, layer: int, chosen: set[int]) -> None:
        """What is complete changes at the boundary, and nothing else of what is under way."""
        store, states = self.driver.store, self.driver.store.states()
        complete = {each for each in self.under_way if states[each] == ExpertState.EVICTING}
        store.begin_step(Phase.DECODE)
        resident = store.resident()
        for expert, (before, after) in list(self.under_way.items()):
            if resident[expert] == after:
                del self.under_way[expert]
            else:
                assert expert not in complete and resident[expert] == before
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

    @invariant()
    def nothing_is_lost(self) -> None:
        store = self.driver.store
        store.check()
        states, resident = store.states(), store.resident()
        for expert, (before, _) in self.under_way.items():
            assert resident[expert] == before
            assert states[expert] >= ExpertState.PROMOTING
        stats = store.stats()
        assert stats.slot_bytes_in_use <= stats.slot_bytes_peak <= stats.budget_bytes
        assert stats.transitions_failed == 0

    def teardown(self) -> None:
        self.driver.store.close()


@pytest.mark.parametrize("rules", [Interleavings, Evictions])
def test_every_interleaving(
    rules: type[RuleBasedStateMachine],
    expert_file: ExpertFile,
    library: Library,
    device: str | None,
) -> None:
    given = {"file": expert_file, "library": library, "device": device}
    machine = type("Machine", (rules,), given)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
