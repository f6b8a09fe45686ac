"""Measured compute speeds of this machine: how they are timed, which timing is used, and which one
is stored."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from tables import cases

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import GGMLType
from gguf_tools.file.parse import TensorInfo
from orchestrator.config import Config
from orchestrator.cost import planner
from orchestrator.cost import products as products_module
from orchestrator.cost import speeds as speeds_module
from orchestrator.cost.disk import Bandwidth
from orchestrator.cost.planner import Planner
from orchestrator.cost.products import Product, Small, Timer
from orchestrator.cost.speeds import (
    APART_S,
    FILE,
    OLD_S,
    OWN,
    UPSTREAM,
    Speeds,
    Timing,
    Timings,
    spare_bytes,
)
from orchestrator.plan.records import PlanRequest

DAY = 86400.0


def kept(*of, now=10 * DAY):
    return Timings(now, {"x": Timing(*of)} if of else None)


def test_the_shortest_time_is_used_and_two_undisturbed_ones_end_measuring():
    assert kept().least("x") is None and kept().is_due("x")
    timings = kept()
    timings.add("x", 9.0, quiet=False)
    assert timings.least("x") == 9.0 and not timings.is_due("x")  # not again at the same moment
    timings.add("x", 3.0, quiet=True)
    timings.add("x", 4.0, quiet=False)
    assert timings.of["x"] == (3.0, 1, 10 * DAY)
    early = 10 * DAY - APART_S
    assert kept(3.0, 1, early).is_due("x") and not kept(3.0, 2, early).is_due("x")


def test_old_times_are_dropped_if_the_machine_became_slower():
    assert kept(1.0, 2, 0.0, now=OLD_S - 1).least("x") == 1.0
    assert kept(1.0, 2, 0.0, now=OLD_S).is_due("x")
    assert kept(1.0, 2, 11 * DAY).least("x") is None  # in the future: the clock was or is wrong


@cases("damage", None, [], {"x": 3}, {"x": [1.0, 2.0]}, {"x": [-1.0, 2, 1.0]})
def test_damaged_timings_are_ignored(damage, tmp_path):
    path = tmp_path / "speeds.json"
    path.write_text(json.dumps({"format": "a form", "timings": damage}))
    assert Timings.load(path, "a form", DAY).of == {}


class Played:
    """Simulated products.Timer, clock, and load by other programs."""

    def __init__(self, monkeypatch, bindings):
        self.bindings = bindings
        self.seconds_of_all, self.now, self.others, self.asked = 1.0, DAY, 0.0, 0
        monkeypatch.setattr(speeds_module, "_REPEATS", 0)
        monkeypatch.setattr(speeds_module, "Timer", lambda *_: self)
        monkeypatch.setattr(speeds_module, "time", lambda: self.now)
        monkeypatch.setattr(speeds_module, "Disturbance", lambda: self)

    def seconds(self, what):
        self.asked += 1
        return self.seconds_of_all

    def share(self):
        return self.others

    def close(self):
        pass


@pytest.fixture
def machine(monkeypatch, bindings):
    return Played(monkeypatch, bindings)


WHAT = Product(GGMLType.Q4_K, 256, 64, 1)


def session(machine, seconds, after_s, others=0.0, **settings):
    """Measure in a new process. Returns (time that is used, whether it was disturbed)."""
    machine.seconds_of_all, machine.others = seconds, others
    machine.now += after_s
    with Speeds(machine.bindings, **{"threads": 1} | settings) as speeds:
        return speeds.seconds(WHAT), speeds.disturbed


def test_a_disturbed_measurement_is_replaced(machine):
    """A time that other programs made ten times as long is replaced by a later, undisturbed one."""
    assert session(machine, 10.0, 0, others=1.0) == (10.0, True)
    assert session(machine, 1.0, 5) == (10.0, True) and machine.asked == 1  # the same moment
    assert session(machine, 1.0, APART_S) == (1.0, False)
    assert session(machine, 8.0, APART_S, others=1.0) == (1.0, False)
    assert session(machine, 1.1, APART_S) == (1.0, False) and machine.asked == 4
    assert session(machine, 9.0, DAY) == (1.0, False) and machine.asked == 4


def test_measuring_continues_until_it_is_undisturbed(machine):
    for number in range(9):
        assert session(machine, 10.0 + number, APART_S, others=1.0) == (10.0, True)
    assert machine.asked == 9


def test_a_rough_timing_is_final_once_it_was_undisturbed(machine):
    """Another shape of the type is not timed: its time is scaled by bytes."""

    def rough(seconds, others=0.0):
        scale = Product(GGMLType.Q4_K, 2048, 1024, 1).nbytes / WHAT.nbytes
        found, disturbed = session(machine, seconds, APART_S, others, rough=True)
        return round(found * scale, 6), disturbed

    assert rough(10.0, others=1.0) == (10.0, True)
    assert rough(1.0) == (1.0, False) and machine.asked == 2
    assert rough(0.5) == (1.0, False) and machine.asked == 2


def test_products_of_decode_steps_are_timed_in_rounds(machine, monkeypatch):
    """Products of a decode step are timed in three rounds, and the median of the undisturbed ones
    is used. Products of prompts take long and have one round."""
    many, small = WHAT._replace(rows=4), Small(64, 1)
    found = {WHAT: [4.0, 1.0, 2.0], small: [6.0, 7.0, 0.5], many: [3.0]}
    loads = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    monkeypatch.setattr(machine, "seconds", lambda what: found[what].pop(0))
    monkeypatch.setattr(machine, "share", lambda: loads.pop(0))
    with Speeds(machine.bindings, 2) as speeds:
        assert [speeds.seconds(each) for each in (WHAT, many, small)] == [4.0, 3.0, 6.0]
        assert speeds.time_again() and not any(found.values())
        # 0.5 was timed while other programs ran
        assert [speeds.seconds(each) for each in (WHAT, many, small)] == [2.0, 3.0, 6.5]
        assert not speeds.time_again() and not speeds.disturbed
    machine.now += 5
    with Speeds(machine.bindings, 2) as speeds:
        assert [speeds.seconds(each) for each in (WHAT, many, small)] == [2.0, 3.0, 6.5]
        assert not speeds.time_again()


def test_a_disturbed_timing_is_repeated(machine, monkeypatch):
    """A disturbed timing is repeated up to twice. The first product uses all repeats, so the second
    one stays disturbed."""
    monkeypatch.setattr(speeds_module, "_REPEATS", 2)
    found, loads = [6.0, 5.0, 1.0, 7.0], [1.0, 1.0, 0.0, 1.0]
    monkeypatch.setattr(machine, "seconds", lambda what: found.pop(0))
    monkeypatch.setattr(machine, "share", lambda: loads.pop(0))
    with Speeds(machine.bindings, 2) as speeds:
        assert speeds.seconds(WHAT) == 1.0 and not speeds.disturbed
        assert speeds.seconds(WHAT._replace(rows=4)) == 7.0 and speeds.disturbed


@pytest.mark.parametrize(("others", "expected"), [(0.0, 3e-3), (0.5, 1e-3)])
def test_the_median_or_the_fastest_tenth_is_used(bindings, monkeypatch, others, expected):
    """Runs take 1, 3 and 9 ms in turn. Without other programs the median is used, with other
    programs the fastest tenth."""
    runs, now = itertools.cycle([1e-3, 3e-3, 9e-3]), 0.0
    monkeypatch.setattr(products_module, "perf_counter", lambda: now)
    monkeypatch.setattr(products_module.Disturbance, "share", lambda self: others)

    def compute(*_):
        nonlocal now
        now += next(runs)
        return 0

    with Timer(bindings.api._lib, 1) as timer:
        vars(timer).update(backend_graph_compute=compute)
        assert timer.seconds(Product(GGMLType.Q4_K, 256, 64, 4)) == pytest.approx(expected / 2)


def test_measured_times_are_stored(bindings, monkeypatch):
    monkeypatch.setattr(speeds_module.Disturbance, "share", lambda self: 0.0)
    with Speeds(bindings, 1) as speeds:
        found = speeds.seconds(WHAT)
    monkeypatch.setattr(speeds_module, "Timer", None)
    with Speeds(bindings, 1) as speeds:
        assert speeds.seconds(WHAT) == found
    with Speeds(bindings, 2) as speeds, pytest.raises(TypeError):
        speeds.seconds(WHAT)  # another number of threads has its own measurements


def test_measuring_stays_within_the_memory_limit(bindings, model, monkeypatch):
    """With little free memory the measurement uses few weights, which a CPU cache may hold. The
    results are rough and are not stored."""
    taken: list[int] = []
    allocate = Timer._allocate
    monkeypatch.setattr(
        Timer,
        "_allocate",
        lambda self, *args: (taken.append(self._pool_bytes), allocate(self, *args)),
    )
    with ExpertModel.open(model) as opened:
        config = Config.build(model=model, ctx=256, threads=1, ram=120 << 20)
        request = PlanRequest(config)
        assert 8 << 20 <= spare_bytes(request, opened) < 48 << 20
        monkeypatch.setattr(planner, "kept_bandwidth", lambda *_: Bandwidth(1e9))
        with Planner(request, opened).times() as predictor:
            predictor.speeds.seconds(WHAT)
    assert taken and max(taken) < 48 << 20
    monkeypatch.setattr(speeds_module, "Timer", None)
    with Speeds(bindings, 1) as speeds, pytest.raises(TypeError):
        speeds.seconds(WHAT)


@cases(
    "layout, ratios", (FILE, (8.0, 8.0, 8.0)), (OWN, (2.0, 2.0, 4.0)), (UPSTREAM, (2.0, 2.0, 6.0))
)
def test_dense_weights_are_repacked_with_the_experts(model, layout, ratios):
    """Dense weights have the times of the experts' layout, on a simulated machine where repacked
    rows are slow for 8 or more activations. The layout of the slots then uses tiles; upstream's
    does not."""

    class PlayedSpeeds(Speeds):
        def seconds(self, what):
            if not isinstance(what, Product):
                return 1e-9
            if what.repacked:
                return 2.0 if what.rows < 8 else 6.0
            return 4.0 if what.routed else 8.0

        def time_again(self):
            return False

    library = SimpleNamespace(interleaves=lambda *_: True)
    api = SimpleNamespace(llama_print_system_info=lambda: b"played")
    played = SimpleNamespace(library=lambda: library, api=api)
    with ExpertModel.open(model) as opened:
        found = PlayedSpeeds(played, 1).costs(opened, (0,), layout)
    assert found.dense_s[:3] / found.dense_s[0] == pytest.approx(np.array(ratios) / ratios[0])


def test_a_routing_table_is_not_timed():
    """DeepSeek-V4 chooses experts by a table of token ids; ggml would end the process."""
    tensors = [
        TensorInfo("blk.0.ffn_gate_tid2eid.weight", (6, 512), GGMLType.I32, 0, 12288),
        TensorInfo("blk.0.attn_output.weight", (32, 32), GGMLType.Q8_0, 12288, 1088),
    ]
    part = SimpleNamespace(tensors={each.name: each for each in tensors})
    model = SimpleNamespace(parts=[part], hparams=SimpleNamespace(routed_blocks=1))
    assert list(speeds_module._dense_matrices(model)) == ["blk.0.attn_output.weight"]
