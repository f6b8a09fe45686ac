"""`moe-edge bench`: upstream and every policy under memory caps, and against the bound."""

from __future__ import annotations

import statistics
from typing import Any

from orchestrator.bench.loop import Loop
from orchestrator.bench.models import Note
from orchestrator.bench.plan import MANAGED, NO_REPACK, PLAIN, REPACK, BenchOptions, cases
from orchestrator.bench.rows import case_row, median_ratio


def run(options: BenchOptions, note: Note = lambda text: None) -> dict[str, Any]:
    """Measures everything and returns one JSON-ready object; note gets progress lines.

    Raises MoeEdgeError where no model can be made or read; a case that fails is reported
    in its row instead.
    """
    loop = Loop.prepare(options, note)
    listed = cases(options)
    measured = loop.run(listed)
    rows = [case_row(case, measured.results[case.key], loop.limit_bytes(case)) for case in listed]
    _compare(rows, [each.bytes_per_s for each in measured.bandwidths])
    return loop.describe(measured) | {"ratios": _resident_ratios(rows), "cases": rows}


def _compare(rows: list[dict[str, Any]], bytes_per_s: list[float]) -> None:
    """Adds the bound and the ratios of each row, run by run: what a run compares ran within
    minutes of each other, and a machine's speed drifts.

    Bound of a token: max(computing, missed bytes / bandwidth), computing
    being the managed path with everything resident.
    """
    good = [row for row in rows if "error" not in row]
    reference = next((row["tpot_ms_p50_runs"] for row in good if row["role"] == "reference"), None)
    for row in good:
        steps = row["tpot_ms_p50_runs"]
        if row["cap"] is None:
            continue
        needed = row.get("needed_bytes_per_token_runs")
        if needed and reference:
            bounds = [
                max(compute_ms, moved / speed * 1e3)
                for compute_ms, moved, speed in zip(reference, needed, bytes_per_s, strict=True)
            ]
            row["bound_tpot_ms"] = statistics.median(bounds)
            row["of_bound"] = median_ratio(bounds, steps)
        mapped = [
            each["tpot_ms_p50_runs"]
            for each in good
            if each["role"] == "mmap" and each["cap"] == row["cap"]
        ]
        if mapped:
            row["speedup_mmap"] = median_ratio(
                [min(each) for each in zip(*mapped, strict=True)], steps
            )


def _resident_ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Speed with everything resident against upstream, medians over the runs."""
    steps = {
        row["name"]: row["tpot_ms_p50_runs"]
        for row in rows
        if row["cap"] is None and "error" not in row
    }
    upstream = [steps[name] for name in (REPACK, NO_REPACK) if name in steps]
    ratios = {}
    if PLAIN in steps and upstream:
        best = [min(each) for each in zip(*upstream, strict=True)]
        ratios["plain_of_best_upstream"] = median_ratio(best, steps[PLAIN])
    if MANAGED in steps and NO_REPACK in steps:
        ratios["managed_of_upstream_without_repack"] = median_ratio(
            steps[NO_REPACK], steps[MANAGED]
        )
    return ratios
