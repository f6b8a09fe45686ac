"""Intervals and figures of the real model's routing (models/real), with numbers by hand."""

import gzip
import json
import lzma
from types import SimpleNamespace

import numpy as np
import pytest

from models.real import bootstrap as b
from models.real import figures as f
from models.real.studies import HITTERS, LOAD, Hitters, depth_figures, layer_groups
from models.real.subject import Beginnings
from models.real.text import judged_documents
from orchestrator.errors import ConfigError
from orchestrator.lab.eval.text import Document

ALL = np.ones(2, np.int64)
ONCE = np.ones(4, np.int64)


@pytest.mark.parametrize("strata", [None, "aabbb", "ababb", "aaaaa"])
def test_draws_keep_the_strata(strata):
    drawn = b.draws(5, strata)
    assert drawn.shape == (b.DRAWS, 5)
    assert drawn[0].tolist() == [1] * 5
    for label in set(strata or "a"):
        at = [unit for unit in range(5) if strata is None or strata[unit] == label]
        assert (drawn[:, at].sum(axis=1) == len(at)).all()
    assert (drawn.std(axis=0) > 0.1).all()
    assert (drawn == b.draws(5, strata)).all()


@pytest.mark.parametrize(
    ("values", "units", "expected"),
    [
        ([2.0, 2.0, 2.0], [0, 1, 2], (2.0, 2.0, 2.0)),
        ([1.0, 3.0], [7, 7], (2.0, 2.0, 2.0)),  # one unit has no spread
        ([0.0, 0.0, 0.0, 4.0], [0, 0, 0, 1], (1.0, 0.0, 4.0)),  # the mean is that of values
        ([0.0, 1.0], [0, 1], (0.5, 0.0, 1.0)),
    ],
)
def test_an_interval(values, units, expected):
    assert b.interval(np.array(values), np.array(units)) == expected


def test_the_interval_of_a_figure_begins_with_the_sample():
    drawn = b.draws(3)
    value, low, high = b.of_figure(lambda draw: float(draw @ [0.0, 1.0, 2.0]) / 3, drawn)
    assert value == 1.0 and low < 0.5 and high > 1.5
    assert b.shown((1.0, 0.25, 1.5), 2) == "1.00 (0.25 to 1.50)"


@pytest.mark.parametrize(
    ("counts", "n_hot", "hot"),
    [
        ([[3, 1, 2]], 1, [[1, 0, 0]]),
        ([[3, 1, 2]], 2, [[1, 0, 1]]),
        ([[1, 1, 1]], 2, [[1, 1, 0]]),  # the first of equal ones
        ([[0, 5], [5, 0]], 1, [[0, 1], [1, 0]]),
    ],
)
def test_hot_experts(counts, n_hot, hot):
    assert f.hot_experts(np.array(counts, float), n_hot).astype(int).tolist() == hot


def usage(*experts):
    """Uses of 4 experts in one layer: 3 of the given expert, 1 of each other. [n, 1, 4]"""
    return np.array([[[3.0 if each == at else 1.0 for at in range(4)]] for each in experts])


@pytest.mark.parametrize(
    ("experts", "same", "other", "covers"),
    [
        ((0, 0, 1, 1), 1.0, 0.0, (0.5, 1 / 6)),
        ((2, 2, 2, 2), 1.0, 1.0, (0.5, 0.5)),
        ((0, 1, 1, 0), 0.0, 1.0, (1 / 6, 0.5)),  # differences within a kind are chance
    ],
)
def test_hot_sets_of_the_same_and_of_other_kinds(experts, same, other, covers):
    found = f.HotSets(usage(*experts), ["text", "text", "code", "code"]).figures()
    head = "hot set of a quarter (1): "
    values = {name.removeprefix(head): figure(ONCE) for name, figure in found.items()}
    assert values["shared, same kind"] == same
    assert values["shared, other kinds"] == other
    assert values["shared, other minus same"] == other - same
    assert values["layers without a shared one, other kinds"] == 1 - other
    assert values["share of the uses, same kind"] == pytest.approx(covers[0])
    assert values["share of the uses, other kinds"] == pytest.approx(covers[1])


