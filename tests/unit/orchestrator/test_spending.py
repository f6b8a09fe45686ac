"""Reading that a loss saves."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.cost.losses import Skips
from orchestrator.cost.time import Residency, with_skips


def resident() -> Residency:
    """Two layers of four experts, two a token; the first half of each is in memory."""
    present = np.tile([1.0, 1.0, 0.25, 0.0], (2, 1))
    return Residency(np.full((2, 4), 0.5), np.ones((2, 4, 1)), present)


NATS = np.array([[1.0, 1.0, 4.0, 2.0], [1.0, 1.0, 3.0, 9.0]])


def lost(before: Residency, after: Residency) -> float:
    skipped = before.uses * (before.mix - after.mix).sum(axis=2)
    return float((skipped * NATS).sum())


def test_the_cheapest_misses_are_skipped_until_the_loss_is_spent() -> None:
    known, sizes = resident(), np.array([1, 1])
    same = with_skips(known, Skips(NATS, 0.0), sizes)
    assert (same.mix == known.mix).all() and (same.present == known.present).all()
    # 0.5 uses of expert 3 of the first layer miss; of those one half is the token's top one.
    some = with_skips(known, Skips(NATS, 0.25), sizes)
    assert lost(known, some) == pytest.approx(0.25)
    changed = np.argwhere(some.mix[..., 0] < 1).tolist()
    assert changed == [[0, 3]]
    more = with_skips(known, Skips(NATS, 1.2), sizes)
    assert lost(known, more) == pytest.approx(1.2)
    assert np.argwhere(more.mix[..., 0] < 1).tolist() == [[0, 2], [0, 3], [1, 2]]
    # What is found in memory stays, as a number of uses.
    assert more.mix[..., 0] * more.present == pytest.approx(known.present)
    assert more.hit_rate > some.hit_rate > known.hit_rate


def test_all_that_may_be_skipped() -> None:
    """One expert of a token in each layer stays."""
    known = resident()
    everything = with_skips(known, Skips(NATS, 1e3), np.array([1, 1]))
    assert everything.mix[..., 0] == pytest.approx(1 - 0.5 * (1 - known.present))


def test_a_larger_expert_saves_more() -> None:
    """At equal cost; so the second layer's come first."""
    known = resident()
    even = np.ones((2, 4))
    found = with_skips(known, Skips(even, 0.1), np.array([1, 2]))
    assert {layer for layer, _ in np.argwhere(found.mix[..., 0] < 1).tolist()} == {1}
