"""From what the processes of `moe-edge bench topics` printed to its figures and goals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from orchestrator.lab.bench.cases import Case
from orchestrator.lab.bench.rows import (
    Result,
    failure,
    median_ratio,
    named,
    store_figures,
    times_ms,
)

Window = TypeVar("Window")
WINDOW = 16  # decode steps; the share of high experts is judged by windows
ADAPTED = 0.95
STEADY = "steady"


def window_name(conversation: int) -> str:
    """The name of the windows of one conversation, counted from 0."""
    return f"topic {conversation}"


def topic_rows(
    switches: int,
    listed: Sequence[Case],
    results: Mapping[str, Sequence[Result]],
    limit_bytes: Callable[[Case], int | None],
) -> list[Result]:
    """The figures of all cases, and each against everything resident and upstream mmap: of_speed,
    of_spread and of_mmap, medians over the runs of ratios within a run."""
    rows = [topic_row(switches, case, results[case.key], limit_bytes(case)) for case in listed]
    good = [row for row in rows if "error" not in row]
    resident = next((row for row in good if row["role"] == "reference"), None)
    for row in good:
        steps = row["tpot_ms_p50_runs"]
        if resident is not None and row is not resident:
            row["of_speed"] = median_ratio(resident["tpot_ms_p50_runs"], steps)
            row["of_spread"] = median_ratio(row["p99_of_p50_runs"], resident["p99_of_p50_runs"])
        for each in good:
            if each["role"] == "mmap" and each["cap"] == row["cap"] and each is not row:
                row["of_mmap"] = median_ratio(each["tpot_ms_p50_runs"], steps)
    return rows


def topic_row(switches: int, case: Case, runs: Sequence[Result], limit_bytes: int | None) -> Result:
    """The figures of one case, medians over its runs.

    tpot_ms and p99_of_p50: of the decode steps of the changing conversations. high: share of
    the routed experts that were high in them, steady_high in their second halves. adapted: decode
    steps after a change of topic until a window has ADAPTED of that, the mean over the changes.
    placed_ms_p50: of the second halves of the conversations, where all that a prompt wanted has
    moved. placed_high: share of the routed experts that were high there, by run.
    promotions: per minute, while the topic changes and on the steady text; waited_ms and
    demand_bytes: over all parts of all runs; most_steps: of the slowest placement of all runs, and
    moved: bytes of transitions by those of the experts that placements changed, both of policies
    that place behind a prompt alone.
    """
    row: Result = {
        "name": case.name,
        "cap": case.cap,
        "role": case.role,
        "limit_bytes": limit_bytes,
    }
    if failed := failure(runs):
        return row | failed
    names = [window_name(at) for at in range(switches + 1)]
    p50 = [_percentile(run, names, 50) for run in runs]
    p99 = [_percentile(run, names, 99) for run in runs]
    row |= {
        "tpot_ms_p50": statistics.median(p50),
        "tpot_ms_p50_runs": p50,
        "tpot_ms_p99": statistics.median(p99),
        "placed_ms_p50_runs": [_placed_ms(run, names) for run in runs],
        "p99_of_p50": median_ratio(p99, p50),
        "p99_of_p50_runs": [high / middle for high, middle in zip(p99, p50, strict=True)],
        "mode": runs[0].get("mode", "upstream"),
    }
    changing = [[part for name in names for part in named(run, name)] for run in runs]
    flat = [part for parts in changing for part in parts]
    if not store_figures(flat):
        return row
    stores = [part["store"] for run in runs for part in run["parts"]]
    shares = [[_high(named(run, name)) for name in names] for run in runs]
    late = [[each for windows in run for each in _second_half(windows)] for run in shares]
    return row | {
        "high": statistics.median(store_figures(parts)["mix"]["high"] for parts in changing),
        "steady_high": statistics.median(map(statistics.mean, late)),
        "placed_high_runs": list(map(statistics.mean, late)),
        "adapted": statistics.median(
            statistics.mean(_adapted(windows) for windows in run[1:]) for run in shares
        ),
        "promotions_per_minute": statistics.median(map(_per_minute, changing)),
        "steady_promotions_per_minute": statistics.median(
            _per_minute(named(run, STEADY)) for run in runs
        ),
        "waited_ms": sum(each["wait_ms"] for each in stores),
        "demand_bytes": sum(each["demand_bytes"] for each in stores),
        "transition_bytes": sum(each["transition_bytes"] for each in stores),
        "policy": runs[-1].get("policy", {}),
        **_placing(runs, stores),
    }


def _placing(runs: Sequence[Result], stores: Sequence[Result]) -> Result:
    """What placements came to, {} of policies without them."""
    said = [run["policy"] for run in runs if "changed_bytes" in run.get("policy", {})]
    if not said:
        return {}
    changed = sum(each["changed_bytes"] for each in said)
    moved = sum(each["transition_bytes"] for each in stores)
    return {
        "most_steps": max(each["most_steps"] for each in said),
        "moved": moved / changed if changed else None,
    }


def _percentile(run: Result, names: Sequence[str], q: float) -> float:
    steps = [each for name in names for each in times_ms(run, name)]
    return float(np.percentile(steps, q))


def _placed_ms(run: Result, names: Sequence[str]) -> float:
    """Median of the steps in the second halves of the conversations."""
    late = [part for name in names for part in _second_half(named(run, name))]
    return float(np.median([each for part in late for each in part["ms"]]))


def _high(windows: Sequence[Result]) -> list[float]:
    """The share of routed experts that were high, by window."""
    return [float(store_figures([window])["mix"]["high"]) for window in windows]


def _second_half(windows: Sequence[Window]) -> Sequence[Window]:
    return windows[len(windows) // 2 :]


def _adapted(shares: Sequence[float]) -> int:
    """Decode steps until the first window that has ADAPTED of the second half's mean share."""
    goal = ADAPTED * statistics.mean(_second_half(shares))
    return WINDOW * next(at for at, share in enumerate(shares) if share >= goal)


