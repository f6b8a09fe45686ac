"""How fast this machine computes: how it is timed, which timing stands, what is kept, and what the
choice of --misses auto gets."""

import itertools
import json
from time import perf_counter
from types import SimpleNamespace

import numpy as np
import pytest

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN, GGMLType
from orchestrator.config import Config
from orchestrator.cost import products as products_module
from orchestrator.cost import speeds as speeds_module
from orchestrator.cost.disk import Bandwidth
from orchestrator.cost.products import Attention, Product, Small, Timer
from orchestrator.cost.time import TimeModel, spare_bytes
from orchestrator.engine.store_layout import spec_for, store_layers
from orchestrator.memory.footprint import device_shape
from orchestrator.memory.layouts import with_product_times
from orchestrator.native import Misses, ProductTime, measure_product
from orchestrator.policy import POLICIES

DAY = 86400.0


def kept(*of, now=10 * DAY):
    return speeds_module.Timings(now, {"x": [speeds_module.Timing(*each) for each in of]})


def test_the_least_stands_and_two_quiet_ones_that_agree_end_it():
    assert kept().least("x") is None and kept().is_due("x")
    early = 9 * DAY
    one = kept((3.0, early, True))
    assert one.least("x") == 3.0 and one.is_due("x")
    slow = kept((3.0, early, True), (9.0, early + speeds_module.APART_S, True))
    assert slow.least("x") == 3.0 and slow.is_due("x")  # either may have been disturbed
    assert not kept((3.0, early, True), (3.3, early + speeds_module.APART_S, True)).is_due("x")
    assert kept((3.0, early, True), (3.3, early + speeds_module.APART_S, False)).is_due("x")


def test_a_machine_that_got_slower_is_believed_in_time():
    fast = (1.0, 0.0, True), (1.0, speeds_module.APART_S, True)
    slow = (3.0, speeds_module.OLD_S, True)
    assert kept(*fast, slow, now=speeds_module.OLD_S).least("x") == 1.0
    later = kept(*fast, slow, now=speeds_module.OLD_S + speeds_module.APART_S)
    assert later.least("x") == 3.0 and later.is_due("x")
    ahead = kept((1.0, 11 * DAY, True))
    assert ahead.least("x") is None  # the clock was wrong then, or is now


@pytest.mark.parametrize(
    "damage", [None, [], {"x": 3}, {"x": [[1.0, 2.0]]}, {"x": [[-1.0, 2.0, True]]}]
)
def test_what_is_damaged_counts_as_nothing(damage, tmp_path):
    path = tmp_path / "speeds.json"
    path.write_text(json.dumps({"format": "a form", "timings": damage}))
    assert speeds_module.Timings.load(path, "a form", DAY).of == {}


class Played:
    """Stands for products.Timer, the clock, and other programs."""

    def __init__(self, monkeypatch):
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


# As far as speeds ask.
API = SimpleNamespace(_lib=None, llama_print_system_info=lambda: b"a system")
UNBOUND = SimpleNamespace(api=API)


@pytest.fixture
def machine(monkeypatch):
    return Played(monkeypatch)


WHAT = Product(GGMLType.Q4_K, 256, 64, 1)


def session(machine, seconds, after_s, others=0.0, **settings):
    """(what stands, whether it was disturbed) of a use of this machine."""
    machine.seconds_of_all, machine.others = seconds, others
    machine.now += after_s
    with speeds_module.Speeds(UNBOUND, **{"threads": 1} | settings) as speeds:
        return speeds.seconds(WHAT), speeds.disturbed


def test_a_disturbed_moment_does_not_stay(machine):
    """Other programs made a product take ten times as long when it was first measured."""
    assert session(machine, 10.0, 0, others=1.0) == (10.0, True)
    assert session(machine, 1.0, 5) == (1.0, False)
    assert session(machine, 10.0, 5) == (1.0, False) and machine.asked == 2
    assert session(machine, 8.0, speeds_module.APART_S, others=1.0) == (1.0, False)
    assert session(machine, 1.1, speeds_module.APART_S) == (1.0, False) and machine.asked == 4
    assert session(machine, 9.0, DAY) == (1.0, False) and machine.asked == 4


def test_disturbed_moments_go_on_until_there_is_a_quiet_one(machine):
    """However many there were; of the same moment, no more than a few."""
    for number in range(2 * speeds_module.MOST_MOMENTS):
        assert session(machine, 10.0 + number, speeds_module.APART_S, others=1.0) == (10.0, True)
    assert session(machine, 10.0, 5, others=1.0) == (10.0, True)
    assert machine.asked == 2 * speeds_module.MOST_MOMENTS
    assert session(machine, 1.0, speeds_module.APART_S) == (1.0, False)
    assert session(machine, 1.0, speeds_module.APART_S) == (1.0, False)
    assert session(machine, 1.0, DAY) == (1.0, False)
    assert machine.asked == 2 * speeds_module.MOST_MOMENTS + 2


