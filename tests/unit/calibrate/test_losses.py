"""The loss table: its values, its file, and the command that measures it."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN, GATE, UP, GGMLType
from gguf_tools.file.reader import GGUFFile
from gguf_tools.file.writer import GGUFWriter
from gguf_tools.pack import pack
from gguf_tools.quantize.imatrix import read_imatrix
from orchestrator.cli.main import cli
from orchestrator.cost.losses import Fit, LossTable, TablePrecision, default_path, load, save
from orchestrator.errors import BudgetError, ConfigError
from orchestrator.lab.calibrate import measure as measuring
from orchestrator.lab.calibrate import reader
from orchestrator.lab.calibrate import table as tables
from orchestrator.lab.calibrate.capture import Capture
from orchestrator.lab.calibrate.measure import LayerExperts, stored
from orchestrator.lab.calibrate.methods import Method
from orchestrator.lab.calibrate.table import measure_losses, read_windows
from orchestrator.lab.observe import observe
from orchestrator.runtime.evaluator import log_softmax


@pytest.fixture(scope="module")
def files(ggml, tmp_path_factory):
    """A packed file and its full-precision source: two layers, and one expert without tokens."""
    folder = tmp_path_factory.mktemp("model")
    shape = replace(synthetic.preset("tiny-qwen3moe"), n_layer=2, n_expert=4)
    source = folder / "source.gguf"
    synthetic.write(source, shape, tiers=("f16",), routing="zipf", zipf_s=8.0, seed=1)
    pack(source, folder / "packed.gguf", ["q8_0", "q3_k"], ggml=ggml)
    return folder / "packed.gguf", source


def run(*args):
    return CliRunner().invoke(cli, ["calibrate", *map(str, args), "--threads", "1", "--force"])


@pytest.fixture
def table(files, text, monkeypatch):
    """The table that the command writes, with at most 100 inputs for each expert."""
    packed, source = files
    monkeypatch.setattr(measuring, "MAX_ROWS", 100)
    result = run(packed, "--calib", text, "--reference", source, "--types", "q4_k,q3_k,q1_0")
    assert result.exit_code == 0, result.output
    with ExpertModel.open(packed) as model:
        return load(default_path(packed), model)


def test_the_losses_are_those_of_the_formula(table, files, text, ggml):
    """The loss of each candidate of each expert, compared with a computation in double
    precision."""
    packed, source = files
    assert table.candidates == [
        TablePrecision("q8_0", 8.5, True),
        TablePrecision("q4_k", 4.5, False),
        TablePrecision("q3_k", 3.4375, True),
        TablePrecision("q1_0", 1.125, False),
    ]
    kinds = (UP, GATE, DOWN)
    with (
        ExpertModel.open(packed) as tiers,
        ExpertModel.open(source) as full,
        Capture(source, threads=1) as capture,
    ):
        windows = read_windows(Method(calib=text), packed).windows
        for seen in capture.layers(windows):
            assert table.counts[seen.layer].tolist() == seen.counts().tolist()
            for expert, n in enumerate(seen.counts()):
                if n == 0:
                    continue
                best = {k: stored(full, seen.layer, k, expert, ggml) for k in kinds}
                made = {
                    index: {
                        k: ggml.dequantize(t, ggml.quantize(t, w), 256) for k, w in best.items()
                    }
                    for index, t in ((1, GGMLType.Q4_K), (3, GGMLType.Q1_0))
                }
                for index, tier in ((0, 0), (2, 1)):
                    made[index] = {
                        k: stored(tiers, seen.layer, k, expert, ggml, tier) for k in kinds
                    }
                x = seen.inputs(UP, expert).astype(np.float64)
                y = plain(best, x)
                power = np.mean(y**2)
                assert np.isclose(table.power[seen.layer, expert], power, rtol=2e-3)
                some = slice(None, None, -(-n // 100))
                for index, matrices in made.items():
                    off = plain(matrices, x[some]) - y[some]
                    error = power * np.mean(off**2) / np.mean(y[some] ** 2)
                    found = table.loss[seen.layer, expert, index]
                    assert np.isclose(found, error, rtol=4e-3), (expert, index)
    assert (np.diff(np.nanmean(table.loss, axis=(0, 1))) > 0).all()


def plain(matrices, x):
    up, gate, down = (matrices[kind].astype(np.float64) for kind in (UP, GATE, DOWN))
    inner = x @ gate.T
    return (inner / (1 + np.exp(-inner)) * (x @ up.T)) @ down.T


def test_an_expert_without_a_token_has_no_loss(table):
    unseen = table.counts == 0
    assert unseen.any() and not unseen.all(axis=1).any()
    assert np.isnan(table.loss[unseen]).all() and np.isnan(table.power[unseen]).all()
    filled = table.filled()
    assert np.array_equal(filled[~unseen], table.loss[~unseen])
    layer, expert = (int(each[0]) for each in np.nonzero(unseen))
    share = table.counts[layer] / table.counts[layer].sum()
    mean = np.nansum(table.loss[layer] * share[:, None], axis=0)
    assert np.allclose(filled[layer, expert], mean)
    assert "got no token" in table.render()


def test_the_best_tier_is_the_default_reference(files, text, tmp_path):
    packed, out = files[0], tmp_path / "own.json"
    result = run(packed, "--calib", text, "--types", "", "--calib-tokens", 300, "--out", out)
    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())
    assert [each["name"] for each in data["candidates"]] == ["q8_0", "q3_k"]
    assert data["reference"] == "packed.gguf, q8_0 (8.50 bits per weight)"
    assert "calib.txt, " in data["calibration"] and "sha256 " in data["calibration"]
    with ExpertModel.open(packed) as model:
        own = load(out, model)
    seen = own.counts > 0
    assert (own.loss[seen][:, 0] == 0).all() and (own.loss[seen][:, 1] > 0).all()
    assert "stored" in result.output and "q3_k" in result.output
    assert own.fit is not None and own.fit.tiers == ("q8_0", "q3_k", "skip")
    assert "The KL divergence is estimated from the squared errors" in result.output
    windows = read_windows(Method(calib=text, tokens=300), packed).windows
    gates: list[np.ndarray] = []
    ids: list[np.ndarray] = []

    def keep(node):
        gates.append(node.source(1).array()[0, :, :, 0])
        # the input of this product shows which experts the gate weights belong to
        ids.append(node.source(0).source(2).array()[0, 0])

    with observe(packed, tables.WINDOW, 1, lambda n: n.name == "ffn_moe_weighted-1", keep) as own_:
        for window in windows:
            own_.read(window)
    of, by = np.concatenate(ids), np.concatenate(gates).astype(float)
    of_each = [np.mean(by[of == expert] ** 2) for expert in np.flatnonzero(seen[1])]
    assert own.gates is not None and np.allclose(own.gates[1][seen[1]], of_each)


MOVED = {
    "skip in parts": ([[0.0, 2.0], [3.0, 0.0]], [4.0, 1.5]),
    "skip": ([[1.0, 1.0], [2.0, 2.0]], [3.0, 3.0]),
    "q3_k": ([[4.0, 0.0], [0.0, 2.0]], [2.0, 1.0]),
}


def test_factors_and_scales_fit_exact_measurements():
    """An exact solution exists: the first window is twice as sensitive as the second, and the last
    layer counts twice. The unit of the losses does not change scales and error."""
    unusual = np.array([0.0, 0.5])
    found = {
        name: tables.Moved(np.array(kl), np.array(lost), unusual)
        for name, (lost, kl) in MOVED.items()
    }
    weights = np.ones(2)
    once = tables.fitted(["q8_0", "q3_k"], found, "text", weights)
    assert once.factors == pytest.approx([2 / 3, 4 / 3]) and once.error > 0
    assert once.tiers == ("q8_0", "q3_k", "skip")
    # The windows lose 1.5 and 0.75 times the predicted loss. The range has a margin of 0.25.
    assert once.spread == pytest.approx([0.825, 1.425])
    assert once.routing == pytest.approx([-0.25, 0.75])
    assert once.scales == pytest.approx([9 / 16, 9 / 16, 1.0])
    half = {name: each._replace(lost=each.lost / 2) for name, each in found.items()}
    twice = tables.fitted(["q8_0", "q3_k"], half, "text", weights)
    assert twice.factors == pytest.approx([2 * each for each in once.factors])
    assert twice.scales == pytest.approx(once.scales)
    assert twice.error == pytest.approx(once.error)
    for moved in (0.0, np.array([1e-9, -1e-9])):  # rounding may have either sign
        still = {name: each._replace(kl=moved + 0 * each.kl) for name, each in found.items()}
        with pytest.raises(
            ConfigError, match="skipped experts did not measurably change the model's output"
        ):
            tables.fitted(["q8_0", "q3_k"], still, "text", weights)


def test_no_first_choice_is_skipped(files, text, tmp_path, monkeypatch):
    """The pass "skip" never skips a token's first choice, as in all policies. Other choices are
    skipped for single tokens, which changes the logits."""
    skipped: list[np.ndarray] = []
    read = tables.TextReader._route

    def watched(self, event):
        read(self, event)
        if self._mask is not None and self._mask.any():
            first = np.arange(event.n_tokens), event.weights_array.argmax(axis=1)
            assert not self._mask[first].any()
            skipped.append(self._mask)

    monkeypatch.setattr(tables.TextReader, "_route", watched)
    table = measure(files[0], text, tmp_path / "o.json")
    assert skipped and not all(each.all(axis=0).any() for each in skipped)
    assert table.fit is not None and min(table.fit.factors) > 0


def measure(packed, text, out):
    method = Method(calib=text, tokens=600, threads=1)
    notes: list[str] = []
    found = measure_losses(method, packed, None, [], out, lambda *_: None, notes.append)
    assert all("Continued the interrupted run" in note for note in notes[:-1]), notes
    assert re.match(r"Calibrating takes about \d+ s\. If it is interrupted", notes[-1])
    return found


@pytest.mark.parametrize("after", ["table", "skip in parts", "skip"])
def test_an_interrupted_run_continues(after, files, text, tmp_path, monkeypatch):
    """The continued run gives the same numbers as an uninterrupted one, and repeats no pass."""
    packed, out = files[0], tmp_path / "t.json"
    whole = measure(packed, text, out)
    made: list[str] = []
    moved = tables.moved

    def stopped(reader, name, *more):
        if made[-1:] == [after] or (after == "table" and not made):
            made.append("interrupt")
            raise KeyboardInterrupt
        made.append(name)
        return moved(reader, name, *more)

    monkeypatch.setattr(tables, "moved", stopped)
    out.unlink()
    with pytest.raises(KeyboardInterrupt):
        measure(packed, text, out)
    assert not out.exists()
    again = measure(packed, text, out)
    assert again.fit == whole.fit and np.array_equal(again.loss, whole.loss, equal_nan=True)
    made.remove("interrupt")
    assert made == ["skip in parts", "skip", "q3_k"]
    with ExpertModel.open(packed) as model:
        assert not tables.Kept(model, {}).went_on


def test_a_run_interrupted_in_its_first_pass_restarts(files, text, tmp_path, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    method, out = Method(calib=text, tokens=600, threads=1), tmp_path / "t.json"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(tables._Run, "_save_log_probabilities", stopped)
        measure(files[0], text, out)
    notes: list[str] = []
    measure_losses(method, files[0], None, [], out, lambda *_: None, notes.append)
    assert len(notes) == 1 and "Continued" not in notes[0]


def test_little_memory_gives_the_same_losses(files, text, tmp_path, monkeypatch):
    """Little memory means steps of one window, and experts that are read in each step. The losses
    are the same although other random numbers are drawn."""
    packed = files[0]
    whole = measure(packed, text, tmp_path / "whole.json")
    monkeypatch.setattr("orchestrator.lab.calibrate.reader._MOST_TOKENS", tables.WINDOW)
    parts = measure(packed, text, tmp_path / "parts.json")
    assert np.array_equal(parts.counts, whole.counts)
    assert np.allclose(parts.power, whole.power, rtol=1e-4, equal_nan=True)
    assert np.allclose(parts.gates, whole.gates, rtol=1e-4, equal_nan=True)


def test_a_pass_that_finds_less_memory_has_fewer_of_the_logits(files, text, tmp_path, monkeypatch):
    """With little memory, a pass has the logits of one token per window. They equal those that the
    first pass stored for that token."""
    load, sizes, scored = reader.load_within, [], []

    def full(stack, path, size, *args, **more):
        sizes.append(size)
        if len(sizes) > 1 and sizes[-2:] != [tables.WINDOW] * 2:
            raise BudgetError("too little", 1)
        return load(stack, path, size, *args, **more)

    def watched(text, name, costs, unusual, against, progress):
        scored.append([int(each.sum()) for each in text.scored])
        says = [log_softmax(row) for step in text.read(lambda *_: None) for row in step.logits]
        kept = [against.row(at) for at in range(len(says))]
        assert np.allclose(says, kept, atol=1e-3)
        return moved(text, name, costs, unusual, against, progress)

    moved = tables.moved
    monkeypatch.setattr(reader, "load_within", full)
    monkeypatch.setattr(tables, "moved", watched)
    assert measure(files[0], text, tmp_path / "less.json").fit is not None
    assert scored == [[1, 1]] * 3


def test_losses_with_method_imatrix(files, text, tmp_path):
    """With importance from the inputs of the same text, the mean loss of q2_k is lower than with
    rtn."""
    packed, _ = files
    found = []
    for method in ("rtn", "imatrix"):
        out = tmp_path / f"{method}.json"
        options = ("--types", "q2_k", "--method", method, "--out", out)
        result = run(packed, "--calib", text, *options)
        assert result.exit_code == 0, result.output
        with ExpertModel.open(packed) as model:
            found.append(load(out, model))
    plain_loss, weighted = (table.filled()[..., -1].mean() for table in found)
    assert weighted < plain_loss
    assert [table.method for table in found] == ["rtn", "imatrix"]


def test_save_imatrix_writes_an_importance_matrix(files, text, tmp_path):
    packed, out = files[0], tmp_path / "m.gguf"
    result = run(packed, "--calib", text, "--save-imatrix", out)
    assert result.exit_code == 0, result.output
    assert "saw fewer than 32 calibration tokens" in result.output
    assert len(read_imatrix(out).entries) == 6
    assert read_imatrix(out).datasets == ["calib.txt"]


def test_another_model_is_no_reference(files, model, text, tmp_path):
    result = run(files[0], "--calib", text, "--reference", model, "--out", tmp_path / "x.json")
    assert result.exit_code == 1
    assert "not the same model as" in result.output
    assert not (tmp_path / "x.json").exists()


def test_an_unknown_activation_is_refused(files, text, ggml, monkeypatch):
    _, source = files
    windows = read_windows(Method(calib=text, tokens=300), source).windows
    with Capture(source, threads=1) as capture, ExpertModel.open(source) as full:
        seen = list(capture.layers(windows))[1]
        expert = int(np.argmax(seen.counts()))
        rows = [seen.inputs(kind, expert, stop=64) for kind in (UP, DOWN)]
        assert LayerExperts(full, 1, expert, *rows, ggml).activation == "silu"
        monkeypatch.delitem(measuring._GATED, "silu")
        with pytest.raises(
            ConfigError, match="layer 1: the activation function of the experts is unknown"
        ):
            LayerExperts(full, 1, expert, *rows, ggml)


def test_scales_biases_and_other_activations(ggml, tmp_path):
    """The outputs are correct for clamped SwiGLU, for biases of all three matrices (as in gpt-oss),
    and for their scales (as in NVFP4)."""
    rng = np.random.default_rng(5)
    source = synthetic.write(
        tmp_path / "m.gguf",
        replace(synthetic.preset("tiny-qwen3moe"), n_layer=1, n_expert=2),
        tiers=("f16",),
    )
    path = tmp_path / "biased.gguf"
    kinds = ("up", "gate", "down")
    bias = {name: rng.standard_normal((2, 256), np.float32) for name in kinds}
    scale = {name: rng.standard_normal(2, np.float32) for name in kinds}
    added = {f"blk.0.ffn_{name}_exps.bias": values for name, values in bias.items()}
    added |= {f"blk.0.ffn_{name}_exps.scale": values for name, values in scale.items()}
    with GGUFFile.open(source) as file:
        writer = GGUFWriter(path)
        for key in file.metadata:
            writer.meta_encoded(key, file.encoded_value(key))
        for info in file.tensors.values():
            writer.declare(info.name, info.shape, info.type)
        for name, values in added.items():
            writer.declare(name, values.shape[::-1], GGMLType.F32)
        with writer:
            writer.begin()
            for name in file.tensors:
                writer.write_tensor(name, file.array(name))
            for name, values in added.items():
                writer.write_tensor(name, values)
    with ExpertModel.open(path) as model:
        x = rng.standard_normal((40, 256), np.float32) * 8
        matrices = {kind: stored(model, 0, kind, 0, ggml) for kind in (UP, GATE, DOWN)}
        gate = np.minimum(x @ matrices[GATE].T * scale["gate"][0] + bias["gate"][0], 7)
        up = np.clip(x @ matrices[UP].T * scale["up"][0] + bias["up"][0], -7, 7)
        hidden = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        experts = LayerExperts(model, 0, 0, x, hidden, ggml)
        assert experts.activation == "clamped swiglu"
        expected = hidden @ matrices[DOWN].T * scale["down"][0] + bias["down"][0]
        assert np.allclose(experts.output(0, matrices, x), expected, atol=1e-3)


def small(model):
    shape = (model.n_layers, model.n_expert)
    loss = np.full((*shape, 2), 0.25)
    counts = np.ones(shape, np.int64)
    loss[0, 1], counts[0, 1] = np.nan, 0
    candidates = [TablePrecision("q8_0", 8.5, True), TablePrecision("q2_k", 2.625, False)]
    ranges = (0.8, 1.25), (0.4, 1.6), (-0.1, 0.2)
    fitted = Fit((0.5, 2.0), ("q8_0", "skip"), "9 tokens", 1.25, *ranges)
    gates = loss[..., 1]
    return LossTable(candidates, loss, loss[..., 0], counts, "r", "rtn", "c", 7, gates, fitted)


KL = {"factors": [1, 1], "tiers": [], "text": "", "error": 0}
KL |= {"spread": [1, 1], "routing": [0, 1]}


def test_a_table_comes_back(files, tmp_path):
    path = tmp_path / "t.json"
    with ExpertModel.open(files[0]) as model:
        table = small(model)
        save(path, model, table)
        again = load(path, model)
        assert again.candidates == table.candidates
        assert np.array_equal(again.loss, table.loss, equal_nan=True)
        assert np.array_equal(again.counts, table.counts)
        assert (again.reference, again.method, again.calibration) == ("r", "rtn", "c")
        assert again.max_rows == 7 and again.fit == table.fit
        assert again.gates is not None and table.gates is not None
        assert np.array_equal(again.gates, table.gates, equal_nan=True)
        save(path, model, replace(table, gates=None, fit=None))
        assert load(path, model).fit is load(path, model).gates is None
    path.write_text(json.dumps(json.loads(path.read_text()) | {"name": "a\nb\x1b[31m"}))
    said = r"another file \(a b\[31m\)"
    with ExpertModel.open(files[1]) as other, pytest.raises(ConfigError, match=said):
        load(path, other)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("loss", [[0.1]]),
        ("loss", "none"),
        ("loss", [[[-1.0, -1.0]] * 4] * 2),
        ("loss", [[[None, None]] * 4] * 2),
        ("counts", [[1, 1, 1, 1]]),
        ("counts", [[-1, 1, 1, 1]] * 2),
        ("counts", [[0, 0, 0, 0]] * 2),
        ("loss", [[[1e31, 1e31]] * 4] * 2),
        ("candidates", []),
        ("candidates", [{"name": "q8_0"}]),
        ("power", [1]),
        ("gates", [1]),
        ("gates", [[-1.0] * 4] * 2),
        ("kl", {"factors": [1, 1]}),
        ("kl", {**KL, "factors": [1, 0]}),
        ("kl", {**KL, "factors": [1]}),
        ("kl", {**KL, "error": -1}),
        ("kl", {**KL, "tiers": ["q8_0", "skip"], "scales": [1]}),
        ("kl", {**KL, "tiers": ["q8_0"], "scales": [1]}),
        ("kl", {**KL, "tiers": ["skip"], "scales": [0]}),
        ("kl", {key: value for key, value in KL.items() if key != "spread"}),
        ("kl", {**KL, "spread": [0, 1]}),
        ("kl", {**KL, "spread": [2, 1]}),
        ("kl", {**KL, "spread": [1]}),
        ("kl", {**KL, "routing": [1, 0]}),
        ("kl", {**KL, "routing": [0, math.inf]}),
        ("kl", {**KL, "routing": None}),
        ("format", "other"),
    ],
)
def test_a_damaged_table_is_a_sentence(key, value, files, tmp_path):
    path = tmp_path / "t.json"
    with ExpertModel.open(files[0]) as model:
        save(path, model, small(model))
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
        with pytest.raises(
            ConfigError, match=r"t\.json: this file is not a loss table, or is damaged"
        ):
            load(path, model)
        path.write_text("[" * 100_000)
        with pytest.raises(ConfigError, match="not a loss table"):
            load(path, model)
        with pytest.raises(ConfigError, match=r"none\.json cannot be read: No such file"):
            load(tmp_path / "none.json", model)
