"""Limits on the slots while a model runs: slots are freed and returned."""

import ctypes
import random
from pathlib import Path

import numpy as np
import pytest

from gguf_tools.file.layout import GGMLType
from orchestrator.config import Config
from orchestrator.errors import NativeError
from orchestrator.events import ABSENT, Phase
from orchestrator.native.abi import VISIT_CB
from orchestrator.runtime.runtime import Runtime

from .conftest import DEVICES
from .transition_driver import HELD, HIGH, KINDS, LOW, US, Driver, ExpertFile

N_SLOTS = 8  # of each kind, for ten experts
HUGE_PAGE = 2 << 20
EXPERTS = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2)]  # one for each slot
THE_OTHERS = [(1, 3), (1, 4)]


def make(
    library,
    folder,
    simulated=False,
    n_warm=N_SLOTS,
    n_slots=N_SLOTS,
    device=None,
    expert_bytes=20000,
):
    """Create a store with one tier and n_warm resident experts, least recently used first."""
    file = ExpertFile(folder / "experts.bin", 1, (expert_bytes,) * 5)
    driver = Driver(file, library, (n_slots,), device, simulated=simulated)
    driver.store.warm([(*each, 0) for each in [*EXPERTS, *THE_OTHERS][:n_warm]])
    driver.store.begin_step(Phase.DECODE)
    return driver


def row_bytes(store):
    """Bytes of one slot of each kind: one expert, which is the smallest limit."""
    return sum(size for size, _ in store.spec.groups)


def kept(store):
    """Return the resident experts. Check the invariants and the limit."""
    store.check()
    stats = store.stats()
    assert stats.slot_bytes_in_use <= stats.slot_bytes <= stats.budget_bytes
    return [(int(at), int(e)) for at, e in np.argwhere(store.resident() != ABSENT)]


@pytest.mark.parametrize("simulated", [True, False])
@pytest.mark.parametrize(
    ("n_warm", "slots", "usable", "left"),
    [
        pytest.param(4, 4, 4, EXPERTS[:4], id="free slots are removed first"),
        pytest.param(8, 5, 5, EXPERTS[3:], id="then the least recently used"),
        pytest.param(8, 5.3, 5, EXPERTS[3:], id="whole slots only"),
        pytest.param(8, 1, 1, EXPERTS[7:], id="smallest limit"),
        pytest.param(2, 1, 1, EXPERTS[1:2], id="smallest limit with few in use"),
        pytest.param(8, 8, 8, EXPERTS, id="no change"),
        pytest.param(8, 1000, 8, EXPERTS, id="more than planned"),
    ],
)
def test_limits_between_steps(n_warm, slots, usable, left, simulated, library, tmp_path):
    """The kept experts are still valid. After the limit is raised, the new slots are empty."""
    driver = make(library, tmp_path, simulated, n_warm)
    with driver.store as store:
        row = row_bytes(store)
        evictions = store.stats().evictions
        assert store.limit(int(slots * row)) == 0
        assert kept(store) == left
        assert store.stats().slot_bytes == usable * row
        assert store.stats().evictions - evictions == len(KINDS) * (n_warm - len(left))
        assert store.full == (len(left) == usable)
        for layer, expert in left:
            driver.apply(layer, [expert])
            assert driver.use(layer, [expert]) == {expert: {0}}
        assert store.stats().demand_bytes[Phase.DECODE] == 0

        assert store.limit(2**64 - 1) == 0
        assert kept(store) == left and store.stats().slot_bytes == N_SLOTS * row
        absent = [each for each in EXPERTS if each not in left]
        store.warm([(*each, 0) for each in absent])
        assert kept(store) == EXPERTS and store.full
        for layer in (0, 1):
            chosen = [expert for at, expert in EXPERTS if at == layer]
            driver.apply(layer, chosen)
            assert driver.use(layer, chosen) == {expert: {0} for expert in chosen}


