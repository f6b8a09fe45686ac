"""Metrics of a recorded or replayed run, and Belady's optimum as a bound."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from orchestrator.allocation.slots import ModelShape, SlotPlan
from orchestrator.events import Phase, percentile
from orchestrator.lab.replay.trace import COMPUTED, COUNTERS, MOVED, ROUTED, Trace
from orchestrator.native import CStats
from orchestrator.runtime import report

Figures = dict[str, Any]


def recorded_figures(trace: Trace) -> Figures:
    """Return the metrics of the recorded run, with the same keys as those of a replay."""
    phases = trace.arrays["step_phase"]
    return figures(
        trace.header.in_use,
        trace.header.rules.skip,
        trace.arrays["counters"],
        [float(trace.wait_ms[phases == phase].sum()) for phase in Phase],
        phases,
        trace.step_ms,
    ) | {"transition_bytes": trace.header.transition_bytes}


def counted(stats: CStats) -> np.ndarray:
    """Return the counters of an expert store as an array, int64 [2, len(COUNTERS)].

    Row 0 has the counters of prefill, and row 1 those of decode.
    """
    rows = np.zeros((len(Phase), len(COUNTERS)), np.int64)
    for phase in Phase:
        moved = (getattr(stats, name)[phase] for name in MOVED)
        rows[phase] = *moved, *stats.routed[phase], *stats.computed[phase]
    return rows


def figures(
    tiers: Sequence[str],
    skip: bool,
    counters: np.ndarray,
    wait_ms: list[float],
    phases: np.ndarray,
    step_ms: np.ndarray,
) -> Figures:
    """Return the metrics of a run of S steps as a dict: cache hits, waits, TTFT and TPOT.

    - tiers: names of the precisions in use, best first.
    - skip: whether experts may be skipped.
    - counters [2, len(COUNTERS)]: counters of the expert store, for prefill and decode.
    - wait_ms [2]: time spent waiting for reads, for prefill and decode.
    - phases [S]: phase of each step.
    - step_ms [S]: duration of each step.
    """
    found: Figures = {}
    for phase in Phase:
        count = dict(zip(COUNTERS, counters[phase].tolist(), strict=True))
        found[phase.name.lower()] = {
            "requests": count["requests"],
            "hits": count["hits"],
            "hit_rate": ratio(count["hits"], count["requests"]),
            "demand_bytes": count["demand_bytes"],
            "prefetch_bytes": count["prefetch_bytes"],
            "wait_ms": wait_ms[phase],
            "mix": report.decided([count[name] for name in ROUTED], tiers, skip),
            "computed": report.computed([count[name] for name in COMPUTED], tiers),
        }
    decode = phases == Phase.DECODE
    tpot = step_ms[decode].tolist()
    first = int(decode.argmax()) if decode.any() else len(decode)
    return found | {
        "ttft_ms": float(step_ms[:first].sum()) if first else None,
        "tpot_ms_mean": float(np.mean(tpot)) if tpot else None,
        "tpot_ms_p50": percentile(tpot, 50) if tpot else None,
        "tpot_ms_p99": percentile(tpot, 99) if tpot else None,
    }


def ratio(part: float, whole: float) -> float | None:
    """Return part / whole, or None if whole is 0."""
    return part / whole if whole else None


Expert = tuple[int, int]  # (layer, expert)


def belady(trace: Trace, shape: ModelShape, plan: SlotPlan, tier: int) -> dict[str, list[int]]:
    """Compute the cache hits of an optimal cache of experts, which knows all requests in advance.

    The cache holds experts in one precision, and keeps those whose next use is soonest. Its hits
    are an upper bound for all policies that load experts of one precision on demand.

    - plan: the slots of the cache. A slot holds one matrix of an expert.
    - tier: index of the precision in the model.

    Returns a dict with the number of "requests" and "hits", and the size of the missing matrices
    ("miss_bytes"). Each value is a list [prefill, decode].
    """
    # All assumptions favor the optimum. The slots of one matrix kind and slot size form one pool,
    # even if the plan groups them differently. An expert may be evicted right after its use, and
    # loads need no additional slots. The misses are also a lower bound for the reads of a policy
    # that prefetches.
    totals = np.zeros((3, len(Phase)), np.int64)
    pools: dict[
        tuple[int, int], tuple[set[int], set[int]]
    ] = {}  # groups and layers by (kind, slot bytes)
    for (layer, kind, plan_tier), group in plan.group_of.items():
        if plan_tier == 0:
            key = kind, shape.slots[layer][0][kind]
            groups, layers = pools.setdefault(key, (set(), set()))
            groups.add(group)
            layers.add(layer)
    events = [
        (step.phase, event.layer, np.unique(event.ids).tolist())
        for step in trace.steps()
        for event in step.events
    ]
    known: dict[tuple[int, frozenset[int]], list[tuple[Phase, int, int, int]]] = {}
    slices = trace.slices
    for (kind, _), (groups, layers) in pools.items():
        capacity = sum(plan.groups[group].n_slots for group in groups)
        same = capacity, frozenset(layers)
        if same not in known:  # matrix kinds with equal pools have equal results
            known[same] = fewest_misses([each for each in events if each[1] in layers], capacity)
        for phase, layer, n_asked, n_hits in known[same]:
            piece = slices[layer][kind][tier]
            bytes_each = piece.expert_bytes if piece else 0
            totals[:, phase] += n_asked, n_hits, (n_asked - n_hits) * bytes_each
    return dict(zip(("requests", "hits", "miss_bytes"), totals.tolist(), strict=True))


def fewest_misses(
    events: list[tuple[Phase, int, list[int]]], capacity: int
) -> list[tuple[Phase, int, int, int]]:
    """Simulate an optimal cache with `capacity` slots that knows all events in advance.

    An event is (phase, layer, requested experts). Returns (phase, layer, number of requests, number
    of hits) for each event.
    """
    uses: dict[Expert, list[int]] = {}
    for when, (_, layer, ids) in enumerate(events):
        for expert in ids:
            uses.setdefault((layer, expert), []).append(when)
    place = dict.fromkeys(uses, 0)
    kept: dict[Expert, int] = {}  # expert: index of the event that uses it next
    latest: list[tuple[int, Expert]] = []  # heap of (-next use, expert), some outdated
    found = []
    for phase, layer, ids in events:
        hits = 0
        for expert in ids:
            item = layer, expert
            hits += kept.pop(item, None) is not None
            place[item] += 1
            if place[item] < len(uses[item]):
                kept[item] = uses[item][place[item]]
                heapq.heappush(latest, (-kept[item], item))
        while len(kept) > capacity:
            next_use, item = heapq.heappop(latest)
            if kept.get(item) == -next_use:
                del kept[item]
        found.append((phase, layer, len(ids), hits))
    return found
