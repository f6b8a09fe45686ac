"""Experts that exchange their tiers, so that an allocation follows what is used while every slot
stays filled."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from orchestrator.events import ABSENT
from orchestrator.policy.base import Transition
from orchestrator.policy.tier_pools import TierPools


def exchanges(
    losses: np.ndarray, tiers: np.ndarray, pool_of: np.ndarray, free: np.ndarray, margin: float
) -> list[tuple[int, int]]:
    """Pairs (riser, faller) of experts that had better be in each other's tier, the largest gain
    first; no expert is in two of them. Experts are numbered layer by layer.

    losses: w L, float64 [n_layers, n_expert, n_tiers]. tiers uint8 [n_layers, n_expert]: where each
    is. pool_of int64 [n_layers, n_tiers]: the pool that holds a layer's experts in a tier, so that
    experts with the same two pools may exchange; -1: in a tier that nobody is given. free bool
    [n_layers, n_expert]: may change. margin: a pair has to gain more than so many times what an
    expert gains between the two tiers in the mean; with two tiers and losses alike that is
    DynaExq's hysteresis.
    """
    _, n_expert, n_tiers = losses.shape
    flat, at = losses.reshape(-1, n_tiers), tiers.reshape(-1)
    pairs: list[tuple[float, int, int]] = []
    may_leave = [free.reshape(-1) & (at == tier) for tier in range(n_tiers)]
    held = [tier for tier in range(n_tiers) if may_leave[tier].any()]
    for high, low in combinations(held, 2):
        gains = flat[:, low] - flat[:, high]
        least = margin * float(np.abs(gains).mean())
        both = pool_of[:, [high, low]]
        for pair in sorted({(a, b) for a, b in both.tolist() if min(a, b) >= 0}):
            here = np.repeat((both == pair).all(axis=1), n_expert)
            rising, falling = (np.flatnonzero(here & may_leave[tier]) for tier in (low, high))
            if not (len(rising) and len(falling)):
                continue
            if gains[rising].max() - gains[falling].min() <= least:
                continue  # no pair gains enough
            rising = rising[np.argsort(-gains[rising], kind="stable")]
            falling = falling[np.argsort(gains[falling], kind="stable")]
            n = min(len(rising), len(falling))
            whole = gains[rising[:n]] - gains[falling[:n]]
            better = whole > least
            found = (each[:n][better].tolist() for each in (whole, rising, falling))
            pairs += zip(*found, strict=True)
    pairs.sort(key=lambda each: -each[0])
    moved: set[int] = set()
    chosen = []
    for _, riser, faller in pairs:
        if not {riser, faller} & moved:
            moved |= {riser, faller}
            chosen.append((riser, faller))
    return chosen


def moves(
    pools: TierPools,
    wanted: np.ndarray,
    resident: np.ndarray,
    target: np.ndarray,
    losses: np.ndarray,
) -> list[Transition]:
    """Experts at rest that are not where they should be, as far as slots are free: those to lower
    tiers first, since they free the better ones, then those that gain most.

    Only the lowest tier has slots in reserve. Where nothing is under way and nobody finds a slot,
    those that are to fall wait in the lowest tier, and free theirs: the pools hold as many experts
    of each tier as are wanted there, so that a slot which is free has somebody who wants it.

    wanted, resident, target: uint8 [n_layers, n_expert], the latter as of StepReport. losses: w L,
    float64 [n_layers, n_expert, n_tiers].
    """
    resting = (resident == target) & (resident != ABSENT)
    layers, experts = np.nonzero(resting & (resident != wanted))
    if not len(layers):
        return []
    goals, before = wanted[layers, experts], resident[layers, experts]
    rises, lost, all_of_them = goals < before, losses[layers, experts], np.arange(len(goals))
    gains = lost[all_of_them, before] - lost[all_of_them, goals]
    order = np.lexsort((-gains, rises)).tolist()
    tracker = pools.track(resident, target)

    def admitted(tiers: np.ndarray, some: list[int]) -> list[Transition]:
        return tracker.admitted((int(layers[at]), int(experts[at]), int(tiers[at])) for at in some)

    found = admitted(goals, order)
    if found or (resident != target).any():
        return found
    lowest = np.full_like(goals, pools.n_tiers - 1)
    return admitted(lowest, [at for at in order if not rises[at] and before[at] < lowest[at]])
