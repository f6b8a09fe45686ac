"""The prefix split of the near-data paper, section 4.2, against all splits one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from orchestrator.allocation.placement import prefix_split
from orchestrator.errors import PolicyError

PAPER = (4, 3, 2, 1)


def loss_of(counts, loss, weights=None):
    """What a split loses: the first experts get the first width."""
    columns = np.repeat(np.arange(len(counts)), counts)
    lost = loss[np.arange(len(loss)), columns]
    return float((lost if weights is None else lost * weights).sum())


def splits(n, widths, budget, most=None):
    """Every split that keeps to the budget and to the slots."""
    for counts in itertools.product(range(n + 1), repeat=len(widths)):
        if sum(counts) != n or sum(c * b for c, b in zip(counts, widths, strict=True)) > budget:
            continue
        if all(c <= m for c, m in zip(counts, most or counts, strict=True)):
            yield counts


@pytest.mark.parametrize("widths", [PAPER, (4, 3, 2), (4, 2, 1), (3, 1), (8, 4, 2), (4,)])
@pytest.mark.parametrize("falling", [True, False])
def test_it_is_the_best_of_all_splits(widths, falling):
    random = np.random.default_rng(len(widths))
    for n in range(1, 7):
        loss = random.random((n, len(widths)))
        if falling:
            loss.sort(axis=1)
        for budget in range(n * widths[-1], n * widths[0] + 2):
            every = list(splits(n, widths, budget))
            for weights in (None, np.sort(random.random(n))[::-1]):
                found = prefix_split(loss, widths, budget, weights)
                assert found in every
                least = min(loss_of(each, loss, weights) for each in every)
                assert loss_of(found, loss, weights) == pytest.approx(least, abs=1e-12)


def test_slots_limit_the_split():
    random = np.random.default_rng(5)
    loss = np.sort(random.random((5, 4)), axis=1)
    for most in itertools.product((1, 2, 5), repeat=4):
        every = list(splits(5, PAPER, 12, most))
        if not every:
            with pytest.raises(PolicyError, match="5 experts"):
                prefix_split(loss, PAPER, 12, most=most)
            continue
        found = prefix_split(loss, PAPER, 12, most=most)
        assert found in every
        assert loss_of(found, loss) == pytest.approx(min(loss_of(each, loss) for each in every))


def test_too_few_bits_are_an_error():
    with pytest.raises(PolicyError, match="cannot keep to 11 bits"):
        prefix_split(np.ones((6, 2)), (4, 2), 11)
    with pytest.raises(PolicyError, match="falling"):
        prefix_split(np.ones((6, 2)), (2, 4), 24)


def test_no_cold_expert_is_no_split():
    assert prefix_split(np.zeros((0, 4)), PAPER, 0) == (0, 0, 0, 0)
