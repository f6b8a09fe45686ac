"""How many candidates and layers vote, worked out by hand (FIRM-MoE, eq. 11 and Algorithm 1)."""

from __future__ import annotations

import pytest

from orchestrator.policy.firm import (
    Climb,
    Grid,
    Tuner,
    Weights,
    absent_of,
    every_set,
    group_of,
    mask_of,
    unused_and_missed,
)

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
    absent = [(mask_of([1, 3, 6]), 1)]
    assert unused_and_missed(mask_of([1, 2, 3, 4]), mask_of([3, 4, 5, 6]), absent) == (1, 1)
    assert HALF.loss(1, 1) == 1.0
    assert Weights(2.0, 0.25).loss(1, 4) == 3.0


def test_the_loss_counts_matrices() -> None:
    """Two are loaded ahead, a gate and an up. Of 1 both are absent and of 3 the up, and neither is
    used; of 6 the gate is absent, and it is read on demand: 3 and 1 of two matrices each."""
    absent = absent_of({1: 0b110, 3: 0b101, 6: 0b010, 5: 0}, [0b010, 0b100])
    assert sorted(absent) == [(mask_of([1, 3]), 1), (mask_of([1, 6]), 1)]
    assert unused_and_missed(mask_of([1, 2, 3]), mask_of([5, 6]), absent) == (3, 1)
    assert Weights(matrices=2).loss(3, 1) == 1.0
    assert absent_of({1: 0b11, 2: 0}, [1, 2]) == ((mask_of([1]), 2),)


def test_every_pair_is_counted_on_the_same_tokens() -> None:
    """Nothing is in memory, and 5 and 2 are used. K = 1: 5 is right, 2 missed. P = 2 loses 5 at
    K = 1 and 7 at K = 3."""
    grid = Grid(3, 2, HALF)
    sets = every_set("mol", [[5, 7, 2], [2, 5, 9]], 2)
    absent = [(mask_of(range(10)), 1)]
    grid.count(sets, mask_of([5, 2]), absent)
    assert grid.means() == [[0.5, 1.0, 0.5], [1.0, 0.5, 0.0]]
    assert grid.best() == (3, 2)
    grid.count(sets, mask_of([7, 5]), absent)  # mean of two tokens
    assert grid.means() == [[0.5, 0.5, 0.5], [1.0, 0.5, 0.5]]
    assert grid.best() == (1, 1)  # of equals that with the fewest layers and candidates


def climbed(means: list[list[float]], n: int, patience: int = 1) -> list[tuple[int, int]]:
    """Where a climb is after each of n updates. means [P - 1][K - 1]"""
    climb = Climb(len(means[0]), len(means), patience)
    path = []
    for _ in range(n):
        climb.update(means)
        path.append(climb.at)
    return path


def test_climbing_down_one_axis_and_then_the_other() -> None:
    """P falls while that gains and turns at its end. Upwards it does not gain: K has its turn. So
    the plane is explored, of which Algorithm 1 as printed reaches one direction of each axis."""
    means = [[abs(k - 3) + 2.0 * p for k in range(1, 5)] for p in range(1, 4)]
    path = climbed(means, 8)
    assert path[:2] == [(4, 2), (4, 1)]  # 7, 5 and 3
    assert path[2] == (4, 1)  # P = 0 is no step, and P = 2 loses 5
    assert path[3:] == [(3, 1)] * 5  # 2, and neither K = 2 nor K = 4 is less


def test_patience_delays_a_turn() -> None:
    means = [[1.0, 0.5, 0.75], [1.0, 0.5, 0.75]]
    assert climbed(means, 4, patience=1)[-1] == (2, 2)
    assert climbed(means, 4, patience=4)[-1] == (3, 2)


def test_a_climb_follows_what_it_has_learned_since() -> None:
    """A start that misled it is made good once the means of all tokens say otherwise."""
    climb = Climb(3, 1, patience=1)
    for means in ([0.1, 0.2, 0.3], [0.1, 0.2, 0.3], *[[0.3, 0.2, 0.1]] * 4):
        climb.update([means])
    assert climb.at == (3, 1)


def test_the_last_step_takes_the_best_of_what_was_seen() -> None:
    """Tokens that misled it took the climb to K = 1, at 0.3 by all tokens; it had been at K = 3,
    with 0.1. K = 2 at P = 1 is better still, and was never looked at."""
    climb = Climb(3, 2, patience=1, axis=0)
    for _ in range(2):
        climb.update([[9, 9, 9], [0.1, 0.2, 0.3]])
    assert climb.at == (1, 2)
    climb.end([[9, 0.05, 9], [0.3, 0.2, 0.1]])
    assert climb.at == (3, 2) and climb.seen == {(1, 2), (2, 2), (3, 2)}


def test_a_tuner_ends_where_the_climb_saw_the_least() -> None:
    """In two intervals one expert is of use, and so K falls from 3 to 1; in the third, which counts
    for more, all three are. K = 3 is the best of what was seen, and two steps away."""
    made = Tuner("climb", [0, 0, 1, 2], (3, 1), HALF, 4, 1, 12)
    sets = [[mask_of(range(1, n + 1)) for n in (1, 2, 3)]]
    for step in range(12):
        used, times = ([1], 1) if step < 8 else ([1, 2, 3], 3)
        for _ in range(times if made.counts_all else 0):
            made.count(1, sets, used, [(0b1110, 1)])
        made.token()
        assert made.of(1) == ((3, 1) if step in (0, 1, 2, 11) else (2, 1) if step < 7 else (1, 1))
    assert made.tuned


def test_a_step_out_of_range_is_a_turn() -> None:
    assert climbed([[0.5, 0.5]], 6) == [(2, 1)] * 6
    assert climbed([[0.1]], 3) == [(1, 1)] * 3


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
            made.count(1, sets, [1], [(0b1110, 1)])  # 2 is read for nothing
            made.count(3, sets, [1, 2], [(0b1110, 1)])  # and here it is of use
        made.token()
        assert made.tuned == (token == 15)
    assert made.by_group() == {"shallow": (1, 1), "middle": (2, 1), "deep": (2, 1)}
    assert not made.counts_all


def test_climb_moves_the_running_pair() -> None:
    """One candidate is right in the layers 1 and 2, and both are in the last one."""
    made = tuner("climb", tokens=24)
    sets = [[mask_of([1]), mask_of([1, 2])]]
    for _ in range(24):
        for layer, used in ((1, [1]), (2, [1]), (3, [1, 2])):
            if made.counts_all:
                made.count(layer, sets, used, [(0b110, 1)])
            made.observe(layer, 0 if made.of(layer) == (1, 1) or layer == 3 else 1, 0)
        made.token()
    assert made.by_group() == {"shallow": (1, 1), "middle": (1, 1), "deep": (2, 1)}
    losses = made.losses()
    assert losses["shallow"] == losses["middle"] and 0 < losses["shallow"] < 0.5
    assert losses["deep"] == 0


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
