"""The tables of `moe-edge bench gpu`."""

from __future__ import annotations

import statistics

from gguf_tools.units import format_size
from orchestrator.lab.bench.report import (
    MIB,
    MIX,
    NAME,
    at_cap,
    by_cap,
    goal_table,
    moved,
    speeds,
    tokens_of,
)
from orchestrator.lab.bench.rows import Result
from orchestrator.lab.table import Column, Row, Table, fixed, percent


def _prompt_speed(row: Row) -> float | None:
    """The median of what was copied in a second while a prompt was read."""
    speeds = row.get("prompt_copy_speed_runs")
    return statistics.median_high(speeds) if speeds else None


SPEED_COLUMNS = (
    *speeds(2),
    moved("copied_bytes_per_token"),
    MIX,
    Column("x TPOT", "speedup", fixed(2)),
    Column("x TTFT", "ttft_speedup", fixed(2)),
)
BOUND_COLUMNS = (
    NAME,
    Column("bound", "bound_tpot_ms", fixed(2), "ms"),
    Column("of it", "of_bound", percent(0, " %")),
    Column("bound by", "bound_by", left=True),
    Column("prompt", _prompt_speed, fixed(2, 1e9), "GB/s"),
    Column("of peak", "of_copy_peak", percent(0, " %")),
    Column("x row 1", "over_demand", fixed(2)),
    Column("GPU", "used_bytes", fixed(0, MIB), "MiB"),
    Column("", lambda row: "OVER cap" if row["over_cap"] else None, left=True),
)


def gpu_intro(report: Result) -> list[str]:
    """What was measured and what the columns mean."""
    options, gpu = report["options"], report["gpu"]
    names = ("pinned", "pageable", "read", "compute")
    pinned, pageable, read, compute = (_speeds(gpu["copies"], name) for name in names)
    return [
        f"{gpu['name']}, {format_size(gpu['total_bytes'])}; copies to it {pinned} pinned, "
        f"{pageable} pageable; in place {read}, by the host {compute}",
        f"{options['tokens']} decode steps with the same {tokens_of(report)} tokens for all, "
        f"{options['prompt_tokens']} before them, {options['runs']} runs in turn; x: against "
        f"upstream's best; dymoe at r = {options['retention']}",
        "bound: the slower of computing (all on the GPU) and what tokens missed / those speeds",
        "rows 1 to 6: Table 3 of DyMoE, misses copied",
    ]


def gpu_tables(report: Result) -> list[Table]:
    """Speeds and bounds of each share, and the goals."""
    found = []
    for title, rows in by_cap(report):
        good = [row for row in rows if "error" not in row]
        found += [Table(title, SPEED_COLUMNS, rows), Table("", BOUND_COLUMNS, good)]
    if report["goals"]:
        found.append(
            goal_table(
                "goals",
                report["goals"],
                Column("", at_cap("goal"), left=True),
                Column("measured", "measured", fixed(2)),
                Column("goal", "least", lambda least: f">= {least:.2f}"),
                Column("by", "row", left=True),
            )
        )
    return found


def _speeds(copies: list[Result], name: str) -> str:
    if not copies[0][name]:
        return "refused"
    return ", ".join(f"{each[name] / 1e9:.2f}" for each in copies) + " GB/s"
