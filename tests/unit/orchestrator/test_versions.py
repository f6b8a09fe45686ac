"""What memory holds of an expert, and who gets a slot."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from orchestrator.allocation.pools import Tracker
from orchestrator.allocation.slots import Transition


def test_moves_get_slots_in_their_order_until_none_is_left() -> None:
    """Two layers; a pool of each in tier 0, and one of both that tiers 1 and 2 share."""
    shared = [2]
    apart, together = np.array([0, 1]), np.array([0, 0])
    tracker = Tracker([[1, 0], shared, shared], [apart, together, together])
    looked = []

    def wanting() -> Iterator[Transition]:
        for move in ((1, 0, 0), (0, 1, 0), (0, 2, 0), (0, 3, 1), (1, 4, 2), (1, 5, 1), (0, 6, 0)):
            looked.append(move)
            yield move

    assert not tracker.full
    assert tracker.admitted(wanting()) == [(0, 1, 0), (0, 3, 1), (1, 4, 2)]
    assert tracker.full and looked[-1] == (1, 5, 1)
    assert not tracker.try_reserve(0, 2)


def test_a_pool_with_more_than_its_slots_takes_none_from_another() -> None:
    tracker = Tracker([[-1, 1]], [np.array([0, 1])])
    assert tracker.admitted([(0, 0, 0), (1, 0, 0), (1, 1, 0)]) == [(1, 0, 0)]
    assert tracker.full