def test_what_a_token_takes_is_timed_in_rounds(machine, monkeypatch):
    """The middle of three quiet rounds stands; prompts, whose products take long, have one."""
    many, small = WHAT._replace(rows=4), Small(64, 1)
    found = {WHAT: [4.0, 1.0, 2.0], small: [6.0, 7.0, 0.5], many: [3.0]}
    beside = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    monkeypatch.setattr(machine, "seconds", lambda what: found[what].pop(0))
    monkeypatch.setattr(machine, "share", lambda: beside.pop(0))
    with speeds_module.Speeds(UNBOUND, 2) as speeds:
        assert [speeds.seconds(each) for each in (WHAT, many, small)] == [4.0, 3.0, 6.0]
        assert speeds.again() and not any(found.values())
        # 0.5 was not timed on a quiet machine
        assert [speeds.seconds(each) for each in (WHAT, many, small)] == [2.0, 3.0, 6.5]
        assert not speeds.again() and not speeds.disturbed
    machine.now += 5
    with speeds_module.Speeds(UNBOUND, 2) as speeds:
        assert [speeds.seconds(each) for each in (WHAT, many, small)] == [2.0, 3.0, 6.5]
        assert not speeds.again()


def test_a_timing_that_others_disturbed_is_repeated(machine, monkeypatch):
    """Twice something ran beside the first of two products: it is timed until nothing does. Then
    nothing is left for the second one."""
    monkeypatch.setattr(speeds_module, "_REPEATS", 2)
    found, beside = [6.0, 5.0, 1.0, 7.0], [1.0, 1.0, 0.0, 1.0]
    monkeypatch.setattr(machine, "seconds", lambda what: found.pop(0))
    monkeypatch.setattr(machine, "share", lambda: beside.pop(0))
    with speeds_module.Speeds(UNBOUND, 2) as speeds:
        assert speeds.seconds(WHAT) == 1.0 and not speeds.disturbed
        assert speeds.seconds(WHAT._replace(rows=4)) == 7.0 and speeds.disturbed


def test_products_are_timed(bindings):
    with Timer(bindings.api._lib, 1) as timer:

        def seconds(what):
            """The least of some: a machine may stand still while one is timed."""
            return min(timer.seconds(what) for _ in range(3))

        for routed in (False, True):
            one, many = (
                seconds(Product(GGMLType.Q4_K, 512, 256, rows, routed=routed)) for rows in (1, 256)
            )
            assert 0 < one < many < 1
        assert seconds(Small(256, 1)) < seconds(Small(256, 256))
        short, long = (seconds(Attention(4, 2, 64, 64, 1, n)) for n in (256, 4096))
        assert 0 < short < long
        if bindings.library().interleaves(GGMLType.Q4_K, 512, 256):
            repacked = Product(GGMLType.Q4_K, 512, 256, 1, repacked=True, routed=True)
            assert 0 < seconds(repacked) < 1


