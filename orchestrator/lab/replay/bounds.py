"""What no cache can beat: Belady's optimum, and the shortest time that its misses allow."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from orchestrator.allocation.slots import ModelShape, SlotPlan
from orchestrator.events import Phase
from orchestrator.lab.replay.trace import Trace

Expert = tuple[int, int]  # (layer, expert)


@dataclass(frozen=True, slots=True)
class Optimum:
    """The fewest misses of a trace. requests and hits count matrices, by phase; miss_bytes
    are slice bytes of one precision."""

    requests: tuple[int, int]
    hits: tuple[int, int]
    miss_bytes: tuple[int, int]


def belady(trace: Trace, shape: ModelShape, plan: SlotPlan, tier: int) -> Optimum:
    """Most hits that any cache of one precision can have with as many slots: at every event
    it keeps, of what it holds and what it is asked for, the experts that are asked for again
    soonest. Exact, since that keeps the most of the intervals between two uses of an expert
    (the largest subset of intervals of which no point lies in more than C).

    Assumptions, all in favour of the optimum: the whole trace is known; the slots of one
    matrix kind and slot size are one pool, whatever groups the plan makes of them; what an
    event has used may be dropped at once, and its own loads need no slots beside what is
    kept. So it bounds lru and every policy of one precision and the same slots that loads on
    demand, and its misses the reads of one that prefetches too.

    tier: of the trace's model, that shape and plan have as their tier 0.
    """
    totals = np.zeros((3, len(Phase)), np.int64)
    pools: dict[tuple[int, int], tuple[set[int], set[int]]] = {}  # (kind, bytes): groups, layers
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
        if same not in known:  # the kinds of a model mostly go alike
            known[same] = fewest_misses([each for each in events if each[1] in layers], capacity)
        for phase, layer, n_asked, n_hits in known[same]:
            piece = slices[layer][kind][tier]
            bytes_each = piece.expert_bytes if piece else 0
            totals[:, phase] += n_asked, n_hits, (n_asked - n_hits) * bytes_each
    asked, hits, missed = totals.tolist()
    return Optimum((asked[0], asked[1]), (hits[0], hits[1]), (missed[0], missed[1]))


def fewest_misses(
    events: list[tuple[Phase, int, list[int]]], capacity: int
) -> list[tuple[Phase, int, int, int]]:
    """(phase, layer, requests, hits) of each event of one pool with so many slots."""
    uses: dict[Expert, list[int]] = {}
    for when, (_, layer, ids) in enumerate(events):
        for expert in ids:
            uses.setdefault((layer, expert), []).append(when)
    place = dict.fromkeys(uses, 0)
    kept: dict[Expert, int] = {}  # when it is asked for next
    latest: list[tuple[int, Expert]] = []  # heap of (-next use, expert), stale ones included
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


def bound_us(compute_us: float, miss_bytes: int, bytes_per_s: int) -> float:
    """The least time of a phase: max(compute, bytes missed / bandwidth), in microseconds."""
    return max(compute_us, miss_bytes * 1e6 / bytes_per_s if bytes_per_s else 0.0)
