"""Statistics of evaluation, compared with their definitions."""

import math

import numpy as np
import pytest

from orchestrator.lab.eval import arithmetic
from orchestrator.runtime.evaluator import log_softmax


def softmax(logits):
    e = np.exp(logits.astype(np.float64))
    return e / e.sum()


def test_log_softmax_is_the_log_of_softmax_and_survives_large_logits():
    logits = np.random.default_rng(1).normal(0, 5, (4, 50)).astype(np.float32)
    expected = np.log([softmax(row) for row in logits])
    assert np.allclose(log_softmax(logits), expected, atol=1e-9)
    large = log_softmax(np.array([1000.0, 999.0, -1000.0], np.float32))
    assert np.isfinite(large).all()
    assert large[0] == pytest.approx(-math.log1p(math.exp(-1)))


def test_perplexity_of_a_fair_die_is_six():
    nll = np.full(100, math.log(6))
    found = arithmetic.perplexity(nll)
    assert found.value == pytest.approx(6)
    assert found.error == pytest.approx(0, abs=1e-12)


def test_the_error_of_a_perplexity_is_that_of_repeated_samples():
    rng = np.random.default_rng(2)
    samples = rng.normal(2.0, 0.5, (4000, 400))
    spread = np.std([arithmetic.perplexity(row).value for row in samples])
    assert arithmetic.perplexity(samples[0]).error == pytest.approx(spread, rel=0.15)


def test_a_change_is_paired():
    base = np.random.default_rng(3).normal(3, 2, 500)
    found = arithmetic.change(base + math.log(1.02), base)
    assert found.value == pytest.approx(0.02)
    assert found.error == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match="500"):
        arithmetic.change(base[:-1], base)


def test_kl_divergence_is_the_definition():
    rng = np.random.default_rng(4)
    p, q = softmax(rng.normal(size=30)), softmax(rng.normal(size=30))
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert arithmetic.kl_divergence(np.log(p), np.log(q)) == pytest.approx(expected)
    assert arithmetic.kl_divergence(np.log(p), np.log(p)) == 0
    certain = np.array([0.0, -np.inf])
    assert arithmetic.kl_divergence(certain, np.log([0.5, 0.5])) == pytest.approx(math.log(2))


def test_no_and_one_value_have_no_error():
    assert math.isnan(arithmetic.mean(np.array([])).value)
    one = arithmetic.mean(np.array([3.0]))
    assert one.value == 3 and math.isnan(one.error)