def _per_minute(parts: Sequence[Result]) -> float:
    minutes = sum(sum(part["ms"]) for part in parts) / 60e3
    return float(sum(part["store"]["promoted"] for part in parts) / minutes)


def topic_goals(rows: Sequence[Result], usual: str, restless: str) -> list[Result]:
    """What dynaexq is to reach, in each cap: name, value, goal and whether it is met. usual and
    restless name its rows with and without hysteresis."""
    found: list[Result] = []
    for cap in dict.fromkeys(row["cap"] for row in rows if row["cap"] is not None):
        good = {row["name"]: row for row in rows if row["cap"] == cap and "error" not in row}
        row, other = good.get(usual), good.get(restless)
        if row is None:
            continue
        add = partial(_add, found, cap)
        speedup, speed, spread = row.get("of_mmap"), row.get("of_speed"), row["p99_of_p50"]
        add("speed, of upstream mmap", speedup, ">= 15", (speedup or 0) >= 15)
        add("speed, of everything resident", speed, ">= 0.95", (speed or 0) >= 0.95)
        add("p99 / p50", spread, "<= 1.5", spread <= 1.5)
        add("waited, ms", row["waited_ms"], "0", row["waited_ms"] == 0)
        if other is not None and other["steady_promotions_per_minute"]:
            less = row["steady_promotions_per_minute"] / other["steady_promotions_per_minute"]
            add(
                "promotions on a steady text, of those without",
                less,
                "< 0.5",
                less < 0.5,
            )
    return found


def placement_goals(rows: Sequence[Result], placed: str, low: str) -> list[Result]:
    """What the near-data paper's placement is to reach, in each cap, as topic_goals. placed and
    low name its row and that of every expert low."""
    found: list[Result] = []
    resident = next((each for each in rows if each["role"] == "reference"), None)
    if resident is not None and "error" in resident:
        resident = None
    for cap in dict.fromkeys(row["cap"] for row in rows if row["cap"] is not None):
        good = {row["name"]: row for row in rows if row["cap"] == cap and "error" not in row}
        row, all_low = good.get(placed), good.get(low)
        if row is None:
            continue
        add = partial(_add, found, cap)
        if resident is not None and all_low is not None:
            equal = _same_bits_ms(row, resident, all_low)
            speed = median_ratio(equal, row["placed_ms_p50_runs"])
            name = "context: speed once placed, of everything resident at the same bits"
            add(name, speed, ">= 0.95", speed >= 0.95)
        steps, moved, needed = row.get("most_steps", 0), row.get("moved"), row["demand_bytes"]
        add("context: steps until all moved, at most", steps, "<= 64", steps <= 64)
        add("context: waited, ms", row["waited_ms"], "0", row["waited_ms"] == 0)
        add("context: bytes that tokens waited for", needed, "0", needed == 0)
        add("context: moved, of what changed", moved, "<= 1.1", (moved or 0) <= 1.1)
    return found


def _same_bits_ms(row: Result, resident: Result, low: Result) -> list[float]:
    """For each run, what a step takes with everything resident at the bits of a row: that of
    everything high and that of everything low, by the share of high in the row."""
    return [
        share * high_ms + (1.0 - share) * low_ms
        for share, high_ms, low_ms in zip(
            row["placed_high_runs"],
            resident["placed_ms_p50_runs"],
            low["placed_ms_p50_runs"],
            strict=True,
        )
    ]


def _add(
    found: list[Result], cap: float, name: str, value: float | None, goal: str, met: bool
) -> None:
    if value is not None:
        found.append({"cap": cap, "name": name, "value": value, "goal": goal, "met": met})
