"""Reading that a loss saves."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.cost.predict import Residency
from orchestrator.cost.spending import spending


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
    same = spending(known, NATS, sizes, 0.0)
    assert (same.mix == known.mix).all() and (same.present == known.present).all()
    # 0.5 uses of expert 3 of the first layer miss; of those one half is the token's top one.
    some = spending(known, NATS, sizes, 0.25)
    assert lost(known, some) == pytest.approx(0.25)
    changed = np.argwhere(some.mix[..., 0] < 1).tolist()
    assert changed == [[0, 3]]
    more = spending(known, NATS, sizes, 1.2)
    assert lost(known, more) == pytest.approx(1.2)
    assert np.argwhere(more.mix[..., 0] < 1).tolist() == [[0, 2], [0, 3], [1, 2]]
    # What is found in memory stays, as a number of uses.
    assert more.mix[..., 0] * more.present == pytest.approx(known.present)
    assert more.hit_rate > some.hit_rate > known.hit_rate


def test_all_that_may_be_skipped() -> None:
    """One expert of a token in each layer stays."""
    known = resident()
    everything = spending(known, NATS, np.array([1, 1]), 1e3)
    assert everything.mix[..., 0] == pytest.approx(1 - 0.5 * (1 - known.present))


def test_a_larger_expert_saves_more() -> None:
    """At equal cost; so the second layer's come first."""
    known = resident()
    even = np.ones((2, 4))
    found = spending(known, even, np.array([1, 2]), 0.1)
    assert {layer for layer, _ in np.argwhere(found.mix[..., 0] < 1).tolist()} == {1}
