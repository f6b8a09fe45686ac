"""How well a replay agrees with the run that it was recorded from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from orchestrator.engine import report
from orchestrator.events import Phase, percentile
from orchestrator.lab.replay.trace import COMPUTED, COUNTERS, MOVED, ROUTED, Trace
from orchestrator.lab.table import Column, Row, Table
from orchestrator.native import CStats

Figures = dict[str, Any]


def recorded_figures(trace: Trace) -> Figures:
    """What the recorded run came to, in the form of a replay's figures."""
    phases = trace.arrays["step_phase"]
    promoted, demoted = _directions(trace)
    return figures(
        trace.header.in_use,
        trace.header.rules.skip,
        trace.arrays["counters"],
        [float(trace.wait_ms[phases == phase].sum()) for phase in Phase],
        phases,
        trace.step_ms,
    ) | {
        "transition_bytes": trace.header.transition_bytes,
        "experts_promoted": promoted,
        "experts_demoted": demoted,
    }


def _directions(trace: Trace) -> tuple[int, int]:
    """How many experts got a better version while the run went on, and how many a worse one."""
    tiers = trace.arrays["start_tier"].copy()
    better = 0
    published = trace.arrays["published"].tolist()
    for _, layer, expert, tier in published:
        better += tier < tiers[layer, expert]
        tiers[layer, expert] = tier
    return int(better), len(published) - int(better)


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


# A name, where the figure stands, what it is printed in and divided by.
_Row = tuple[str, tuple[str, ...], str, float]

_BEFORE_MIX: tuple[_Row, ...] = (
    ("prompt: hits", ("prefill", "hits"), "", 1),
    ("prompt: read", ("prefill", "demand_bytes"), "MB", 1e6),
    ("prompt: waited", ("prefill", "wait_ms"), "ms", 1),
    ("hits", ("decode", "hits"), "", 1),
    ("of requests", ("decode", "requests"), "", 1),
)
_AFTER_MIX: tuple[_Row, ...] = (
    ("read", ("decode", "demand_bytes"), "MB", 1e6),
    ("read ahead", ("decode", "prefetch_bytes"), "MB", 1e6),
    ("waited", ("decode", "wait_ms"), "ms", 1),
    ("promoted", ("experts_promoted",), "", 1),
    ("demoted", ("experts_demoted",), "", 1),
    ("read for these", ("transition_bytes",), "MB", 1e6),
    ("TPOT p50", ("tpot_ms_p50",), "ms", 1),
    ("TPOT mean", ("tpot_ms_mean",), "ms", 1),
    ("TPOT p99", ("tpot_ms_p99",), "ms", 1),
    ("TTFT", ("ttft_ms",), "ms", 1),
)


def agreement(recorded: Figures, replayed: Figures) -> list[dict[str, Any]]:
    """A row for each figure that is not zero in both: name, unit, recorded, replayed, and error,
    the difference in parts of what was recorded; None where that is zero."""
    mix_rows = [
        (f"{what} {tier}", ("decode", key, tier), "%", 0.01)
        for what, key in (("routed in", "mix"), ("computed in", "computed"))
        for tier in recorded["decode"][key] or ()
    ]
    rows = []
    for name, path, unit, scale in (*_BEFORE_MIX, *mix_rows, *_AFTER_MIX):
        ours, theirs = ((_at(each, path) or 0) / scale for each in (replayed, recorded))
        if ours or theirs:
            error = (ours - theirs) / theirs if theirs else None
            rows.append(
                {"name": name, "unit": unit, "recorded": theirs, "replayed": ours, "error": error}
            )
    return rows


def _at(found: Figures, path: tuple[str, ...]) -> float | None:
    value: Any = found
    for key in path:
        value = None if value is None else value.get(key)
    return value  # type: ignore[no-any-return]


def agreement_table(rows: list[dict[str, Any]]) -> Table:
    """These rows for a person."""

    def of(side: str) -> Callable[[Row], str]:
        return lambda row: f"{row[side]:.{2 if row['unit'] else 0}f} {row['unit']}".rstrip()

    def error(value: float) -> str:
        return "0" if abs(value) < 5e-4 else f"{100 * value:+.1f} %"

    columns = [
        Column("", "name", left=True),
        Column("recorded", of("recorded")),
        Column("replayed", of("replayed")),
        Column("error", "off", error),
    ]
    # A table has other uses for a figure of the name `error`.
    shown = [{"off" if key == "error" else key: row[key] for key in row} for row in rows]
    return Table("", columns, shown)
