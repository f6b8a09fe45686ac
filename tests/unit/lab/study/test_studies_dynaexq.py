"""Studies of DynaExq: halves of a text, the share of the loss that is recovered, and fixed hot
sets."""

import numpy as np
import pytest

from orchestrator.config import Config
from orchestrator.lab.eval import EvalOptions
from orchestrator.lab.eval.arithmetic import share
from orchestrator.lab.eval.text import Window
from orchestrator.lab.study.dynaexq import NEVER, Residency
from orchestrator.lab.study.subject import Subject, halves


def window(domain, n_scored):
    return Window(list(range(n_scored + 1)), 1, domain)


def test_each_domain_is_halved_in_the_order_of_the_text():
    windows = [window("a", 10), window("b", 5), window("a", 10), window("a", 10), window("b", 5)]
    windows += [window("a", 10), window("c", 90), window("c", 10)]
    first, second = halves(windows)
    assert first == [windows[i] for i in (0, 1, 2, 6)]
    assert second == [windows[i] for i in (3, 4, 5, 7)]
    assert halves([window("", 1), window("", 100)]) == ([window("", 1)], [window("", 100)])


def test_share_is_a_ratio_of_means_with_a_paired_error():
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


@pytest.fixture
def subject(model, text):
    config = Config.build(model=model, threads=1, ctx=64, ram=1 << 40)
    options = EvalOptions(text=text, tokens=64, window=16)
    return Subject(config, options, lambda what, done: None)


def fixed(subject, n_high, used):
    """Score of the text with a hot set that never changes."""
    settings = Residency(subject).settings(n_high, **NEVER)
    with subject.open(settings, used) as e:
        return subject.score(e, "")


def test_the_hottest_experts_are_resident_and_computed_high(subject):
    scores = subject.random_uses(seed=3)
    with subject.open(Residency(subject).settings(3, **NEVER), scores) as e:
        assert subject.score(e, "").slot_bytes == Residency(subject).budget_bytes(3)
        resident = e.inside.store.resident()
    high = np.sort(np.argsort(-scores, axis=1)[:, :3], axis=1)
    assert [np.flatnonzero(row == 0).tolist() for row in resident] == high.tolist()
    for n_high, tier in ((subject.n_expert, subject.high), (0, subject.low)):
        row = fixed(subject, n_high, None)
        with subject.open(subject.uniform(tier)) as e:
            alone = subject.score(e, "")
        assert np.array_equal(row.text.nll, alone.text.nll)
        assert row.high == (1.0 if n_high else 0.0)


def test_measured_usage_selects_the_hottest_experts(subject):
    found = subject.uses(subject.windows, subject.high)
    assert found.sum(axis=1) == pytest.approx(np.full(subject.n_layers, subject.n_expert_used))
    hottest, coldest = (fixed(subject, 2, used) for used in (found, found.max() - found))
    n_hot = np.sort(found, axis=1)[:, -2:].sum() / found.sum()
    assert hottest.high == pytest.approx(n_hot, abs=0.02)  # routing changes with precision
    assert coldest.high < n_hot
