"""The studies of DynaExq: how a text is divided, the arithmetic of what is won back, and both from
end to end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.lab.eval import EvalOptions
from orchestrator.lab.eval.arithmetic import share
from orchestrator.lab.eval.compare import Reference, ReferencePart
from orchestrator.lab.eval.text import Window
from orchestrator.lab.study.residency import Residency, halves
from orchestrator.lab.study.subject import Subject


def window(domain: str, n_scored: int) -> Window:
    return Window(list(range(n_scored + 1)), 1, domain)


def test_each_domain_is_halved_in_the_order_of_the_text() -> None:
    windows = [window("a", 10), window("b", 5), window("a", 10), window("a", 10), window("b", 5)]
    windows += [window("a", 10), window("c", 90), window("c", 10)]
    first, second = halves(windows)
    assert first == [windows[i] for i in (0, 1, 2, 6)]
    assert second == [windows[i] for i in (3, 4, 5, 7)]
    assert halves([window("", 1), window("", 100)]) == ([window("", 1)], [window("", 100)])


def test_one_window_cannot_be_halved() -> None:
    with pytest.raises(ConfigError, match="the text is one window"):
        halves([window("", 10)])
    with pytest.raises(ConfigError, match="the domain 'b' is one window"):
        halves([window("a", 10), window("b", 10), window("a", 10)])


def test_share_is_a_ratio_of_means_with_a_paired_error() -> None:
    rng = np.random.default_rng(1)
    whole = rng.normal(1.0, 2.0, 4000)
    exact = share(0.25 * whole, whole)
    assert exact.value == pytest.approx(0.25) and exact.error < 1e-12
    repeats = [
        share(0.25 * (draw := rng.normal(1.0, 0.5, 400)) + rng.normal(0, 0.3, 400), draw)
        for _ in range(400)
    ]
    spread = np.std([each.value for each in repeats])
    assert np.mean([each.error for each in repeats]) == pytest.approx(spread, rel=0.15)
    assert np.isnan(share(whole, np.zeros(4000)).value)


def test_a_part_of_a_reference() -> None:
    with Reference(4, 3) as reference:
        reference.rows[:] = np.arange(12).reshape(4, 3)
        part = ReferencePart(reference, np.array([3, 1]))
        assert part.row(0).tolist() == [9, 10, 11] and part.row(1).tolist() == [3, 4, 5]


@pytest.fixture
def subject(model: Path, text: Path) -> Subject:
    config = Config.build(model=model, threads=1, ctx=64, ram=1 << 40)
    options = EvalOptions(text=text, tokens=64, window=16)
    return Subject(config, options, lambda what, done: None)


def test_what_hotness_says_is_high_is_resident_and_computed(subject: Subject) -> None:
    residency = Residency(subject)
    scores = residency.random(seed=3)
    wanted = np.argsort(-scores, axis=1)[:, :3]
    with residency.open(3, scores, update_steps=0) as engine:
        high = [np.flatnonzero(row == 0).tolist() for row in engine.store.resident()]
        assert high == [sorted(row) for row in wanted.tolist()]
        slots = engine.plan.slots
        assert slots is not None and slots.total_bytes == residency.budget_bytes(3)
    n = residency.n_expert
    for n_high, tier in ((n, subject.high), (0, subject.low)):
        row = residency.fixed("", n_high, None)
        alone = subject.score("", subject.uniform(tier))
        assert np.array_equal(row.text.nll, alone.text.nll)
        assert row.usage is not None and row.usage.high == (1.0 if n_high else 0.0)


def test_hotness_is_what_was_routed(subject: Subject) -> None:
    residency = Residency(subject)
    found = residency.hotness(subject.windows)
    per_token = found.sum(axis=1)
    assert per_token == pytest.approx(np.full(residency.shape.n_layers, subject.n_expert_used))
    hottest = residency.fixed("", 2, found)
    coldest = residency.fixed("", 2, found.max() - found)
    n_hot = np.sort(found, axis=1)[:, -2:].sum() / found.sum()
    assert hottest.usage is not None and coldest.usage is not None
    assert hottest.usage.high == pytest.approx(n_hot, abs=0.02)  # routing moves with precision
    assert coldest.usage.high < n_hot


def test_demotion(published) -> None:
    rows = published("demotion").data["tables"][0]["rows"]
    shares = {(row["order"], row["demoted"]): row["routed_high"] for row in rows}
    levels = sorted({demoted for _, demoted in shares})
    assert levels[0] == 0 and len(rows) == 3 * len(levels)
    for level in levels[1:-1]:
        assert shares["cold first", level] > shares["at random", level]
        assert shares["at random", level] > shares["hot first", level]
    for row in rows:
        if row["demoted"] == 0:
            assert row["change"] == [0.0, 0.0] and row["routed_high"] == 1.0
        if row["demoted"] == levels[-1]:
            assert row["routed_high"] == 0.0


def test_memory(published) -> None:
    data = published("memory").data
    titles = [table["title"] for table in data["tables"]]
    assert [title.split(",")[1].split()[0] for title in titles] == ["mixed", "river", "sums"]
    for table in data["tables"]:
        best, high, low, *others = table["rows"]
        alone = [row for row in others if row["configuration"].startswith("all ")]
        assert [row["configuration"] for row in alone] == [
            f"all {name}_k, rtn" for name in ("q3", "q5", "q6")
        ]
        assert low["memory"] < alone[0]["memory"] < high["memory"] < alone[1]["memory"]
        assert low["kl"][0] > alone[0]["kl"][0] > high["kl"][0]
        others = [row for row in others if row not in alone]
        assert best["kl"][0] == pytest.approx(0.0, abs=1e-6)
        assert high["memory"] == 1.0 and high["change"] == [0.0, 0.0]
        assert best["memory"] > 1.0 > low["memory"]
        assert len(others) == 4 * 3
        for row in others:
            assert low["memory"] < row["memory"]
            assert 0 < row["high"] < 1 and 0 < row["routed_high"] < 1
            assert row["ratio_kl"] == pytest.approx(row["won_back_kl"][0] / row["high"])
            gained = (low["kl"][0] - row["kl"][0]) / (low["kl"][0] - high["kl"][0])
            assert row["won_back_kl"][0] == pytest.approx(gained)
        fixed = [row for row in others if "never" in row["configuration"]]
        assert [row["promoted"] for row in fixed] == [0] * 6
