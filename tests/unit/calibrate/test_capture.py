"""Captured activations are the inputs of the model's expert matrices."""

import shutil
import tempfile
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN, GATE, GATE_UP, UP
from orchestrator.errors import ConfigError, GGUFError
from orchestrator.lab.calibrate import capture as spill
from orchestrator.lab.calibrate.capture import Capture, Rows, read_calibration
from orchestrator.lab.calibrate.measure import stored, tensor


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.fixture
def capture(model):
    with Capture(model, threads=1) as found:
        yield found


def test_inputs_and_ids_fit_each_other(capture, model, text, ggml):
    calibration = read_calibration(capture.tokenize, text, window=128)
    with ExpertModel.open(model) as facts:
        for seen in capture.layers(calibration.windows):
            assert seen.n_tokens == calibration.n_tokens > 256
            router = tensor(facts, f"blk.{capture.layer_ids[seen.layer]}.ffn_gate_inp.weight")
            bias = tensor(facts, f"blk.{capture.layer_ids[seen.layer]}.exp_probs_b.bias")
            assert router is not None and bias is None
            for expert in np.flatnonzero(seen.counts()):
                token, slot = seen.places(expert)
                assert (seen.ids[token, slot] == expert).all()
                x, hidden = seen.inputs(GATE, expert), seen.inputs(DOWN, expert)
                assert np.array_equal(x, seen.inputs(UP, expert))
                gate, up = (stored(facts, seen.layer, k, expert, ggml) for k in (GATE, UP))
                expected = silu(x @ gate.T) * (x @ up.T)
                assert np.abs(hidden - expected).max() < 0.01 * np.abs(expected).max()
                # In this model, the router's input is the experts' input. The chosen experts have
                # the highest logits.
                logits = x @ router.T
                chosen = np.take_along_axis(logits, seen.ids[token], axis=1)
                # Experts with nearly equal logits may be ordered differently.
                highest = -np.sort(-logits, axis=1)[:, : seen.ids.shape[1]]
                assert np.allclose(-np.sort(-chosen, axis=1), highest, atol=1e-3)
            assert seen.counts().sum() == seen.ids.size


def test_several_passes_give_the_inputs_of_one(capture, text, monkeypatch):
    windows = read_calibration(capture.tokenize, text, limit=300, window=128).windows
    shares: list[float] = []
    once = [
        (seen.layer, seen.ids.copy(), seen.inputs(DOWN, 0), seen.inputs(GATE, 0))
        for seen in capture.layers(windows)
    ]
    monkeypatch.setattr("orchestrator.lab.calibrate.capture.SPILL_BYTES", 1)
    passes = capture.layers(windows, progress=shares.append)
    for (layer, ids, hidden, x), seen in zip(once, passes, strict=True):
        assert seen.layer == layer
        assert np.array_equal(seen.ids, ids)
        assert np.array_equal(seen.inputs(DOWN, 0), hidden)
        assert np.array_equal(seen.inputs(GATE, 0), x)
        assert np.array_equal(seen.inputs(GATE, 0, 1, 4), x[1:4])
    assert shares == sorted(shares) and shares[-1] == 1
    assert len(shares) == 3 * len(windows)


def test_fused_matrices_after_a_dense_layer(ggml, text, tmp_path):
    path = synthetic.write(tmp_path / "m.gguf", "tiny-deepseek2-fused", tiers=("f16",), seed=2)
    with Capture(path, threads=1) as capture, ExpertModel.open(path) as facts:
        windows = read_calibration(capture.tokenize, text, limit=300, window=128).windows
        seen = next(capture.layers(windows))
        assert (seen.layer, capture.layer_ids[seen.layer]) == (0, 1)
        expert = int(np.argmax(seen.counts()))
        both = seen.inputs(GATE_UP, expert) @ stored(facts, 0, GATE_UP, expert, ggml).T
        gate, up = np.split(both, 2, axis=1)
        hidden = seen.inputs(DOWN, expert)
        assert np.abs(hidden - silu(gate) * up).max() < 0.01 * np.abs(hidden).max()


def test_an_exception_of_the_sink_is_raised(capture, text):
    windows = read_calibration(capture.tokenize, text, window=128).windows

    def refuse(*_):
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        capture.read(windows, [0], refuse)
    # The next call starts from the beginning.
    seen: list[int] = []
    capture.read(windows[:1], [1], lambda layer, *_: seen.append(layer))
    assert seen == [1]


def test_a_full_disk_is_a_sentence(capture, text, monkeypatch):
    windows = read_calibration(capture.tokenize, text, window=128).windows
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1000, 999, 1))
    with pytest.raises(ConfigError, match=r"free space for the activations .* needed, 1 B free"):
        next(capture.layers(windows))


def test_a_short_text_is_refused(capture, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("Too short to calibrate on.")
    with pytest.raises(ConfigError, match=r"short\.txt: \d+ tokens are too few to calibrate on"):
        read_calibration(capture.tokenize, path)


def test_a_damaged_model_is_refused(tmp_path):
    path = tmp_path / "no.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(GGUFError, match=r"no\.gguf"):
        Capture(path)


def test_spilled_activations_go_to_a_disk_or_to_tmpdir(tmp_path, monkeypatch):
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(spill, "_ON_DISK", tmp_path)
    assert spill.spill_folder() == tmp_path
    monkeypatch.setattr(spill, "_ON_DISK", tmp_path / "none")
    assert spill.spill_folder() == Path(tempfile.gettempdir())
    monkeypatch.setattr(spill, "_ON_DISK", tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "own"))
    assert spill.spill_folder() != tmp_path


def test_rows_keep_any_magnitude(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((6, 2, 40), np.float32)
    values *= np.array([1e-30, 1e-6, 1, 1e5, 1e30, 0], np.float32)[:, None, None]
    rows = Rows(tmp_path, 6, (2, 40))
    rows.put(0, values[:4])
    rows.put(4, values[4:])
    found = rows.take(np.arange(12)).reshape(6, 2, 40)
    largest = np.abs(values).max(axis=2, keepdims=True)
    assert (np.abs(found - values) <= 2**-11 * np.abs(values) + 2**-24 * largest).all()
    assert np.array_equal(rows.take(np.array([3])), found[1, 1:])
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"none: no free space for activations: No such file"):
        Rows(tmp_path / "none", 6, (2, 40))
