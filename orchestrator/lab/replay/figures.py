"""What a run came to, recorded or replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from orchestrator.engine import report
from orchestrator.events import Phase, percentile
from orchestrator.lab.replay.trace import COMPUTED, COUNTERS, MOVED, ROUTED, Trace
from orchestrator.native import CStats

Figures = dict[str, Any]


def recorded_figures(trace: Trace) -> Figures:
    """What the recorded run came to, in the form of a replay's figures."""
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
    """int64 [2, len(COUNTERS)]: what both a store and its replay count, by phase."""
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
    """tiers: names of those in use, best first; skip: experts may be skipped. counters
    [2, len(COUNTERS)] and wait_ms by phase; phases [S] and step_ms [S] by step."""
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
    """part / whole; None of nothing."""
    return part / whole if whole else None
