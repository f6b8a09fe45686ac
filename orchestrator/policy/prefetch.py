"""What to load before it is needed (DyMoE, section 4.4.1).

The look-ahead itself, g_hat of layer l+1 = Softmax(h of layer l * W_g of layer l+1),
eq. 6, is computed in the model's graph and arrives with the route event, best first.
"""

from __future__ import annotations

import numpy as np

from orchestrator.events import DecisionBuffer, RouteEvent, StoreView


def direct(
    event: RouteEvent, view: StoreView, out: DecisionBuffer, critical: list[int], low: int | None
) -> None:
    """Decode, eq. 8: asks for the top-t experts that the next layers are predicted to select.

    critical[layer] is t_l. A predicted rank below t_l asks for tier 0; the other ranks ask
    for tier `low`, or for nothing when it is None. What is in memory already, in that tier
    or a better one, is left out. One token's prediction is used: the first of the event.
    """
    k, n_expert, resident = event.k, view.n_expert, view.resident
    for ahead in range(event.n_ahead):
        layer = event.layer + 1 + ahead
        base = layer * n_expert
        row = ahead * event.max_tokens * k
        t = critical[layer]
        wanted = event.ahead_ids[row : row + (t if low is None else k)].tolist()
        for rank, expert in enumerate(wanted):
            tier = 0 if rank < t or low is None else low
            if resident[base + expert] > tier:
                out.prefetch(layer, expert, tier)


def by_frequency(event: RouteEvent, view: StoreView, out: DecisionBuffer, most: list[int]) -> None:
    """Prefill, eq. 7: asks for the experts of the next layer that most tokens are predicted
    to select, c_e = sum over tokens of [e in top-k], at most most[layer] of them."""
    layer = event.layer + 1
    counts = np.bincount(event.ahead_ids_array[0].ravel(), minlength=view.n_expert)
    counts[view.resident_array[layer] == 0] = 0
    for expert in np.argsort(-counts, kind="stable")[: most[layer]].tolist():
        if counts[expert] == 0:
            break
        out.prefetch(layer, expert, 0)
