"""What tiers cost a use of each expert: nats where that was fitted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from orchestrator.cost.losses import Fit, LossTable, TablePrecision


def table() -> LossTable:
    """Two layers of three experts; one of them saw no token."""
    loss = np.array(
        [[[0.0, 1.0], [0.0, 2.0], [np.nan, np.nan]], [[0.0, 3.0], [0.0, 4.0], [0.0, 5.0]]]
    )
    counts = np.array([[1, 3, 0], [2, 2, 2]])
    gates = np.array([[0.5, 0.25, np.nan], [0.1, 0.2, 0.3]])
    candidates = [TablePrecision("q8_0", 8.5, True), TablePrecision("q2_k", 2.6, True)]
    power = np.where(counts > 0, 10.0, np.nan)
    fit = Fit((2.0, 0.5), ("q8_0", "q2_k"), "text", 1.2)
    return LossTable(candidates, loss, power, counts, "", "rtn", "text", 8, gates, fit)


def test_factor_and_gates_weigh_the_losses() -> None:
    """An expert without a token has the means of its layer."""
    nats = table().per_use(("q8_0", "q2_k"))
    assert nats is not None and (nats[..., 0] == 0).all()
    gate, lost = (0.5 + 3 * 0.25) / 4, (1 + 3 * 2) / 4
    assert nats[0, :, 1] == pytest.approx([2 * 0.5 * 1, 2 * 0.25 * 2, 2 * gate * lost])
    assert nats[1, :, 1] == pytest.approx([0.5 * 0.1 * 3, 0.5 * 0.2 * 4, 0.5 * 0.3 * 5])


def test_without_a_fit_they_are_the_losses() -> None:
    for less in ({"fit": None}, {"gates": None}):
        found = replace(table(), **less)
        assert (found.per_use(("q2_k",)) == found.of_tiers(("q2_k",))).all()
    assert table().per_use(("q3_k",)) is None
