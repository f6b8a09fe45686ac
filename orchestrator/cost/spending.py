"""What a loss that is allowed saves of reading, foreseen: uses of missing experts are skipped."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from orchestrator.cost.predict import Residency


def spending(
    known: Residency, nats: np.ndarray, expert_bytes: np.ndarray, nats_allowed: float
) -> Residency:
    """What tokens use where of their missing experts those are skipped that cost least a byte,
    until they cost what is allowed in the mean. What is skipped is read behind, so that as many
    uses of an expert find it in memory as without skipping.

    known: without skipping. nats: float64 [n_layers, n_expert], what skipping a use of each expert
    costs in the mean. expert_bytes: [n_layers], what reading one moves. nats_allowed: a token. Of
    each token's experts in a layer one at least is never skipped. The gates of an expert's uses
    differ, and those with the least are skipped first, which is better than the mean says.
    """
    asked = known.uses * known.mix.sum(axis=2)
    missing = asked * (1.0 - known.present)
    most = 1.0 - 1.0 / max(1.0, float(asked.sum(axis=1).mean()))
    order = np.argsort((nats / np.asarray(expert_bytes)[:, None]).ravel(), kind="stable")
    cost = (missing * nats * most).ravel()[order]
    before = np.cumsum(cost) - cost
    part = np.clip((nats_allowed - before) / np.maximum(cost, 1e-30), 0.0, 1.0)
    share = np.zeros(missing.size)
    share[order] = most * part
    skipped = (1.0 - known.present) * share.reshape(missing.shape)
    left = 1.0 - skipped
    return replace(
        known, mix=known.mix * left[..., None], present=known.present / np.maximum(left, 1e-300)
    )
