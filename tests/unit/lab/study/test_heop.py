"""FIRM-MoE's loss and its search, offline: against counts by hand."""

import numpy as np
import pytest

from orchestrator.lab.study.activations import ROUTER_INPUT, ROUTER_LOGITS
from orchestrator.lab.study.heop import (
    DEEPEST,
    OUR_STEPS,
    PAPER_STEPS,
    Losses,
    as_printed,
    climbed,
    searches,
)


def test_the_loss_counts_what_is_read_for_nothing_and_what_is_waited_for():
    """Two layers, four experts, one of them used; the cache of a layer holds one."""
    found = Losses(2, 4, 1, slots=1)
    assert found.most == 2
    router = np.eye(4)
    # For three tokens, layer 1 uses 0, 0, 1; layer 0 predicts 0 before 2, 3 before 0, 2 before 1.
    x = np.array([[4.0, 0, 3, 0], [3, 0, 0, 4], [0, 3, 4, 0]])
    logits = np.eye(4)[[0, 0, 1]]
    read = {
        (ROUTER_INPUT, 5): x,
        (ROUTER_LOGITS, 5): np.eye(4)[[0, 0, 0]],
        (ROUTER_LOGITS, 7): logits,
    }
    found.count(read, [5, 7], [None, router])
    (group,) = found.groups
    losses = found.of(group)
    assert losses.shape == (3, DEEPEST, 2)
    assert (losses == losses[:, :1]).all()  # one layer votes
    # Token 0, nothing cached: K = 1 names 0, which is used; K = 2 also 2, in vain.
    assert losses[0, 0].tolist() == [0.0, 0.5]
    # Token 1, 0 is cached: K = 1 names 3, in vain; 0 is not read. K = 2 names 3 and 0.
    assert losses[1, 0].tolist() == [0.5, 0.5]
    # Token 2: K = 1 names 2, in vain, and 1 is waited for; K = 2 names both.
    assert losses[2, 0].tolist() == [1.0, 0.5]


def bowl(n, k, p):
    """Losses of n tokens with the smallest at K = k and P = p, of 4 layers and 8 candidates."""
    at = [[abs(a - k) + abs(b - p) + 1.0 for a in range(1, 9)] for b in range(1, 5)]
    return np.repeat(np.array(at)[None], n, axis=0)


def test_our_climb_finds_the_smallest_loss_of_a_bowl():
    losses = bowl(40 * OUR_STEPS, 3, 1)
    assert climbed(losses) == (3, 1)
    ratios = {each.way: each.ratio for each in searches(losses)}
    compared = ratios["all combinations of K (experts per prediction) and P (predicting layers)"]
    assert ratios["our climb"] == compared == 1.0
    assert min(ratios.values()) == 1.0 and len(ratios) == 6


def test_the_printed_search_averages_over_all_that_it_visited():
    """Downwards from 8, 4 along K the mean of the history falls to the end, which is the border."""
    assert as_printed(bowl(3 * PAPER_STEPS, 1, 4), 0, -1) == (6, 4)
    assert as_printed(bowl(12 * PAPER_STEPS, 1, 4), 0, -1) == (1, 4)
    # Upwards there is nothing: after two intervals without gain it turns, and goes along P.
    assert as_printed(bowl(5 * PAPER_STEPS, 8, 1), 0, 1)[0] == 8
    assert as_printed(bowl(5, 3, 3), 0, 1) == (8, 4)


@pytest.mark.parametrize("k", [1, 8])
def test_all_pairs_are_searched(k):
    found = searches(bowl(64, k, 2))[-1]
    assert found.votes == (k, 2) and found.ratio == 1.0