@pytest.mark.parametrize(("experts", "layers"), [((0, 0, 1, 1, 2, 2), 1), ((0, 0, 1, 1, 0, 0), 0)])
def test_layers_in_which_three_kinds_are_disjoint(experts, layers):
    kinds = [kind for kind in f.TRIPLE for _ in range(2)]
    found = f.HotSets(usage(*experts), kinds).figures()
    name, _ = (each for each in found if each.endswith("are disjoint"))
    assert found[name](np.ones(6, np.int64)) == layers


def test_one_kind_of_text_has_no_hot_sets_to_compare():
    assert f.HotSets(usage(0, 0), ["text", "text"]).figures() == {}


@pytest.mark.parametrize(
    ("experts", "draw", "shared"),
    [
        ((0, 0), (1, 1), 1.0),
        ((0, 1), (1, 1), 0.0),
        ((0, 0, 1), (1, 1, 1), 1 / 3),
        ((0, 0, 1), (1, 2, 0), 1.0),  # two contexts, one of them twice: that is no pair
    ],
)
def test_hot_experts_of_two_inputs(experts, draw, shared):
    assert f.two_inputs(usage(*experts), 1)(np.array(draw)) == pytest.approx(shared)


def test_skew_and_active_experts():
    used = np.array([[[4.0, 0.0]], [[0.0, 2.0]]])  # contexts of 4 and 2 tokens, k = 1
    found = f.skew(used, ["text", "code"])
    assert found["most used expert"](ALL) == pytest.approx(4 / 6)
    assert found["most used expert of one kind of text"](ALL) == 1.0
    ids = [np.zeros((4, 1, 1), int), np.ones((2, 1, 1), int)]
    steps = f.active(ids, used)
    # A random token of a random context uses each expert with probability 0.5.
    assert [steps[f"experts in a decode step of {n}"](ALL) for n in (1, 2, 4)] == [
        0.5,
        0.75,
        0.9375,
    ]
    assert steps["experts in a prompt of 4"](ALL) == 0.5


def test_votes_are_compared_with_as_many_experts_of_the_nearest_layer():
    totals = [{"top 1": (10, 9), "top 2": (20, 14), "MoL K=2 P=2": (15, 12)}] * 2
    found = {name: figure(ALL) for name, figure in f.votes(totals, 2).items()}
    assert found == {
        "nearest layer alone, K = k: utilisation": 0.7,
        "MoL K=2 P=2: utilisation": 0.8,
        # 15 experts of the nearest layer have 11.5 hits.
        "MoL K=2 P=2: over the nearest layer": pytest.approx(0.5 / 15),
    }


@pytest.mark.parametrize(
    ("losses", "k", "best", "ratios"),
    [
        ([[4, 2, 3], [4, 3, 4], [4, 4, 5]], 2, (2, 1), (1.5, 1.5, 2.0)),
        ([[4, 4, 4], [4, 4, 2], [4, 4, 4]], 2, (3, 2), (0.5, 0.5, 2.0)),
    ],
)
def test_the_losses_of_votes(losses, k, best, ratios):
    found = f.vote_losses(np.array([losses, losses], float), k)
    values = [figure(ALL) for figure in found.values()]
    assert values == [*best, *ratios]


def test_searches_over_the_smallest_loss():
    """The climb finds the bottom of the first context's bowl. Algorithm 1 stops elsewhere."""
    p, n = np.mgrid[1:4, 1:9]
    first, second = 1.0 + (p - 1) + (n - 4) ** 2, 1.0 + 2 * (p - 1) + (n - 6) ** 2
    contexts = [np.broadcast_to(each, (600, 3, 8)) for each in (first, second)]
    found = f.search_losses(contexts)
    printed, climb = (figure(np.array([2, 0])) for figure in found.values())
    assert climb == 1.0 < printed
    # Both contexts together are least at K = 5: 2 for both, as everywhere on the way to it more.
    assert [*found.values()][1](np.array([1, 1])) == 1.0


