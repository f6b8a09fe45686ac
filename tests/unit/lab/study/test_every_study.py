"""Each study of the registry, once from end to end on a small random model: that its figures are
possible ones, and what they must be for this study."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gguf_tools.errors import MismatchError
from orchestrator.config import Config
from orchestrator.errors import BudgetError
from orchestrator.lab.calibrate import within
from orchestrator.lab.eval import EvalOptions
from orchestrator.lab.registry import STUDIES
from orchestrator.lab.study import uniform
from orchestrator.lab.study.activations import ActivationRecorder
from orchestrator.lab.study.uniform import UniformTypes, tiers_of

Rows = list[dict[str, Any]]
HIGH, LOW, BEST = "q4_k", "q2_k", "q8_0"


def by(rows, *keys):
    """The rows by what these figures of theirs are."""
    return {tuple(row[key] for key in keys): row for row in rows}


def accuracy(uniform, mixed):
    sizes = [row["bytes"] for row in uniform]
    assert sizes == sorted(set(sizes))
    q2, q4, q8 = (row["kl"][0] for row in uniform)
    assert q2 > q4 > q8 == pytest.approx(0.0, abs=1e-6)
    assert uniform[-1]["top1"][0] == 1.0
    assert len(mixed) == 6
    for row in mixed:
        whole = row["retention"] == 1.0
        assert (row["kl"][0] == q4) == whole and (row["change"] == [0.0, 0.0]) == whole
        assert (row["usage"]["high"] == 1) == whole
        assert 0 <= row["acc"][0] <= 1


def retention(rows):
    found = by(rows, "configuration", "retention")
    high = found[HIGH, None]["kl"]
    for low in ("skip", LOW):
        least, most = (found[f"{HIGH} / {low}", r] for r in (0.6, 1.0))
        assert least["kl"][0] > most["kl"][0] and most["kl"] == high
        assert least["realised"] == pytest.approx(0.6, abs=0.1)
    assert all(0 <= row["acc"][0] <= 1 for row in rows)


def critical(*tables):
    assert len(tables) == 4
    for rows in tables:
        found = by(rows, "configuration", "retention")
        for (kind, r), row in found.items():
            assert row["kl"][0] > 0
            if r == 0.9:
                assert row["kl"][0] < found[kind, 0.6]["kl"][0]
    skipped = by(tables[0], "configuration", "retention")
    for r in (0.6, 0.75, 0.9):
        by_gate, by_chance = (
            skipped[f"{kind}, depth-based", r] for kind in ("gate score", "random")
        )
        assert by_gate["usage"]["skip"] == pytest.approx(by_chance["usage"]["skip"])


def depth(rows):
    assert [row["layer"] for row in rows] == list(range(len(rows)))
    assert all(row["kl"][0] > 1e-4 for row in rows)


def similarity(alike, ahead):
    assert len(alike) == len(ahead) > 0
    for row in (*alike, *ahead):
        shares = [value[0] for value in row.values() if isinstance(value, list)]
        assert shares and all(-1 <= share <= 1 for share in shares if share is not None)


def demotion(rows):
    found = by(rows, "order", "demoted")
    none, every = (found["cold first", demoted] for demoted in (0, 8))
    assert none["change"] == [0.0, 0.0] and none["routed_high"] == 1.0
    assert every["kl"][0] > found["cold first", 4]["kl"][0] > none["kl"][0]
    for order in ("at random", "hot first"):
        assert found[order, 0]["kl"] == none["kl"] and found[order, 8]["kl"] == every["kl"]
        assert found[order, 8]["routed_high"] == 0.0
    for level in range(1, 8):
        cold, random, hot = (
            found[order, level]["routed_high"] for order in ("cold first", "at random", "hot first")
        )
        assert cold > random > hot


def memory(*tables):
    assert len(tables) == 3
    for best, high, low, *others in tables:
        placed = [row for row in others if row["configuration"].startswith("dynaexq")]
        alone = [row for row in others if row not in placed]
        assert [row["configuration"] for row in alone] == [
            f"{name}_k, rtn" for name in ("q3", "q5", "q6")
        ]
        assert low["memory"] < alone[0]["memory"] < high["memory"] < alone[1]["memory"]
        assert high["memory"] == 1.0 < best["memory"]
        assert low["kl"][0] > alone[0]["kl"][0] > high["kl"][0]
        assert best["kl"][0] == pytest.approx(0.0, abs=1e-6) and high["change"] == [0.0, 0.0]
        assert len(placed) == 4 * 3
        for row in placed:
            assert low["memory"] < row["memory"]
            assert 0 < row["high"] < 1 and 0 < row["routed_high"] < 1
            assert row["ratio"] == pytest.approx(row["won_back"][0] / row["high"])
            gained = (low["kl"][0] - row["kl"][0]) / (low["kl"][0] - high["kl"][0])
            assert row["won_back"][0] == pytest.approx(gained)
        fixed = [row for row in placed if "never" in row["configuration"]]
        assert [row["promoted"] for row in fixed] == [0] * 6


def equal(uniform, *memories):
    alone = by(uniform, "configuration")
    low = alone[f"{LOW}, random",]["kl"]
    fits = []
    for *rivals, mix in memories:
        assert mix["configuration"].startswith("dynaexq") and mix["above"] is None
        for row in rivals:
            assert row["above"][0] == pytest.approx(row["kl"][0] - mix["kl"][0], abs=1e-9)
        fits.append([row["configuration"] for row in rivals])
    least = memories[0][-1]
    assert least["kl"] == pytest.approx(low) and least["usage"]["computed_low"] == 1.0
    assert fits[0] == ["uniform q2_k, random"] and "uniform q3_k, rtn" in fits[-1]
    assert not any("q5_k" in name or "q8_0" in name for names in fits for name in names)


def context(rows, layers):
    found = by(rows, "by")
    assert found["answer",]["cosine"] == pytest.approx(1.0)
    assert found["answer",]["mass"] == max(row["mass"] for row in rows)
    assert layers


def near_bits(judged, asked):
    found = by(judged, "domain", "bits", "configuration")
    for name in {row["domain"] for row in judged}:
        assert found[name, None, f"all in {BEST}"]["kl"][0] == pytest.approx(0.0, abs=1e-6)
        uniform = found[name, 2, "prompt and profile, uniform bits"]
        assert 0 < uniform["kl"][0] < found[name, 2, f"all in {LOW}"]["kl"][0]
        assert uniform["above"] is None and uniform["hot"] == 2
        for form in ("prompt and profile", "profile alone", "random"):
            assert found[name, 3, form]["kl"][0] < found[name, 2, form]["kl"][0]
    assert len(asked) == 1 + 4 + 3 and all(0 <= row["acc"][0] <= 1 for row in asked)


KNOWN: dict[str, Callable[..., None]] = {
    each.__name__.replace("_", "-"): each
    for each in (
        *(accuracy, retention, critical, depth, similarity),
        *(demotion, memory, equal, context, near_bits),
    )
}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_runs_and_its_figures_are_possible(published, name):
    found = published(name)
    assert (found.folder / f"{name}.png").read_bytes()[1:4] == b"PNG"
    assert (found.folder / f"{name}.svg").read_text().lstrip().startswith("<?xml")
    assert (found.folder / f"{name}.md").read_text() == found.shown
    assert found.data["study"] == name and found.data["tables"]
    for table in found.data["tables"]:
        assert table["rows"]
        assert " layers, " in table["title"] and table["title"].endswith("one run")
        for row in table["rows"]:
            check_quality(row)
    if found.passes.total:
        assert found.passes.begun == found.passes.total
        assert f"{found.passes.total} passes over up to {found.data['tokens']} tokens" in found.said
    else:
        assert found.passes.begun <= 1
    if name in KNOWN:
        KNOWN[name](*(table["rows"] for table in found.data["tables"]))


def check_quality(row):
    """A row that has a perplexity has the distance from the best tier first, and both with their
    error; what is a share is one."""
    if "perplexity" in row:
        assert list(row).index("kl") < list(row).index("perplexity")
        (kl, kl_error), (perplexity, error) = row["kl"], row["perplexity"]
        assert kl > -1e-6 and kl_error >= 0 and perplexity > 1 and error > 0
        assert 0 <= row["top1"][0] <= 1
    usage = row.get("usage") or {}
    shares = [usage.get(key) for key in ("high", "low", "skip", "computed_low", "hit_rate")]
    shares += [row.get("realised"), row.get("routed_high")]
    assert all(0 <= share <= 1 for share in shares if share is not None)


def test_hot_memory(study_on, domains, tmp_path):
    options = ["--window=24", "--prompt-tokens=8", "--uniform=q3_k", "--near-bits=2"]
    result = study_on("memory", domains, tmp_path, *options)
    assert result.exit_code == 0, result.output
    for table in json.loads((tmp_path / "memory.json").read_text())["tables"]:
        _best, _high, low, *others = table["rows"]
        placed = [row for row in others if row["configuration"].startswith("context")]
        assert [row["high"] for row in placed] == [0.25, 0.5, 0.75] * 2
        by_memory = {row["memory"] for row in others if row["configuration"].startswith("dynaexq")}
        assert {row["memory"] for row in placed} == by_memory
        for row in placed:
            assert 0 < row["routed_high"] < 1 and row["kl"][0] < low["kl"][0]
            assert row["ratio"] == pytest.approx(row["won_back"][0] / row["high"])
        assert any(row["promoted"] > 0 for row in placed)


TOKENS = list(range(20, 60))


def test_activations_are_the_same_within_a_cap(library, model):
    with ActivationRecorder(model, len(TOKENS), 1) as whole:
        found = whole.read(TOKENS)
    with ActivationRecorder(model, len(TOKENS), 1, ram=100 << 20) as capped:
        assert capped._observer._within is not None
        again = capped.read(TOKENS)
    assert found.keys() == again.keys()
    assert all((found[key] == again[key]).all() for key in found)


@pytest.mark.parametrize("name", ["similarity", "votes", "context"])
def test_a_study_that_reads_keeps_to_the_cap(study_on, domains, tmp_path, monkeypatch, name):
    rooms = []

    def too_small(path, n_ctx, threads, room):
        rooms.append(room)
        raise BudgetError("as it says there")

    monkeypatch.setattr(within, "load_within", too_small)
    options = ["--window=16", "--max-tokens=48", "--ram=100MiB"]
    result = study_on(name, domains, tmp_path / "out", *options)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "Error: as it says there")
    (room,) = rooms
    assert room.ram == 100 << 20 and room.own > 0 and "study" in room.use


def types(model, **options):
    return UniformTypes(Config.build(model=model, threads=1), EvalOptions(**options))


def test_types_are_made_one_at_a_time_and_files_are_taken_as_they_are(model, tmp_path, monkeypatch):
    monkeypatch.setattr(uniform, "spill_folder", lambda: tmp_path)
    calib = tmp_path / "calib.txt"
    calib.write_text("The fox sat by the river and looked at the stars. " * 40)
    asked = types(model, uniform=("iq2_xxs", "q4_k", "q3_k", str(model)), calib=calib)
    assert "5 million weights are quantized 4 times (iq2_xxs, q3_k, q4_k)" in (asked.cost() or "")
    found = []
    for each in asked.files(lambda what, done: None):
        assert each.path.exists()
        assert len(list(tmp_path.glob("*/*.gguf"))) == (each.path != model)
        found.append((each.label, round(each.bits, 2)))
    assert found == [
        ("q8_0, random", 8.5),
        ("iq2_xxs, imatrix", 2.06),
        ("q3_k, rtn", 3.44),
        ("q3_k, imatrix", 3.44),
        ("q4_k, imatrix", 4.5),
    ]
    assert list(tmp_path.iterdir()) == [calib]


def test_the_usual_types_are_those_below_the_best_tier(model):
    assert "3 times (q3_k, q5_k, q6_k)" in (types(model).cost() or "")
    assert types(model, uniform=("none",)).cost() is None
    sizes = tiers_of(Config.build(model=model))
    assert [each.bits for each in sizes.values()] == [8.5, 4.5, 2.625]


def test_a_file_of_another_model_is_no_rival(model, tiny_model):
    other = tiny_model("qwen3moe", "q8_0", "q2_k", seed=2)
    with pytest.raises(MismatchError, match="not the model of"):
        types(model, uniform=(str(other),))
