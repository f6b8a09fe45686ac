"""How many candidates and layers vote, worked out by hand (FIRM-MoE, eq. 11 and Algorithm 1)."""

from __future__ import annotations

import pytest

from orchestrator.policy.heop import Climb, Grid, Tuner, Weights, group_of, unused_and_missed
from orchestrator.policy.votes import every_set, mask_of

HALF = Weights()


def test_groups() -> None:
    """Five shallow and four deep of sixteen, as in Figure 6; at least one that can be predicted."""
    assert group_of(16) == [0] * 5 + [1] * 7 + [2] * 4
    assert group_of(8) == [0, 0, 0, 1, 1, 1, 2, 2]
    assert group_of(4) == [0, 0, 1, 2]
    assert group_of(3) == [0, 0, 2]
    assert group_of(2) == [0, 0]


def test_the_loss_of_one_layer() -> None:
    """S = 1 2 3 4, A = 3 4 5 6, and 2, 4, 5 are in memory. 1 is read for nothing, 3 is of use; 5
    and 6 are missed and 5 is a hit: L = 0.5 * 1 + 0.5 * (2 - 1)."""
    absent = mask_of([1, 3, 6])
    assert unused_and_missed(mask_of([1, 2, 3, 4]), mask_of([3, 4, 5, 6]), absent) == (1, 1)
    assert HALF.loss(1, 1) == 1.0
    assert Weights(2.0, 0.25).loss(1, 4) == 3.0


def test_every_pair_is_counted_on_the_same_tokens() -> None:
    """Nothing is in memory, and 5 and 2 are used. K = 1: 5 is right, 2 missed. P = 2 loses 5 at
    K = 1 and 7 at K = 3."""
    grid = Grid(3, 2, HALF)
    sets = every_set("mol", [[5, 7, 2], [2, 5, 9]], 2)
    grid.count(sets, mask_of([5, 2]), mask_of(range(10)))
    assert grid.means() == [[0.5, 1.0, 0.5], [1.0, 0.5, 0.0]]
    assert grid.best() == (3, 2)
    grid.count(sets, mask_of([7, 5]), mask_of(range(10)))  # mean of two tokens
    assert grid.means() == [[0.5, 0.5, 0.5], [1.0, 0.5, 0.5]]
    assert grid.best() == (1, 1)  # of equals that with the fewest layers and candidates


def climbed(losses: dict[tuple[int, int], int], n: int, k: int = 4, depth: int = 3) -> list:
    """Where a climb is after each of n updates, over losses in tenths."""
    climb = Climb(k, depth, patience=1, weights=Weights(1.0, 1.0))
    path = []
    for _ in range(n):
        climb.update(losses[climb.at], 0, 10)
        path.append(climb.at)
    return [*path, climb.best()]


def test_climbing_down_one_axis_and_then_the_other() -> None:
    """P falls while that gains, turns at its end, and turns again where that does not gain: K has
    its turn, from the best. So the plane is explored, of which Algorithm 1 as printed reaches one
    direction of each axis."""
    losses = {(k, p): abs(k - 3) + 2 * p for k in range(1, 5) for p in range(1, 4)}
    path = climbed(losses, 7)
    assert path[:2] == [(4, 2), (4, 1)]  # 7, 5 and 3
    assert path[2:4] == [(4, 2), (4, 1)]  # up from the end of the axis, and back at the best
    assert path[4:6] == [(3, 1), (2, 1)]  # which lose 2 and 3
    assert path[6:] == [(3, 1), (3, 1)]  # back at the best, which is the result


def test_a_step_out_of_range_is_a_turn() -> None:
    flat = {(1, 1): 5, (2, 1): 5}
    path = climbed(flat, 6, k=2, depth=1)
    assert set(path) <= {(1, 1), (2, 1)}
    assert climbed({(1, 1): 1}, 3, k=1, depth=1) == [(1, 1)] * 4


def test_no_more_layers_vote_than_a_group_has_before_it() -> None:
    made = Tuner("climb", group_of(8), (4, 4), HALF, 1, 1, 9)
    assert [climb.depth for climb in made._climbs] == [2, 4, 4]


def tuner(way: str, **changes: int) -> Tuner:
    options = {"steps": 4, "patience": 1, "tokens": 16} | changes
    return Tuner(way, [0, 0, 1, 2], (2, 1), HALF, **options)


def test_all_takes_the_best_of_each_group() -> None:
    made = tuner("all")
    sets = [[mask_of([1]), mask_of([1, 2])]]
    for token in range(16):
        assert made.counts_all == (token % 4 == 0)
        if made.counts_all:
            made.count(1, sets, [1], 0b1110)  # 2 is read for nothing
            made.count(3, sets, [1, 2], 0b1110)  # and here it is of use
        made.token()
        assert made.tuned == (token == 15)
    assert made.by_group() == {"shallow": (1, 1), "middle": (2, 1), "deep": (2, 1)}
    assert not made.counts_all


def test_climb_moves_the_running_pair() -> None:
    made = tuner("climb", tokens=24)
    for _ in range(24):
        for layer in (1, 2, 3):
            made.observe(layer, 0 if made.of(layer) == (1, 1) else 1, 0)
        made.token()
    assert set(made.by_group().values()) == {(1, 1)}
    losses = made.losses()
    assert losses["shallow"] == losses["deep"] and 0 < losses["deep"] < 0.5


def test_what_is_fixed_stays() -> None:
    for way, fixed in (("off", (2, 1)), ("all", (1, 1))):
        made = tuner(way)
        if way == "all":
            made.fix([fixed] * 3)
        for _ in range(40):
            made.observe(1, 9, 9)
            made.token()
        assert made.tuned and made.of(1) == made.of(3) == fixed


@pytest.mark.parametrize("depth", [0, 1])
def test_nothing_to_tune(depth: int) -> None:
    assert Tuner("all", [0, 0], (1, depth), HALF, 1, 1, 9).tuned