def test_attention_reads_a_cache_that_is_not_in_the_processors(bindings):
    """As in llama.cpp: a cell's heads lie side by side, and a token goes through all layers."""
    keys: list[int] = []
    steps: list[tuple[int, ...]] = []
    with Timer(bindings.api._lib, 1, pool_bytes=8 << 20) as timer:
        attend, view = timer.flash_attn_ext, timer.view_3d

        def attended(*args):
            keys.extend(args[2:4])
            return attend(*args)

        def viewed(*args):
            steps.append(args[2:])
            return view(*args)

        vars(timer).update(flash_attn_ext=attended, view_3d=viewed)
        begin_s = perf_counter()
        assert 0 < timer.seconds(Attention(4, 2, 64, 64, 1, 512)) < perf_counter() - begin_s
        layer_bytes = 512 * 2 * (64 + 64) * 2
        assert len(set(keys)) == len(keys) == 2 * min(48, (8 << 20) // layer_bytes)
        assert set(steps) == {(64, 512, 2, 2 * 64 * 2, 64 * 2, 0)}
        keys.clear()
        timer.seconds(Attention(4, 2, 64, 64, 64, 512))
        assert len(keys) == 2  # many queries reuse what they read


@pytest.mark.parametrize(("others", "expected"), [(0.0, 3e-3), (0.5, 1e-3)])
def test_half_of_the_runs_or_what_nobody_interrupted(bindings, monkeypatch, others, expected):
    """Runs of 1, 3 and 9 ms in turn. Nine of ten may be slow for others' sake, where there are
    others."""
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


def test_what_was_measured_is_kept(bindings, monkeypatch):
    monkeypatch.setattr(speeds_module.Disturbance, "share", lambda self: 0.0)
    with speeds_module.Speeds(bindings, 1) as speeds:
        found = speeds.seconds(WHAT)
    monkeypatch.setattr(speeds_module, "Timer", None)
    with speeds_module.Speeds(bindings, 1) as speeds:
        assert speeds.seconds(WHAT) == found
    with speeds_module.Speeds(bindings, 2) as speeds, pytest.raises(TypeError):
        speeds.seconds(WHAT)  # other threads are another machine


def test_a_cap_holds_for_measuring_too(bindings, model, monkeypatch):
    """With few weights, which a cache may hold, figures are rough: nobody else shall have them."""
    taken: list[int] = []
    allocate = Timer._allocate
    monkeypatch.setattr(
        Timer,
        "_allocate",
        lambda self, *args: (taken.append(self._pool_bytes), allocate(self, *args)),
    )
    with ExpertModel.open(model) as opened:
        config = Config.build(model=model, ctx=256, threads=1, ram=120 << 20)
        assert 8 << 20 <= spare_bytes(config, opened) < 48 << 20
        with TimeModel(bindings, config, opened, Bandwidth(1e9)) as predictor:
            predictor._speeds.seconds(WHAT)
    assert taken and max(taken) < 48 << 20
    monkeypatch.setattr(speeds_module, "Timer", None)
    with speeds_module.Speeds(bindings, 1) as speeds, pytest.raises(TypeError):
        speeds.seconds(WHAT)


@pytest.mark.parametrize(
    ("layout", "ratios"),
    [
        (speeds_module.FILE, (8.0, 8.0, 8.0)),
        (speeds_module.OWN, (2.0, 2.0, 4.0)),
        (speeds_module.UPSTREAM, (2.0, 2.0, 6.0)),
    ],
)
def test_dense_weights_are_repacked_with_the_experts(model, layout, ratios):
    """On a machine that is played, where repacked rows are slow for many activations: slots' own
    layout takes tiles, from 8 on, and upstream's does not."""

    class PlayedSpeeds(speeds_module.Speeds):
        def seconds(self, what):
            if not isinstance(what, Product):
                return 1e-9
            if what.repacked:
                return 2.0 if what.rows < 8 else 6.0
            return 4.0 if what.routed else 8.0

        def again(self):
            return False

    library = SimpleNamespace(interleaves=lambda *_: True)
    api = SimpleNamespace(llama_print_system_info=lambda: b"played")
    played = SimpleNamespace(library=lambda: library, api=api)
    with ExpertModel.open(model) as opened:
        found = PlayedSpeeds(played, 1).costs(opened, (0,), layout)
    assert found.dense_s[:3] / found.dense_s[0] == pytest.approx(np.array(ratios) / ratios[0])


AUTO = Misses("auto", copy=20e9, read=10e9, round_trip_us=10.0, threads=2)


def spec_of(model, misses):
    policy = POLICIES["dymoe"](device_shape(model, (0, 1)))
    slots = policy.plan(1 << 22)
    tiers = {"misses": misses, "files": (), "budget_bytes": 1, "max_tokens": 1, "n_io_threads": 1}
    layers = store_layers(model.layer_ids, model.slices, (0, 1), slots)
    return spec_for(policy, slots, layers, **tiers)


def test_each_type_and_shape_is_timed_once(tiny_model):
    asked: list[tuple[int, tuple[int, int]]] = []

    def timed(quant, shape):
        asked.append((quant, shape))
        return None if quant == GGMLType.Q2_K else ProductTime(shape[0] / 100, len(asked))

    with ExpertModel.open(tiny_model("qwen3moe", "q4_k", "q2_k")) as model:
        spec = with_product_times(spec_of(model, AUTO), model, timed)
        shapes = model.shapes
    assert sorted(asked) == sorted(set(asked))
    assert {quant for quant, _ in asked} == {GGMLType.Q4_K, GGMLType.Q2_K}
    for layer, (_, slices) in enumerate(spec.layers):
        for (kind, tier), piece in slices.items():
            shape = shapes[layer][kind]
            assert piece.compute_us == (0 if tier else shape[0] / 100)
    # gate and up begin together, down behind them: each waits for the threads to wake
    waking = max(at + 1 for at, (quant, _) in enumerate(asked) if quant == GGMLType.Q4_K)
    assert spec.misses.round_trip_us == 10.0 + waking
    assert {kind for _, slices in spec.layers for kind, _ in slices} >= {DOWN}


@pytest.mark.parametrize("misses", [Misses("copy", copy=1.0), Misses("auto")])
def test_nothing_is_timed_where_nobody_asks(tiny_model, misses):
    with ExpertModel.open(tiny_model("qwen3moe", "q4_k", "q2_k")) as model:
        spec = spec_of(model, misses)
        assert with_product_times(spec, model, lambda *_: pytest.fail("it was timed")) is spec


def test_real_products_are_timed(library):
    """A larger one takes longer, in any type; threads that sleep take time to wake."""
    for quant in (GGMLType.Q4_K, GGMLType.Q2_K, GGMLType.Q8_0, GGMLType.F16):
        # Each several times: a machine may stand still while one is timed.
        small, large = (
            [measure_product(library, quant, shape, 1) for _ in range(3)]
            for shape in ((256, 64), (2048, 2048))
        )
        found = [each for each in small + large if each is not None]
        assert len(found) == 6 and all(each.wake_us >= 0 for each in found)
        assert 0 < min(each.each_us for each in found[:3]) < min(each.each_us for each in found[3:])
    for quant, shape in ((GGMLType.Q4_K, (100, 8)), (-1, (256, 8)), (GGMLType.Q8_1, (256, 8))):
        assert measure_product(library, quant, shape, 1) is None
    assert measure_product(library, GGMLType.Q4_K, (256, 8), 0) is None
