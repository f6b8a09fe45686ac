"""Predicted quality loss of lower precisions, in nats: from a loss table, from expert usage, and
from the decisions of a running model."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from shapes import make_decision, make_event, make_shape, make_view
from tables import cases

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.allocation.estimate import KlEstimate, Routing, surprise
from orchestrator.config import Config
from orchestrator.cost import calibrating, losses
from orchestrator.cost.calibrating import CalibrationTime, format_duration
from orchestrator.cost.losses import Fit, LossModel, LossTable, TablePrecision
from orchestrator.cost.speeds import ROWS, Costs
from orchestrator.errors import ConfigError, NoLossTableError
from orchestrator.events import ABSENT, SKIP, Phase
from orchestrator.lab.bench.models import DEMO_MODEL
from orchestrator.runtime.loss_meter import LossMeter

SHAPE = make_shape(n_layers=3, n_expert=8, k=2)

SIZE = (SHAPE.n_layers, SHAPE.n_expert)

RNG = np.random.default_rng(3)

NATS = np.sort(RNG.random((*SIZE, 3)), axis=2)

NATS[..., 0] = 0

ESTIMATE = KlEstimate("q4_k", NATS, RNG.random(SIZE))


def by_hand(layer, ids, weights, tiers, nats=NATS):
    column = {0: 0, 1: 1, SKIP: 2}
    return sum(
        float(g) ** 2 * nats[layer, e, column[int(tiers[e])]]
        for e, g in zip(ids, weights, strict=True)
    )


def test_a_choice_costs_the_square_of_its_gates_times_the_losses():
    ids = np.array([[1, 5], [7, 0]])
    weights = np.array([[0.5, 0.25], [0.75, 0.5]], np.float32)
    tiers = np.zeros(8, np.uint8)
    tiers[[5, 7]] = 1, SKIP
    found = ESTIMATE.of_choice(2, ids, weights, tiers)
    assert found.tolist() == pytest.approx([0.0625 * NATS[2, 5, 1], 0.5625 * NATS[2, 7, 2]])


def test_a_resident_plan_costs_its_hotness_times_the_losses():
    hotness = RNG.random(SIZE)
    tiers = RNG.integers(0, 2, SIZE).astype(np.uint8)
    expected = sum(
        hotness[at] * ESTIMATE.gates[at] * NATS[(*at, int(tiers[at]))] for at in np.ndindex(SIZE)
    )
    assert ESTIMATE.of_uses(hotness, tiers) == pytest.approx(expected)
    assert ESTIMATE.of_uses(hotness, np.zeros(SIZE, np.uint8)) == 0


@pytest.mark.parametrize("exact", [True, False])
def test_the_meter_uses_the_computed_tiers(exact):
    """The meter counts the tier that is computed: a better resident copy if there is one, but with
    `exact` the requested tier. A failed step adds nothing."""
    meter = LossMeter(ESTIMATE, exact)
    resident = np.full(SIZE, ABSENT, np.uint8)
    resident[:, :4] = 0
    view = make_view(SHAPE, resident)
    total = 0.0
    for step in range(4):
        for layer in range(SHAPE.n_layers):
            event = make_event(SHAPE, RNG, n_tokens=2, layer=layer)
            event.step = step
            out = make_decision(SHAPE)
            out.tier_array[:] = 1
            out.tier_array[3] = SKIP
            meter.decided(event, view, out)
            computed = out.tier_array.copy()
            if not exact:
                computed[:3] = 0
            for ids, weights in zip(event.ids_array, event.weights_array, strict=True):
                if step != 1:
                    total += by_hand(layer, ids, weights, computed)
        if step != 1:
            meter.step_done(Phase.DECODE, 2)
    assert meter.mean(Phase.DECODE) == pytest.approx(total / 6)
    assert meter.mean(Phase.PREFILL) is None
    mark = meter.mark()
    assert meter.since(mark, Phase.DECODE) is None
    meter.step_done(Phase.DECODE, 1)
    assert meter.since(mark, Phase.DECODE) == 0


def test_uses_without_a_decision_are_counted():
    meter = LossMeter(ESTIMATE, exact=False)
    counts, tiers = np.ones(SIZE), np.ones(SIZE, np.uint8)
    meter.set_tiers(tiers)
    meter.add_counts(counts)
    meter.step_done(Phase.DECODE, 4)
    assert meter.mean(Phase.DECODE) == pytest.approx((ESTIMATE.gates * NATS[..., 1]).sum() / 4)
    assert meter.costs and not LossMeter(KlEstimate("x", NATS[..., [0, 2]], counts), True).costs


def table(fit=None, names=("q8_0", "q4_k", "q2_k")):
    n = len(names)
    loss = np.broadcast_to(np.arange(n, dtype=np.float64), (*SIZE, n)).copy()
    counts = np.ones(SIZE, np.int64)
    candidates = [TablePrecision(name, 8.0 - at, True) for at, name in enumerate(names)]
    power, gates = np.full(SIZE, 9.0), np.full(SIZE, 0.25)
    counts[0, 0], power[0, 0], gates[0, 0] = 0, np.nan, np.nan
    loss[0, 0] = np.nan
    return LossTable(candidates, loss, power, counts, "r", "rtn", "c", 7, gates, fit)


FIT = Fit((0.5, 1.0, 2.0), ("q8_0", "q4_k", "q2_k", "skip"), "12 tokens", 1.25)


def test_distances_are_from_the_base():
    """Losses are mean squared distances from the base tier. q4_k and q2_k are 1 and 2 from the
    reference, so 3 from each other. Skipping costs the power of the output. An expert without a
    token gets the mean of its layer."""
    found = table(FIT).estimate(["q4_k", "q2_k"])
    assert found is not None and found.base == "q4_k"
    factors = np.array(FIT.factors)[:, None, None]
    assert np.allclose(found.nats, factors * np.array([0.0, 3.0, 10.0]))
    assert np.allclose(found.gates, 0.25)
    other = table(FIT).estimate(["q4_k", "q2_k"], "q8_0")
    assert other is not None and np.allclose(other.nats, factors * np.array([1.0, 2.0, 9.0]))
    assert table().estimate(["q4_k"]) is None and table(FIT).estimate(["q4_k", "q1_0"]) is None


def test_each_tier_has_its_own_scale():
    """A tier without a fitted scale gets that of the tier nearest in bits."""
    scaled = FIT._replace(tiers=("q8_0", "q2_k", "skip"), scales=(0.5, 2.0, 3.0))
    costs = table(scaled).costs(["q8_0", "q4_k", "q2_k"])
    plain = table(scaled._replace(scales=())).costs(["q8_0", "q4_k", "q2_k"])
    # The table's bits are 8, 7 and 6.
    assert np.allclose(costs, plain * np.array([0.5, 0.5, 2.0, 3.0]))


OF_OTHER = {"format": "moe-edge loss table", "version": 3, "model": "x", "name": "o.gguf"}


@cases(
    "found, reason",
    (None, "m.gguf has no loss table"),
    (OF_OTHER, "m.gguf.calib.json: this loss table was made with another file (o.gguf)"),
    ({**OF_OTHER, "version": 2}, "m.gguf.calib.json: this loss table has another format version"),
    (json.dumps(OF_OTHER)[:-9], "m.gguf.calib.json: this file is not a loss table, or is damaged"),
    (table(), "m.gguf.calib.json cannot predict the quality loss"),
    (table(FIT), "m.gguf.calib.json lacks one of the precisions q4_k, q1_0"),
)
def test_who_needs_it_is_told_what_to_run(found, reason, tmp_path, monkeypatch):
    """In one sentence with the command and its duration. Only a table that is missing or unusable
    is worth an offer to make it."""
    path, is_usable = tmp_path / "m.gguf", isinstance(found, LossTable)
    synthetic.write(path, "tiny-qwen3moe")
    if is_usable:
        losses.default_path(path).touch()
        monkeypatch.setattr(losses, "load", lambda *_: found)
    elif found is not None:
        text = found if isinstance(found, str) else json.dumps(found)
        losses.default_path(path).write_text(text)
    with ExpertModel.open(path) as model:
        known = LossModel(Config.build(model=path), model)
        assert known.estimate(["q4_k", "q1_0"]) is None
        with pytest.raises(ConfigError) as caught:
            known.needed(["q4_k", "q1_0"])
    assert isinstance(caught.value, NoLossTableError) != is_usable
    said, force = str(caught.value), "" if found is None else " --force"
    assert said.startswith("--max-loss and --policy floor cannot be used: ")
    assert reason in said and "\n" not in said
    command = re.escape(f": run `moe-edge calibrate -m {path}{force}`")
    assert re.search(command + r" \(about \d+ s, once\)$", said)


@cases(
    "seconds, said",
    (0.2, "1 s"),
    (12.4, "12 s"),
    (43, "45 s"),
    (95, "2 minutes"),
    (720, "12 minutes"),
    (7300, "2 hours"),
)
def test_a_duration_is_rounded(seconds, said):
    assert format_duration(seconds) == said


def uneven_table():
    """Two layers with three experts. One expert saw no token."""
    loss = np.array(
        [[[0.0, 1.0], [0.0, 2.0], [np.nan, np.nan]], [[0.0, 3.0], [0.0, 4.0], [0.0, 5.0]]]
    )
    counts = np.array([[1, 3, 0], [2, 2, 2]])
    gates = np.array([[0.5, 0.25, np.nan], [0.1, 0.2, 0.3]])
    candidates = [TablePrecision("q8_0", 8.5, True), TablePrecision("q2_k", 2.6, True)]
    power = np.where(counts > 0, 10.0, np.nan)
    fit = Fit((2.0, 0.5), ("q8_0", "q2_k"), "text", 1.2)
    return LossTable(candidates, loss, power, counts, "", "rtn", "text", 8, gates, fit)


def test_factor_and_gates_weigh_the_losses():
    """Loss per use = layer factor * mean squared gate weight * loss. An expert without a token gets
    the means of its layer."""
    nats = uneven_table().per_use(("q8_0", "q2_k"))
    assert nats is not None and (nats[..., 0] == 0).all()
    gate, lost = (0.5 + 3 * 0.25) / 4, (1 + 3 * 2) / 4
    assert nats[0, :, 1] == pytest.approx([2 * 0.5 * 1, 2 * 0.25 * 2, 2 * gate * lost])
    assert nats[1, :, 1] == pytest.approx([0.5 * 0.1 * 3, 0.5 * 0.2 * 4, 0.5 * 0.3 * 5])


def test_without_a_fit_losses_per_use_are_the_losses():
    for less in ({"fit": None}, {"gates": None}):
        found = replace(uneven_table(), **less)
        assert (found.per_use(("q2_k",)) == found.of_tiers(("q2_k",))).all()
    assert uneven_table().per_use(("q3_k",)) is None


def test_estimates_are_those_of_sensitive_texts():
    """Estimates are scaled to the upper end of `spread`: nine tenths of the texts lose less. The
    result's `spread` is the ratio of lower to upper end."""
    wide = FIT._replace(spread=(0.5, 2.0), routing=(-0.1, 0.4))
    found, usual = (table(each).estimate(["q4_k", "q2_k"]) for each in (wide, FIT))
    np.testing.assert_allclose(found.nats, 2 * usual.nats)
    assert (found.spread, usual.spread) == (0.25, 1.0)
    assert (found.routing.low, found.routing.high) == (-0.1, 0.4)


