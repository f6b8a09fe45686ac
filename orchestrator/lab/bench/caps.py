"""`moe-edge bench`: upstream and every policy under memory caps, and against the bound."""

from __future__ import annotations

import statistics
from typing import Any

from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.cases import (
    MANAGED,
    NO_REPACK,
    PLAIN,
    REPACK,
    RESIDENT,
    Case,
    mapped,
    policies,
)
from orchestrator.lab.bench.loop import Loop, Measured
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.report import MIX, by_cap, memory_notes, moved, speeds, tokens_of
from orchestrator.lab.bench.rows import Result, case_row, median_ratio
from orchestrator.lab.table import Column, Table, fixed, percent

COLUMNS = (
    *speeds(1),
    moved("bytes_per_token"),
    MIX,
    Column("of bound", "of_bound", percent(0, " %")),
    Column("x mmap", "speedup_mmap", fixed(1)),
)


def cap_cases(options: BenchOptions) -> list[Case]:
    """Everything in memory; then, under each cap, upstream and every policy of ours."""
    listed = list(RESIDENT)
    for cap in options.caps:
        listed += [
            mapped(cap),
            Case("upstream mmap, repack", "upstream", cap, "", {"mmap": True, "extra_bufts": True}),
            *policies(cap, options.retention),
        ]
    return listed


class Caps(Benchmark[Loop[BenchOptions]]):
    """Upstream and every policy side by side."""

    options = BenchOptions
    listed = staticmethod(cap_cases)

    def figures(self, loop: Loop[BenchOptions], measured: Measured) -> Result:
        rows = [case_row(case, runs, loop.limit_bytes(case)) for case, runs in measured.each()]
        _add_bounds(rows, [each.bytes_per_s for each in measured.bandwidths])
        return {"ratios": _resident_ratios(rows), "cases": rows}

    def intro(self, report: Result) -> list[str]:
        options = report["options"]
        return [
            f"{options['tokens']} decode steps with the same {tokens_of(report)} tokens for all, "
            f"{options['prompt_tokens']} before them; {options['runs']} runs in turn, speeds from "
            f"the median step; dymoe at r = {options['retention']}",
            "bound: the slower of the managed path with everything resident, and missed bytes / "
            "reads",
        ]

    def tables(self, report: Result) -> list[Table]:
        found = [Table(title, COLUMNS, rows, memory_notes(rows)) for title, rows in by_cap(report)]
        found[0].footnotes += _ratio_notes(report["ratios"])
        return found


def _add_bounds(rows: list[dict[str, Any]], bytes_per_s: list[float]) -> None:
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
                max(compute_ms, missed / speed * 1e3)
                for compute_ms, missed, speed in zip(reference, needed, bytes_per_s, strict=True)
            ]
            row["bound_tpot_ms"] = statistics.median(bounds)
            row["of_bound"] = median_ratio(bounds, steps)
        mmap_runs = [
            each["tpot_ms_p50_runs"]
            for each in good
            if each["role"] == "mmap" and each["cap"] == row["cap"]
        ]
        if mmap_runs:
            row["speedup_mmap"] = median_ratio(
                [min(each) for each in zip(*mmap_runs, strict=True)], steps
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


def _ratio_notes(ratios: dict[str, float]) -> list[str]:
    labels = {
        "plain_of_best_upstream": "resident, plain path: {:.2f} of upstream at its best flags",
        "managed_of_upstream_without_repack": (
            "resident, managed path: {:.2f} of upstream without repack"
        ),
    }
    return [labels[key].format(value) for key, value in ratios.items()]
