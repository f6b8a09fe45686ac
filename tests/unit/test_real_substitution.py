"""Replacements for a missing expert, with the tiny sparse model."""

import json

import numpy as np
import pytest
from test_dense_model import N_EMBD, SHAPE, silent, windows, write_llama

from models.real import substitution as s
from models.real.dense import DenseModel
from models.real.sparse import write_sparse
from models.real.split import fit_routers, split_layers
from models.real.substitution_table import Results, panel, table
from orchestrator.errors import ConfigError

# Experts 0 and 3 of 4 are resident, and a token chooses 1 and 2.
RESIDENT = np.array([True, False, False, True])


def layer(**more):
    ones = np.ones((4, 4), np.float32)
    fields = {"resident": RESIDENT, "factors": ones, "correlations": ones, "spread": 1.0}
    return s.Layer(**fields | {"scores": np.array([0.1, 0.2, 0.3, 0.4], np.float32)} | more)


@pytest.fixture(scope="module")
def model(tmp_path_factory, library):
    """(path of a sparse model with 2 of 4 experts per token, its experts, fitted values of its
    layers)."""
    folder = tmp_path_factory.mktemp("substitution")
    source = write_llama(folder / "source.gguf")
    with DenseModel(source) as dense:
        groups = split_layers(dense, source, windows(1, 4), SHAPE, silent)
        routers = fit_routers(dense, source, groups, windows(2, 4), silent)
        write_sparse(dense, groups, routers, 2, folder / "sparse.gguf")
    experts = s.Experts(folder / "sparse.gguf")
    return folder / "sparse.gguf", experts, s.fit(folder / "sparse.gguf", experts, windows(4, 2), 2)


def test_the_first_choice_is_never_left_out():
    weights = np.array([[0.6, 0.4], [0.9, 0.1]], np.float32)
    missing = np.array([[True, True], [True, False]])
    assert s.left_out(weights, missing, layer(), 1.0).tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize(("level", "expected"), [(0.25, [False, False]), (0.75, [True, False])])
def test_the_smallest_weights_are_left_out(level, expected):
    weights = np.array([[0.5, 0.2, 0.35]], np.float32)
    found = s.left_out(weights, np.ones((1, 3), bool), layer(), level)
    assert found[0, 1:].tolist() == expected


def test_a_substitute_is_resident_free_and_used_once():
    order = np.array([[1, 2, 3, 0], [1, 3, 2, 0]])
    ids = np.array([[1, 2, 2], [1, 3, 2]])
    out = np.array([[False, True, True], [False, False, True]])
    found = s.substitutes(order, ids, out, RESIDENT)
    assert found.tolist() == [[-1, 3, 0], [-1, -1, 0]]


def test_the_best_substitute_loses_least():
    """The remaining loss, relative to skipping, is one minus the squared correlation with the
    substitute's output."""
    outputs = np.random.default_rng(1).normal(size=(1, 4, 16)).astype(np.float32)
    ids, out = np.array([[1, 2]]), np.array([[False, True]])
    found, factors = s.best_of_token(outputs, ids, out, RESIDENT)
    wanted, (f, a) = outputs[0, 2], (found[0, 1], factors[0, 1])
    left = ((wanted - a * outputs[0, f]) ** 2).sum() / (wanted**2).sum()
    correlations = [
        (wanted @ outputs[0, each]) ** 2 / (wanted**2).sum() / (outputs[0, each] ** 2).sum()
        for each in (0, 3)
    ]
    assert left == pytest.approx(1 - max(correlations), abs=1e-5)


def test_expert_outputs_follow_the_formula(model):
    """An expert's output is that of the formula, for both layers."""
    _, experts, _ = model
    x = np.random.default_rng(1).normal(size=(3, N_EMBD)).astype(np.float32)
    for at in range(2):
        gate, up, down = experts._matrices[at]
        g = gate[1] @ x[0]
        expected = down[1] @ (g / (1 + np.exp(-g)) * (up[1] @ x[0]))
        assert np.allclose(experts.outputs(at, x)[0, 1], expected, atol=1e-4)


def test_nothing_is_lost_if_all_experts_are_resident(model):
    path, experts, layers = model
    every = [s.Layer(np.ones(4, bool), *_others(each)) for each in layers]
    (record,) = s.measure(path, experts, every, windows(7, 1), [], 1e9)
    for choice in s.CHOICES:
        assert record[choice.label]["kl"] / record["tokens"] < 1e-6, choice.label
        assert record[choice.label]["waited"] == 0


def _others(each):
    return each.factors, each.correlations, each.scores, each.spread


def test_reading_a_window_in_one_step_equals_decoding_it(model):
    path, experts, layers = model
    at_once, stepped = (
        s.measure(path, experts, layers, windows(7, 1), [], 1e9, stepped)[0]
        for stepped in (False, True)
    )
    for choice in s.CHOICES:
        a, b = at_once[choice.label], stepped[choice.label]
        assert a["waited"] == pytest.approx(b["waited"], abs=0.05), choice.label
        assert a["kl"] == pytest.approx(b["kl"], rel=0.02, abs=1e-4), choice.label
    assert at_once["skip 1"]["kl"] > 0.01


def test_a_run_continues_and_becomes_a_table(model, tmp_path):
    path, experts, layers = model
    cut = windows(7, 3)
    first = s.measure(path, experts, layers, cut, [], -1)
    assert first == []
    one = s.measure(path, experts, layers, cut[:1], [], 1e9)
    records = s.measure(path, experts, layers, cut, one, 1e9)
    assert len(records) == 3 and records[0] is one[0]
    file = tmp_path / "found.json"
    head = {"model": "m", "text": "t", "resident": 2, "n_expert": 4, "n_used": 2}
    head |= {"levels": s.LEVELS, "biases": s.BIASES}
    file.write_text(json.dumps(head | {"squared_correlation": [0.1, 0.2], "windows": records}))
    results = Results(file)
    assert results.over_skip(s.Choice(s.SKIP, 1.0))[0] == pytest.approx(1)
    shown = table(results)
    assert "substitute, best factor 0.5" in shown and "3 documents" in shown
    assert len(panel(results).lines) == len(s.WAYS) + 1


@pytest.mark.parametrize(
    "text", ["", "{}", '{"windows": []}', '{"windows": [], "levels": [], "biases": []}', "[1]"]
)
def test_a_file_that_has_no_results(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json: no "):
        Results(tmp_path / "x.json")


def test_results_of_another_text_are_not_continued(tmp_path):
    options = {"text": "stories", "levels": [0.5, 1.0]}
    out = tmp_path / "found.json"
    assert s.finished_windows(out, options) == []
    out.write_text(json.dumps(options | {"windows": [{"tokens": 3}]}))
    assert s.finished_windows(out, options) == [{"tokens": 3}]
    with pytest.raises(ConfigError, match=r"found\.json: has results of another run \(text\)"):
        s.finished_windows(out, options | {"text": "wikitext"})
