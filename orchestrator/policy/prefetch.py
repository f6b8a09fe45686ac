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
    for ahead in range(event.n_ahead):
        layer = event.layer + 1 + ahead
        resident, t = view.resident[layer], critical[layer]
        tier = 0
        for rank, expert in enumerate(event.ahead_ids[ahead].tolist()):
            if rank == t:
                if low is None:
                    break
                tier = low
            if resident[expert] > tier:
                out.prefetch(layer, expert, tier)


def by_frequency(event: RouteEvent, view: StoreView, out: DecisionBuffer, most: list[int]) -> None:
    """Prefill, eq. 7: asks for the experts of the next layer that most tokens are predicted
    to select, c_e = sum over tokens of [e in top-k], at most most[layer] of them."""
    layer = event.layer + 1
    counts = np.bincount(event.ahead_ids_array[0].ravel(), minlength=len(view.resident[layer]))
    counts[view.resident_array[layer] == 0] = 0
    for expert in np.argsort(-counts, kind="stable")[: most[layer]].tolist():
        if counts[expert] == 0:
            break
        out.prefetch(layer, expert, 0)