@pytest.mark.parametrize("device", DEVICES)
def test_refused_limits(device, library, tmp_path):
    """A limit below one slot of each kind is refused, and every limit on a device.

    A refusal changes nothing, and the next step works.
    """
    driver = make(library, tmp_path, device=device)
    with driver.store as store:
        row, before = row_bytes(store), kept(store)
        why = rf"too few.* {row} bytes" if device is None else "on a device"
        for n_bytes in (0, row - 1):
            with pytest.raises(NativeError, match=why):
                store.limit(n_bytes)
        assert kept(store) == before
        assert store.stats().slot_bytes == N_SLOTS * row
        store.check_step()
        said = []

        def meanwhile(_done):
            with pytest.raises(NativeError) as refused:
                store.limit(4 * row)
            said.append(str(refused.value))

        store.warm([], meanwhile)
        assert said and all(("warm start" in each) == (device is None) for each in said)


def test_static_tables_end_with_a_limit(library, tmp_path):
    """A limit ends static tables, and prefetch works again.

    Tables are static if all experts are resident and no policy decides.
    """
    driver = make(library, tmp_path, simulated=True, n_warm=10, n_slots=10)
    with driver.store as store:
        row, all_experts = row_bytes(store), kept(store)
        assert all_experts == [*EXPERTS, *THE_OTHERS]
        store.limit(9 * row)
        assert kept(store) == all_experts[1:]
        store.limit(10 * row)
        for kind in KINDS:
            driver.prefetch([(*all_experts[0], 0)], kind)
        driver.clock.advance(1000 * US)
        assert kept(store) == all_experts


def test_pinned_slots_are_freed_after_their_use(library, tmp_path):
    """Slots of a step's experts are freed after their use, or when an aborted step ends."""
    driver = make(library, tmp_path)
    with driver.store as store:
        row, needed = row_bytes(store), [3, 4]
        driver.apply(0, needed)
        assert store.limit(row) == 2 * row
        store.check()
        assert driver.use(0, needed) == {expert: {0} for expert in needed}
        assert len(kept(store)) == 1
        assert store.limit(row) == 0
        store.limit(N_SLOTS * row)
        store.warm([(*each, 0) for each in EXPERTS])
        store.begin_step(Phase.DECODE)
        driver.apply(1, [2])
        assert store.limit(row) == row
        store.begin_step(Phase.DECODE)
        assert len(kept(store)) == 1
        assert store.limit(row) == 0


@pytest.mark.parametrize("step_begins", [True, False])
def test_slots_of_a_transition_are_freed_at_its_end(step_begins, library, tmp_path):
    """Slots of a transition are freed at the next step, or before it.

    The next step may be waiting for the limit.
    """
    file = ExpertFile(tmp_path / "experts.bin")
    driver = Driver(file, library, (4, 8))
    with driver.store as store:
        driver.warm({(0, 0)})
        store.begin_step(Phase.DECODE)
        store.set_transition_rate(HELD)
        assert store.transition([(0, 1, HIGH)]) == 1
        to_come = store.limit(row_bytes(store))
        assert to_come > 0
        store.check()
        assert driver.state(0, 1)[:2] == (LOW, HIGH)
        driver.arrive()
        if step_begins:
            store.begin_step(Phase.DECODE)
            assert len(kept(store)) <= 2
        assert store.limit(row_bytes(store)) == 0
        assert len(kept(store)) <= 2
        assert store.resident()[0, 1] == HIGH and store.stats().transitions_failed == 0


