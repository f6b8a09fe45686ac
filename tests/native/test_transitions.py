"""Transitions of the real store: promotion, demotion, publication, eviction, and reads."""

import os
import time

import pytest
from repacking import flip

from gguf_tools.file.layout import DOWN, GATE, UP
from orchestrator.errors import NativeError
from orchestrator.events import ABSENT, Phase

from .conftest import until
from .transition_driver import (
    EXPERT_BYTES,
    HELD,
    HIGH,
    LOW,
    N_EXPERT,
    N_LAYERS,
    US,
    Driver,
    ExpertFile,
)

HOT = {(layer, expert) for layer in range(N_LAYERS) for expert in (0, 1)}


@pytest.fixture(scope="module")
def expert_file(tmp_path_factory):
    return ExpertFile(tmp_path_factory.mktemp("transitions") / "experts.bin")


@pytest.fixture
def make(expert_file, library, device):
    """Return the function make(slots, high, file), which makes a store with all experts resident.

    The store's invariants are checked at the end.
    """
    made = []

    def make_one(slots=(4, 8), high=HOT, file=expert_file):
        made.append(Driver(file, library, slots, device))
        made[-1].warm(high)
        return made[-1]

    yield make_one
    for driver in made:
        driver.store.check()
        driver.store.close()


@pytest.fixture
def driver(make):
    return make()


def step(driver, layer=0, experts=range(N_EXPERT)):
    driver.store.begin_step(Phase.DECODE)
    driver.apply(layer, list(experts))
    return driver.use(layer, list(experts))


def test_two_experts_exchange_their_tiers(driver):
    """An expert is demoted into the reserve, and another expert promoted into the freed slot.

    Each takes effect at the next step.
    """
    store = driver.store
    assert store.transition([(0, 3, HIGH)]) == 0  # the high pool is full
    store.set_transition_rate(HELD)  # otherwise the read may complete before the step begins
    assert store.transition([(0, 0, LOW)]) == 1
    driver.store.begin_step(Phase.DECODE)
    driver.arrive()
    assert driver.state(0, 0) == (HIGH, LOW, True)
    assert driver.use(0, [0]) == {0: {HIGH}}  # the step began with this version
    assert step(driver)[0] == {LOW}
    assert all(each[0].tolist() == [LOW, HIGH, LOW, LOW, LOW] for each in store.states())

    assert store.transition([(0, 3, HIGH)]) == 1
    assert store.transition([(0, 3, HIGH), (0, 4, HIGH), (0, 2, LOW)]) == 0
    driver.arrive()
    assert step(driver) == {0: {LOW}, 1: {HIGH}, 2: {LOW}, 3: {HIGH}, 4: {LOW}}
    stats = store.stats()
    assert (stats.experts_promoted, stats.experts_demoted) == (1, 1)
    assert stats.transitions_rejected == 4
    assert stats.transition_bytes == 3 * (EXPERT_BYTES[HIGH] + EXPERT_BYTES[LOW])
    assert list(stats.demand_bytes) == list(stats.wait_us) == [0, 0]
    assert stats.evictions == 0


def test_the_rate_delays_reads(driver):
    """At 1 byte/s, the first part is read at once and the rest waits. Steps continue."""
    driver.store.set_transition_rate(HELD)
    assert driver.store.transition([(0, 0, LOW)]) == 1
    for _ in range(20):
        assert step(driver)[0] == {HIGH}
        time.sleep(0.002)
    assert driver.state(0, 0) == (HIGH, LOW, False)
    assert driver.store.stats().transition_bytes <= EXPERT_BYTES[LOW]
    driver.arrive()
    assert step(driver)[0] == {LOW}


def test_the_rate_holds_for_the_host_cache_too(driver, device):
    """Transitions keep their rate when their bytes come from the host cache.

    The experts return to their earlier tier, which on a device is still in the host cache.
    """
    store, experts = driver.store, [(0, 0), (1, 0)]
    for tier in (LOW, HIGH, LOW):
        assert store.transition([(*expert, tier) for expert in experts]) == 2
        driver.arrive()
        store.begin_step(Phase.DECODE)
    before = sum(store.stats().host_hits)
    rate = 200_000
    store.set_transition_rate(rate)
    start = time.monotonic()
    assert store.transition([(*expert, HIGH) for expert in experts]) == 2
    until(lambda: not driver.reading().any())
    # the first part does not wait
    assert time.monotonic() - start >= 5 * EXPERT_BYTES[HIGH] / rate
    assert device is None or sum(store.stats().host_hits) > before