def test_surprise_has_a_mean_of_zero_in_each_layer():
    counts = np.array([[1000.0, 10.0, 10.0, 0.0], [500.0, 500.0, 500.0, 500.0]])
    found = surprise(counts)
    assert found[0, 0] < 0 < found[0, 1] < found[0, 3] and found[1] == pytest.approx([0.0] * 4)
    assert ((counts + 1) * found).sum(axis=1) == pytest.approx([0.0, 0.0], abs=1e-9)
    routing = Routing(found, -0.1, 0.2)
    assert routing.holds(counts) and routing.holds(0 * counts)
    # uses an expert that the calibration texts never used
    assert not routing.holds(np.eye(4)[[3, 0]] * 256)
    # uses only the most common expert
    assert not routing.holds(np.array([[256, 0, 0, 0], [0, 0, 0, 0]]))


@pytest.mark.parametrize("decodes", [True, False])
def test_the_meter_counts_answer_tokens_with_a_halved_limit(decodes):
    phase = Phase.DECODE if decodes else Phase.PREFILL
    meter = LossMeter(ESTIMATE, exact=True)
    meter.step_done(phase, 3)
    meter.halved = True
    meter.step_done(phase, 4)
    assert meter.halved_tokens == 4 * decodes


def test_the_duration_of_calibrate_is_that_of_its_products(monkeypatch):
    """Seconds of each part, on a simulated machine."""

    class PlayedSpeeds:
        def __init__(self, *_, **__):
            pass

        def costs(self, model, tiers, layout):
            per_row = np.arange(1, len(tiers) + 1)[:, None] * np.array(ROWS) * 1e-3
            experts = np.tile(per_row, (model.n_layers, 1, 1))
            return Costs(experts, np.zeros(0), np.array(ROWS) * 0.1, 0.0, (0.0, 0.0))

        def output_seconds(self, model, n_tokens):
            return 7.0

        def close(self):
            pass

    monkeypatch.setattr(calibrating, "Speeds", PlayedSpeeds)
    with ExpertModel.open(DEMO_MODEL) as opened:
        n_uses = 512 * opened.n_expert_used * opened.n_layers
        found = CalibrationTime.of(opened, Config.build(model=DEMO_MODEL), 512)
        n_tiers = len(opened.tiers)
    skipped, *lowered = found.passes_s[1:]
    assert found.passes_s[0] == skipped and len(lowered) == n_tiers - 1 > 0
    factor = calibrating._PASS_FACTOR
    assert skipped == pytest.approx(factor * (51.2 + 7.0 + n_uses * 1e-3), abs=1.0)
    more = [factor * tier * n_uses * 1e-3 / 2 for tier in range(1, n_tiers)]
    assert np.array(lowered) - skipped == pytest.approx(more)
    assert found.total_s == found.read_s + found.measure_s + sum(found.passes_s)