def memory_at(address):
    """Return the resident bytes of the mapping at this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and first[0] in "0123456789abcdef":
            low, high = (int(each, 16) for each in first.split("-"))
            inside = low <= address < high
        elif inside and first == "Rss:":
            return int(rest.split()[0]) * 1024
    raise AssertionError("no mapping at this address")


def address_of(driver, layer, expert):
    """Return the current address of one matrix of an expert."""
    found = []

    def visit(_expert, _tier, _type, data, _bytes, _):
        found.append(data)

    library, handle = driver.store.library, driver.store.handle
    driver.apply(layer, [expert])
    for kind in KINDS:
        library.use(handle, layer, kind, (ctypes.c_int32 * 1)(expert), 1, VISIT_CB(visit), None)
    return found[0]


@pytest.mark.parametrize("expert_bytes", [300_000, 1_000_000])
def test_freed_memory_returns_to_the_system(expert_bytes, library, tmp_path):
    """The RSS shrinks to the limit plus at most one huge page, which the last slot may share."""
    driver = make(library, tmp_path, expert_bytes=expert_bytes)
    with driver.store as store:
        row = row_bytes(store)
        at = address_of(driver, 1, 2)
        for _ in range(3):
            assert memory_at(at) >= N_SLOTS * len(KINDS) * expert_bytes
            for rows in (5, 3, 1):
                store.limit(rows * row)
                assert memory_at(at) <= rows * row + HUGE_PAGE
                store.check()
            store.limit(N_SLOTS * row)
            store.warm([(*each, 0) for each in EXPERTS])


def rows_with(path, seed, **options):
    """Return logits after a prompt and after each of 30 tokens, and the number of evictions.

    seed: the limit changes at random before each step. None: no limit.
    """
    config = Config.build(model=path, ctx=256, ubatch=32, threads=2, **options)
    prompt = [int(t) for t in np.random.default_rng(5).integers(0, 250, 40)]
    rows = []
    with Runtime.open(config) as runtime, runtime.evaluator() as e:
        store, rng = e.inside.store, random.Random(seed)
        least, most = sum(size for size, _ in store.spec.groups), store.stats().slot_bytes
        for at in range(-1, 30):
            if seed is not None:
                to_come = store.limit(rng.choice([least, most, rng.randint(least, most)]))
                stats = store.stats()
                assert stats.slot_bytes_in_use <= stats.slot_bytes + to_come
                store.check()
            tokens = prompt if at < 0 else [int(rows[-1].argmax())]
            rows.append(e.eval(tokens, 0 if at < 0 else len(prompt) + at))
        store.check()
        return np.concatenate(rows), store.stats().evictions


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"policy": "lru", "force_managed": True}, id="all experts resident"),
        pytest.param({"policy": "lru", "expert_ram": 1 << 20}, id="some experts resident"),
        pytest.param({"policy": "lru", "expert_ram": 1 << 20, "layout": "cpu"}, id="own layout"),
        pytest.param({"policy": "dymoe", "retention": 1.0, "expert_ram": 1 << 20}, id="prefetch"),
    ],
)
def test_limits_do_not_change_logits(options, tiny_model, library):
    if "layout" in options and not library.interleaves(GGMLType.Q4_0, 256, 256):
        pytest.skip("this CPU has no own layout for q4_0")
    path = tiny_model("qwen3moe", "q4_0" if "layout" in options else "q4_k")
    rows, before = rows_with(path, None, **options)
    for seed in (1, 2):
        found, evictions = rows_with(path, seed, **options)
        np.testing.assert_array_equal(found, rows)
        assert evictions > before


def test_a_limit_during_a_step_is_refused(tiny_model):
    """A limit is refused during a step, and the step continues.

    The step callback may set a limit.
    """
    config = Config.build(
        model=tiny_model("qwen3moe", "q4_k"),
        ctx=256,
        ubatch=32,
        threads=2,
        policy="lru",
        expert_ram=1 << 20,
    )
    with Runtime.open(config) as runtime, runtime.evaluator() as e:
        store, driver = e.inside.store, e.inside.driver
        reference = e.eval([1, 2, 3], 0)
        least = sum(size for size, _ in store.spec.groups)
        said, limits = [], []

        def in_step(event):
            with pytest.raises(NativeError) as refused:
                store.limit(least)
            said.append(str(refused.value))
            driver.on_route(event)

        def after_it(_step):
            limits.append(store.limit(least))

        store.set_route(in_step)
        store.set_step_done(after_it)
        np.testing.assert_array_equal(e.eval([1, 2, 3], 0), reference)
        assert said and all("a step" in each for each in said)
        assert limits == [0] and store.stats().slot_bytes == least
        store.set_route(None)
        np.testing.assert_array_equal(e.eval([1, 2, 3], 0), reference)