@pytest.mark.parametrize("how", ["cut", "damaged"])
def test_a_failed_read_leaves_the_old_version(make, tmp_path, how):
    file = ExpertFile(tmp_path / "experts.bin")
    driver = make(file=file)
    store = driver.store
    if how == "cut":
        os.truncate(file.path, file.offset[1, GATE, LOW])
    else:
        flip(file.path, file.start(1, GATE, LOW, 0))
    assert store.transition([(1, 0, LOW), (0, 0, LOW)]) == 2

    def a_step():
        assert step(driver, 1)[0] == {HIGH}

    until(lambda: store.stats().transitions_failed + store.stats().experts_demoted == 2, a_step)
    store.check_step()  # no step failed because of the read
    store.check()
    assert all(each[:, 0].tolist() == [LOW, HIGH] for each in store.states())
    file.path.write_bytes(file.data)
    assert store.transition([(1, 0, LOW)]) == 1
    driver.arrive()
    assert step(driver, 1)[0] == {LOW}


def test_a_request_takes_over_a_running_promotion(make):
    """A request takes over a running promotion to the same tier.

    Experts in transition are not evicted for other experts.
    """
    driver = make((2, 10), set())
    store = driver.store
    store.set_transition_rate(HELD)
    assert store.transition([(0, 0, HIGH), (0, 1, HIGH)]) == 2
    store.begin_step(Phase.DECODE)
    store.set_route(None, HIGH)
    driver.apply(0, [0])
    assert driver.use(0, [0]) == {0: {HIGH}}
    driver.arrive()
    store.set_route(None, LOW)
    assert step(driver)[1] == {HIGH}


def test_unknown_experts_are_refused(driver):
    for wrong in [(2, 0, 0), (0, 5, 0), (0, 0, 2), (-1, 0, 0)]:
        with pytest.raises(NativeError, match="the model does not have"):
            driver.store.transition([(0, 0, LOW), wrong])
    assert not driver.reading().any() and not driver.store.landed().any()


@pytest.mark.parametrize("held", [True, False])
def test_a_request_during_a_demotion(make, held, tmp_path):
    """A request for a better tier during a demotion gets that tier.

    The expert moves between two tiers, and a token requests a third one.
    """
    driver = make((2, 12, 2, 2, 2), set(), ExpertFile(tmp_path / "five.bin", n_tiers=5))
    store = driver.store
    store.set_route(None, LOW)
    store.set_transition_rate(HELD if held else 0)
    assert store.transition([(0, 0, 3)]) == 1
    if not held:
        driver.arrive()
    store.set_route(None, HIGH)
    driver.apply(0, [0])
    assert driver.use(0, [0]) == {0: {HIGH}}
    store.set_route(None, LOW)
    store.begin_step(Phase.DECODE)
    assert driver.state(0, 0) == (HIGH, HIGH, False)
    store.check()
    store.set_transition_rate(0)
    assert store.transition([(0, 0, LOW)]) == 1
    driver.arrive()
    assert step(driver)[0] == {LOW}


def test_an_expert_with_two_tiers(expert_file, library):
    """Matrices of one expert in different tiers. Tiers share slots.

    An aborted step has evicted one matrix of a high expert. A low request loads only this matrix in
    low. A transition to high then moves only this matrix, and none of the expert's matrices is
    evicted.
    """
    driver = Driver(expert_file, library, slots=(4,), pools=(0, 0), simulated=True)
    with driver.store as store:
        store.warm([(0, 0, LOW), (0, 1, LOW)])
        assert store.transition([(0, 0, HIGH)]) == 1
        driver.clock.advance(50 * US)
        for expert, tier in ((0, HIGH), (1, LOW)):  # expert 0 is the least recently used one
            store.begin_step(Phase.DECODE)
            assert driver.use(0, [expert]) == {expert: {tier}}
        driver.prefetch([(1, 0, LOW), (1, 1, LOW)], DOWN)  # now no slot of that kind is free
        driver.clock.advance(50 * US)
        store.begin_step(Phase.DECODE)
        driver.apply(1, [2, 3])
        store.begin_step(Phase.DECODE)  # before any down matrix is read
        driver.clock.advance(50 * US)
        assert store.resident()[0, 0] == ABSENT
        assert driver.use_matrices(0, [0]) == {0: {GATE: HIGH, UP: HIGH, DOWN: LOW}}

        assert store.transition([(0, 0, HIGH)]) == 1
        evictions = store.stats().evictions
        driver.prefetch([(1, 0, LOW), (1, 1, LOW), (1, 4, LOW), (0, 4, LOW)], GATE)
        driver.clock.advance(50 * US)
        assert store.stats().evictions == evictions + 3  # the fourth prefetch gets no slot
        assert driver.state(0, 0) == (LOW, HIGH, True)
        store.check()
        assert step(driver, experts=[0]) == {0: {HIGH}}
