"""In which precisions experts were asked for, and in which they were computed."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.events import SKIP_TIER
from orchestrator.native import MAX_TIERS

# Shares by the name of a tier, best first, and of the tier of no bytes.
Mix = dict[str, float]


def decided(routed: Sequence[int], tiers: Sequence[str], skip: bool) -> Mix | None:
    """Shares of the routed experts by the tier that was decided; None where none was routed.

    routed [MAX_TIERS + 1]: experts by tier, the skipped ones last. tiers: names of those in use.
    skip: whether experts may be skipped."""
    total = sum(routed)
    if not total:
        return None
    mix = {name: n / total for name, n in zip(tiers, routed, strict=False)}
    return mix | {SKIP_TIER: routed[MAX_TIERS] / total} if skip else mix


def computed(matrices: Sequence[int], tiers: Sequence[str]) -> Mix | None:
    """Shares of the matrices by the tier that was computed; None where none was: a better copy in
    memory is used where a lower one was asked for. matrices [MAX_TIERS]"""
    total = sum(matrices)
    return {n: m / total for n, m in zip(tiers, matrices, strict=False)} if total else None
