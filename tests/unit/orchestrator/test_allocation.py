"""Bit allocation on convex hulls: the best of all choices at its break points."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.allocation.hull import Hull, lost
from orchestrator.allocation.placement import IMPORTANCE, PlacementSettings, place
from orchestrator.errors import BudgetError

SIZES = np.array([[9, 5, 4, 2], [8, 6, 3, 1]])


def taken(tiers: np.ndarray, sizes: np.ndarray) -> int:
    return int(np.take_along_axis(sizes, tiers.astype(np.int64), axis=1).sum())


# Every choice of a tier for each of six experts.
CHOICES = np.array(list(product(range(4), repeat=6)))


def every(of_expert: np.ndarray) -> np.ndarray:
    """What each of CHOICES sums up to. of_expert [6, 4]."""
    total: np.ndarray = of_expert[np.arange(6), CHOICES].sum(axis=1)
    return total


def bound(hull: Hull, n_bytes: float) -> float:
    """The least loss in so many bytes, were experts divisible."""
    return float(np.interp(n_bytes, hull.n_bytes, hull.loss))


@given(st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_nothing_is_better_at_the_break_points(seed: int) -> None:
    """All 4^6 choices are tried; losses that do not fall with the tier are among them. Between the
    break points no choice is below the bound, and the allocation within the budget is no worse than
    the break point below."""
    rng = np.random.default_rng(seed)
    losses = rng.random((2, 3, 4)) ** 3
    if seed % 2:
        losses = np.sort(losses, axis=2)
    hull = Hull(losses, SIZES)
    bytes_of, loss_of = every(np.repeat(SIZES, 3, axis=0)), every(losses.reshape(6, 4))

    def best(budget: int) -> float:
        return float(loss_of[bytes_of <= budget].min())

    assert (np.diff(hull.n_bytes) > 0).all() and (np.diff(hull.loss) < 0).all()
    for n_bytes, loss in zip(hull.n_bytes.tolist(), hull.loss.tolist(), strict=True):
        tiers = hull.at(n_bytes)
        assert taken(tiers, SIZES) == n_bytes
        assert lost(losses, tiers) == pytest.approx(loss)
        assert best(n_bytes) == pytest.approx(loss)
    budget = int(rng.integers(hull.least_bytes, hull.n_bytes[-1] + 5))
    tiers = hull.at(budget)
    below = hull.loss[hull.n_bytes <= budget][-1]
    assert taken(tiers, SIZES) <= budget
    assert bound(hull, budget) - 1e-12 <= best(budget)
    assert best(budget) <= lost(losses, tiers) + 1e-12 <= below + 2e-12


def test_what_is_left_goes_to_later_edges() -> None:
    """The steepest edge that does not fit is passed by, with those behind it of the same expert."""
    losses = np.array([[[0.0, 8.0, 9.0], [0.0, 0.5, 4.0]]])
    sizes = np.array([[9, 4, 1]])
    hull = Hull(losses, sizes)
    assert hull.at(2).tolist() == [[2, 2]]
    assert hull.at(5).tolist() == [[2, 1]]  # 3.5 for 3 bytes
    assert hull.at(9).tolist() == [[2, 1]]
    assert hull.at(10).tolist() == [[2, 0]]  # 9 for 8 do not fit, 0.5 for 5 do
    assert hull.at(13).tolist() == [[0, 1]]
    assert hull.at(1 << 40).tolist() == [[0, 0]]
    assert bound(hull, 8.5) == pytest.approx(9.5 - 9 * 3.5 / 8)
    with pytest.raises(BudgetError, match="needs 2 bytes"):
        hull.at(1)


@pytest.mark.parametrize("n_bits", [40, 46, 53, 64])
def test_one_layer_and_nominal_bits_are_no_worse_than_a_prefix_split(n_bits: int) -> None:
    """And at a break point as good: with losses alike the best choice is a prefix split."""
    bits = [4, 3, 2]
    rng = np.random.default_rng(n_bits)
    scores = rng.random((1, 16)) ** 2
    losses = np.broadcast_to(0.25 ** np.array(bits, float), (1, 16, 3))
    hull = Hull(scores[..., None] * losses, np.array([bits]))
    n_bits = int(hull.n_bytes[hull.n_bytes <= n_bits][-1])
    asked = PlacementSettings(near_bits=n_bits / 16, near_weights=IMPORTANCE)
    split = place(scores, 0, losses, bits, asked) - 1
    weighted = scores[..., None] * losses
    assert lost(weighted, hull.at(n_bits)) == pytest.approx(lost(weighted, split))