def test_scores_that_predict_an_answer():
    found = f.prompt_and_answer(
        {"P": np.array([0.9, 0.7])},
        {"P": np.array([3.0, 1.0]), "W": np.array([2.0, 2.0])},
        np.array([4.0, 4.0]),
    )
    assert {name: figure(ALL) for name, figure in found.items()} == {
        "cosine with the answer, P": pytest.approx(0.8),
        "answer's uses in the hot quarter, P": 0.5,
        "answer's uses in the hot quarter, W": 0.5,
        "answer's uses, P minus W": 0.0,
    }


@pytest.mark.parametrize(
    ("n", "groups"),
    [
        (2, ["0", "1"]),
        (6, ["0", "1-4", "5"]),
        (8, ["0", "1-4", "5-6", "7"]),
        (30, ["0", "1-4", "5-8", "9-12", "13-16", "17-20", "21-24", "25-28", "29"]),
    ],
)
def test_layers_are_grouped(n, groups):
    found = [f"{each[0]}-{each[-1]}" if len(each) > 1 else f"{each[0]}" for each in layer_groups(n)]
    assert found == groups


def test_sensitivity_over_depth():
    kl = np.outer([9.0, 1.0, 1.0, 1.0, 2.0, 4.0], [1.0, 1.0, 3.0])
    rows = {row["what"]: row["found"] for row in depth_figures(kl, np.array([0, 0, 1]))}
    assert rows["layer 0"] == (15.0, 9.0, 27.0)
    assert rows["layers 1 to 4"][0] == pytest.approx(1.25 * 5 / 3)
    # The layers' ratios are the same in each context, so their intervals are points.
    assert rows["deepest third over middle third"] == pytest.approx((3.0, 3.0, 3.0))
    assert rows["first third over middle third"] == pytest.approx((5.0, 5.0, 5.0))
    assert rows["deepest third over first third"] == pytest.approx((0.6, 0.6, 0.6))
    assert rows["first layer over the largest of the others"] == pytest.approx((2.25, 2.25, 2.25))


def test_rankings_are_compared_with_heavy_hitters():
    scored = [
        (
            SimpleNamespace(group="high / low", row={"retention": 0.75}, label=label),
            SimpleNamespace(text=SimpleNamespace(kl=np.array(kl))),
        )
        for label, kl in ((HITTERS, [1.0, 1.0, 3.0]), (LOAD, [1.5, 1.5, 3.0]))
    ]
    windows = [SimpleNamespace(n_scored=2), SimpleNamespace(n_scored=1)]
    (row,) = Hitters().contrasts(
        SimpleNamespace(scored=scored, on=SimpleNamespace(windows=windows))
    )
    assert row["what"] == f"high / low, r = 0.75: {LOAD}, above hitters"
    assert row["found"] == (pytest.approx(1 / 3), 0.0, 0.5)


def test_mathematics_and_code_are_read_from_their_fields(tmp_path):
    (tmp_path / "eval/gsm8k").mkdir(parents=True)
    (tmp_path / "eval/humaneval").mkdir()
    with lzma.open(tmp_path / "eval/gsm8k/test.jsonl.xz", "wt") as file:
        file.write(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    with gzip.open(tmp_path / "eval/humaneval/HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": "def f():", "canonical_solution": "    pass"}) + "\n")
    found = [judged_documents(tmp_path, name, 100) for name in ("mathematics", "code")]
    assert [each.text for (each,) in found] == ["1 + 1?\n2", "def f():\n    pass"]
    with pytest.raises(ConfigError, match=r"test\.jsonl\.xz is missing: --data names"):
        judged_documents(tmp_path / "none", "mathematics", 100)


def test_only_the_beginnings_of_long_documents_are_read():
    evaluator = SimpleNamespace(tokenize=lambda words: [0, *map(ord, words)], n_ctx=64)
    documents = [Document("a" * n, domain=name) for n, name in ((30, "x"), (4, "x"), (9, "y"))]
    found = Beginnings(window=8, each=1).windows(evaluator, [*documents, *documents])
    assert [(each.domain, len(each.tokens), each.first) for each in found] == [
        ("x", 8, 1),
        ("y", 8, 1),
    ]
    with pytest.raises(ConfigError, match="no document has 64 tokens"):
        Beginnings(window=64).windows(evaluator, documents)
