"""Figures of the routing, by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from orchestrator.lab.study.routing import (
    Routes,
    active_in_decode,
    active_in_prefill,
    changes,
    concentration,
    hot_overlap,
    loads,
    sorted_shares,
)

# One layer of four experts, two for each token.
ONE = Routes("a", np.array([[[0, 1]], [[1, 2]], [[1, 2]], [[0, 3]]]), 4)
TWO = Routes("b", np.array([[[2, 3]], [[2, 3]]]), 4)


def test_counts_and_their_concentration():
    assert ONE.counts().tolist() == [[2.0, 3.0, 2.0, 1.0]]
    assert concentration(ONE.counts(), 0.25) == 3 / 8
    assert concentration(ONE.counts(), 0.01) == 3 / 8  # at least one expert
    assert sorted_shares(ONE.counts()).tolist() == [3 / 8, 2 / 8, 2 / 8, 1 / 8]
    assert hot_overlap(ONE.counts(), TWO.counts(), 2) == [0.0]
    assert hot_overlap(ONE.counts(), ONE.counts(), 2) == [1.0]


def test_experts_that_are_used_again():
    (one,) = changes([ONE], (1,))
    assert one.kept == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    # Shares of tokens 1/2, 3/4, 1/2, 1/4: their squares over two experts of a token.
    assert one.by_use == pytest.approx((1 / 4 + 9 / 16 + 1 / 4 + 1 / 16) / 2)
    assert one.uniform == 0.5
    assert changes([ONE], (9,)) == []


def test_experts_that_are_active_together():
    assert active_in_decode([TWO], 1) == 0.5
    assert active_in_decode([TWO, TWO], 2) == 0.5
    assert active_in_prefill([ONE], 1, 1) == 0.5
    assert active_in_prefill([ONE], 1, 4) == active_in_prefill([ONE, TWO], 2, 4) == 1.0


def test_loads_of_heavy_hitters_and_of_random_tokens():
    ids = np.array([[0, 1], [0, 2], [3, 1], [0, 3]])
    scores = np.array([0.1, 0.5, 0.9, 0.2], np.float32)
    prompt = SimpleNamespace(layer=3, ids=ids, importance=scores)
    answer = SimpleNamespace(layer=3, ids=ids[:1], importance=scores[:1])
    unknown = SimpleNamespace(layer=3, ids=ids, importance=None)
    trace = SimpleNamespace(
        n_expert=4, steps=lambda: [SimpleNamespace(events=[prompt, unknown, answer])]
    )
    (load,) = loads(trace, 0.5, draws=5)
    assert load.layer == 3 and load.total.tolist() == [3, 2, 1, 2]
    assert load.heavy.tolist() == [1, 1, 1, 1]  # tokens 1 and 2
    assert load.random.shape == (5, 4) and set(load.random.sum(axis=1)) == {4}
    assert (load.random <= load.total).all()
