"""The cosine schedule (DyMoE eq. 4-5) and its solution for a user's retention."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.allocation.critical import falling
from orchestrator.errors import ConfigError
from orchestrator.policy.dymoe import critical_counts, realised, solve

# Eq. 4 and 5 worked out by hand: lambda, r(l) of each layer, M, t_l of each layer. The cosines of
# 5 layers are 1, sqrt(1/2), 0, -sqrt(1/2), -1; those of 7 layers 1, sqrt(3)/2, 1/2, 0 and back;
# those of 4 layers 1, 1/2, -1/2, -1. Where r(l) * M is whole, the ceiling leaves it alone.
BY_HAND = [
    (0.5, [1.0, 0.9267766953, 0.75, 0.5732233047, 0.5], 8, [8, 8, 6, 5, 4]),
    (0.0, [1.0, 0.8535533906, 0.5, 0.1464466094, 0.0], 8, [8, 7, 4, 2, 1]),
    (
        0.2,
        [1.0, 0.9464101615, 0.8, 0.6, 0.4, 0.2535898385, 0.2],
        10,
        [10, 10, 8, 6, 4, 3, 2],
    ),
    (0.25, [1.0, 0.8125, 0.4375, 0.25], 16, [16, 13, 7, 4]),
    (1.0, [1.0, 1.0, 1.0], 6, [6, 6, 6]),
    (0.3, [1.0, 0.3], 4, [4, 2]),
]

LAYERS = st.integers(2, 64)
EXPERTS = st.integers(1, 16)
SHARES = st.floats(0.0, 1.0)


@pytest.mark.parametrize(("lam", "r", "m", "t"), BY_HAND)
def test_the_schedule_is_the_papers(lam: float, r: list[float], m: int, t: list[int]) -> None:
    """r(l) = (1 - lambda) * (cos(pi * l / (L - 1)) + 1) / 2 + lambda, and t_l = ceil(r(l) * M);
    the one layer of lambda = 0 whose t_l is 0 keeps one expert, as we state."""
    assert [(1 - lam) * c + lam for c in falling("cosine", len(r))] == pytest.approx(r, abs=1e-9)
    assert critical_counts(lam, len(r), m) == t


@given(
    SHARES | st.just(1.0),
    st.integers(2, 24),
    st.integers(1, 8),
    st.sampled_from(["cosine", "linear", "flat"]),
)
def test_the_solution_is_the_nearest_there_is(
    retention: float, n_layers: int, m: int, schedule: str
) -> None:
    counts = solve(retention, n_layers, m, schedule)
    error = abs(realised(counts, m) - retention)
    for other in np.linspace(0, 1, 401):
        mean = realised(critical_counts(float(other), n_layers, m, schedule), m)
        assert error <= abs(mean - retention) + 1e-9
    assert retention < 1.0 or counts == [m] * n_layers


def test_shapes_of_the_schedules() -> None:
    assert falling("linear", 3) == [1.0, 0.5, 0.0]
    assert falling("flat", 5) == [0.0] * 5
    cosine, linear = falling("cosine", 9), falling("linear", 9)
    assert all(a > b for a, b in zip(cosine[1:4], linear[1:4], strict=True))  # the slow start
    with pytest.raises(ConfigError, match="cosine, linear, flat"):
        falling("steep", 3)


@pytest.mark.parametrize(
    ("retention", "count"), [(0.0, 1), (0.25, 1), (0.5, 2), (0.75, 3), (1.0, 4)]
)
def test_one_layer_keeps_the_share(retention: float, count: int) -> None:
    assert solve(retention, 1, 4) == [count]
