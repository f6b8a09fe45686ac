"""Votes of several layers on the next one, worked out by hand (FIRM-MoE, eq. 4 to 8)."""

from __future__ import annotations

import pytest

from orchestrator.allocation.look_ahead import PredictionScore
from orchestrator.policy.firm import AGREE_WAYS, agreed, depth_of, every_set, mask_of

# What three layers predict of one, nearest first; four candidates each, best first.
VOTES = [[5, 2, 7, 1], [2, 5, 9, 7], [7, 2, 4, 5]]
SCORES = [0.4, 0.2, 0.1, 0.05]


@pytest.mark.parametrize(
    ("candidates", "layers", "expected"),
    [
        (4, 1, [5, 2, 7, 1]),
        (4, 2, [5, 2, 7]),
        (4, 3, [5, 2, 7]),
        (3, 2, [5, 2]),
        (3, 3, [2]),  # 5 is the third layer's fourth candidate
        (1, 2, []),
        (2, 4, [2]),  # there are three votes
    ],
)
def test_the_layers_meet(candidates: int, layers: int, expected: list[int]) -> None:
    """Eq. 6, in the order of the nearest layer."""
    assert agreed("mol", VOTES, candidates, layers) == expected


def test_the_nearest_layer_alone() -> None:
    assert agreed("rank", VOTES, 3, 3) == [5, 2, 7]
    assert agreed("mol", [], 3, 3) == agreed("rank", [], 3, 1) == agreed("margin", [], 3, 1) == []


@pytest.mark.parametrize(
    ("candidates", "least", "expected"),
    [
        (4, 0.05, [5, 2, 7, 1]),
        (3, 0.05 * 2**0.5, [5, 2, 7]),
        (2, 0.1, [5, 2, 7]),
        (1, 0.1 * 2**0.5, [5, 2]),
    ],
)
def test_a_margin_above_the_last_candidate(
    candidates: int, least: float, expected: list[int]
) -> None:
    assert [each for each, s in zip(VOTES[0], SCORES, strict=True) if s >= least] == expected
    assert agreed("margin", VOTES, candidates, 1, SCORES) == expected


@pytest.mark.parametrize("way", AGREE_WAYS)
def test_every_set_at_once(way: str) -> None:
    depth = depth_of(way, 3)
    assert depth == (3 if way == "mol" else 1)
    for votes in (VOTES, VOTES[:1]):  # as in the second layer, where one has voted
        sets = every_set(way, votes, depth, SCORES)
        assert [[bin(each).count("1") for each in row] for row in sets] == [
            [len(agreed(way, votes, k, p, SCORES)) for k in range(1, 5)]
            for p in range(1, depth + 1)
        ]
        assert sets[-1][2] == mask_of(agreed(way, votes, 3, depth, SCORES))


def test_accuracy_and_utilisation() -> None:
    """Eq. 7 and 8: two of the four in use were expected, and two of the three expected are used."""
    found = PredictionScore(2)
    for layer, expected, used in ((0, [5, 2, 7], [2, 7, 8, 9]), (1, [], [1, 2])):
        found.expect(layer, expected)
        found.observe(layer, used)
    assert found.recall() == [0.5, 0.0]
    assert found.precision() == [pytest.approx(2 / 3), None]
