"""Each registered study runs from end to end on a small random model, and its figures are
plausible."""

from collections.abc import Callable
from typing import Any

import pytest

Rows = list[dict[str, Any]]
HIGH, LOW, BEST = "q4_k", "q2_k", "q8_0"


def by(rows, *keys):
    """Rows by the values of these columns."""
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
        placed = [row for row in others if row["configuration"].startswith("--policy dynaexq")]
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
        fixed = [row for row in placed if "fixed" in row["configuration"]]
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
        label = "hot experts chosen by prompt and usage profile, all others in the same precision"
        uniform = found[name, 2, label]
        assert 0 < uniform["kl"][0] < found[name, 2, f"all in {LOW}"]["kl"][0]
        assert uniform["above"] is None and uniform["hot"] == 2
        for form in ("prompt and usage profile", "usage profile alone", "random"):
            assert found[name, 3, form]["kl"][0] < found[name, 2, form]["kl"][0]
    assert len(asked) == 1 + 4 + 3 and all(0 <= row["acc"][0] <= 1 for row in asked)


KNOWN: dict[str, Callable[..., None]] = {
    each.__name__.replace("_", "-"): each
    for each in (
        *(accuracy, retention, critical, depth, similarity),
        *(demotion, memory, equal, context, near_bits),
    )
}


@pytest.mark.parametrize("name", [*KNOWN, "votes"])
def test_a_study_runs_and_its_figures_are_possible(found, name):
    made = found(name)
    assert made.tables and made.panels
    for table in made.tables:
        assert table["rows"]
        assert " layers, " in table["title"] and table["title"].endswith("measured once")
        for row in table["rows"]:
            check_quality(row)
    if made.passes.total:
        assert made.passes.begun == made.passes.total
        assert (
            f"The text is read {made.passes.total} times, at most {made.tokens} tokens each time"
            in made.said
        )
    else:
        assert made.passes.begun <= 1
    if name in KNOWN:
        KNOWN[name](*(table["rows"] for table in made.tables))


def check_quality(row):
    """In each row KL comes before perplexity, both have an error, and shares are between 0 and
    1."""
    if "perplexity" in row:
        assert list(row).index("kl") < list(row).index("perplexity")
        (kl, kl_error), (perplexity, error) = row["kl"], row["perplexity"]
        assert kl > -1e-6 and kl_error >= 0 and perplexity > 1 and error > 0
        assert 0 <= row["top1"][0] <= 1
    usage = row.get("usage") or {}
    shares = [usage.get(key) for key in ("high", "low", "skip", "computed_low", "hit_rate")]
    shares += [row.get("realised"), row.get("routed_high")]
    assert all(0 <= share <= 1 for share in shares if share is not None)
