"""What to load before it is needed (DyMoE, section 4.4.1).

The look-ahead itself, g_hat of layer l+1 = Softmax(h of layer l * W_g of layer l+1),
eq. 6, is computed in the model's graph and arrives with the route event, best first.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from orchestrator.allocation.importance import Ranking
from orchestrator.errors import ConfigError
from orchestrator.events import DecisionBuffer, RouteEvent, StoreView
from orchestrator.settings import Settings, setting

PREFETCHES = ("auto", "on", "off")
AUTO, ON, OFF = PREFETCHES

L = TypeVar("L", bound="LookAhead")


@dataclass(frozen=True)
class LookAhead(Settings):
    """Settings of policies that prefetch what the next layers are predicted to choose."""

    prefetch: str = setting(
        AUTO, "Load ahead: on, off, or auto: while it pays.", metavar="WHEN", choices=PREFETCHES
    )
    n_ahead: int | None = setting(
        None, "How many layers ahead experts are predicted.", within=(0, 4), shown="by policy"
    )

    @property
    def usual_ahead(self) -> int:
        """How many layers ahead the policy wants where nothing is asked for."""
        return 1

    def settled(self: L) -> L:
        """The same with what the policy wants where nothing was asked for."""
        return self if self.n_ahead is not None else replace(self, n_ahead=self.usual_ahead)

    def limited(self: L, depth: int, asked: Collection[str]) -> L:
        """The same where routers were only asked `depth` layers ahead. asked: names of what was
        set on purpose. Raises ConfigError where that cannot be had."""
        n_ahead = self.settled().n_ahead or 0
        if "n_ahead" in asked and n_ahead > depth:
            raise ConfigError(
                f"the trace looks {depth} layers ahead, not {n_ahead}: record it with a "
                f"policy that looks ahead"
            )
        if "prefetch" in asked and self.prefetch == ON and depth == 0:
            raise ConfigError(
                "--prefetch on: the trace does not look ahead, record it with a policy that does"
            )
        return replace(self, n_ahead=min(n_ahead, depth))


def direct(
    event: RouteEvent, out: DecisionBuffer, critical: list[int], low: int | None
) -> list[int]:
    """Decode, eq. 8: asks for the top-t experts that the next layers are predicted to select.

    critical[layer] is t_l. A predicted rank below t_l asks for tier 0; the other ranks ask
    for tier `low`, or for nothing when it is None. What is in memory already is asked for as
    well: the store then keeps it. Of several tokens the predictions of all are asked for, by
    frequency. Returns the experts asked for in the next layer.
    """
    asked: list[int] = []
    for ahead in range(event.n_ahead):
        layer = event.layer + 1 + ahead
        t = critical[layer]
        if event.n_tokens == 1:
            experts = event.ahead_ids[ahead].tolist()
        else:
            experts, t = union(event.ahead_ids_array[ahead], t, len(out.tier))
        if low is None:
            del experts[t:]
        out.prefetch_all(layer, experts[:t], 0)
        if low is not None:
            out.prefetch_all(layer, experts[t:], low)
        if ahead == 0:
            asked = experts
    return asked


def union(ids: np.ndarray, t: int, n_expert: int) -> tuple[list[int], int]:
    """What any of several tokens is predicted to select, and how many of it are critical: those
    come first, and are among the first t of some token. Both parts go by the number of tokens, then
    by the best rank, then by the index. ids int32 [T, k], each token's best first.
    """
    n_tokens, k = ids.shape
    load = np.bincount(ids.ravel(), minlength=n_expert)
    best = np.full(n_expert, k)
    np.minimum.at(best, ids, np.arange(k)[None, :].repeat(n_tokens, 0))
    order = np.lexsort((best, -load, best >= t))
    order = order[load[order] > 0]
    return order.tolist(), int(np.count_nonzero(best < t))


def by_importance(
    layer: int,
    predicted: Ranking,
    view: StoreView,
    out: DecisionBuffer,
    *,
    low: int | None,
    room: tuple[int, int],
    passing: np.ndarray,
) -> None:
    """Prefill, eq. 7: asks for the experts of a layer that tokens are predicted to select, in
    their predicted importance, which decides the precision.

    The critical ones are asked for in tier 0, the others in tier `low`, or not at all when it is
    None. passing, bool [n_expert]: those that pass through memory; the others stay. room: slots for
    both tiers; no more experts than those are read. What is in memory already is listed as well, so
    that nothing is read in its place.
    """
    resident = view.resident_array[layer]
    order, n_high, n_used = predicted
    n_wanted = n_high if low is None else n_used
    for tier, begin, end, most in ((0, 0, n_high, room[0]), (low or 0, n_high, n_wanted, room[1])):
        ranks = np.arange(begin, end)
        absent = resident[order[begin:end]] > tier
        listed = ranks[~absent | (absent.cumsum() <= most)]
        for expert in order[listed].tolist():
            out.prefetch(layer, expert, tier, passing=int(passing[expert]))
