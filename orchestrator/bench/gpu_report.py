"""The figures of `moe-edge bench gpu` as tables of at most 100 columns."""

from __future__ import annotations

from typing import Any

from gguf_tools.units import format_size
from orchestrator.bench.report import WIDTH, document, mix_of, percent, tokens_of
from orchestrator.bench.rows import Result

_HEAD = (
    f"{'':25}{'tok/s':>8}{'p50 ms':>8}{'p99 ms':>8}{'TTFT ms':>9}{'hit %':>7}{'MB/tok':>8}"
    f"{'hi/lo/skip':>11}{'x TPOT':>8}{'x TTFT':>8}"
)
_HEAD_2 = (
    f"{'':25}{'bound ms':>9}{'of it':>7}{'':2}{'bound by':10}{'prompt GB/s':>12}{'of peak':>8}"
    f"{'x row 1':>8}{'GPU MiB':>9}"
)


def render_gpu(report: dict[str, Any]) -> str:
    """The report of run_gpu as text."""
    options, gpu = report["options"], report["gpu"]
    names = ("pinned", "pageable", "read", "compute")
    pinned, pageable, read, compute = (_speeds(gpu["copies"], name) for name in names)
    intro = [
        f"{gpu['name']}, {format_size(gpu['total_bytes'])}; copies to it {pinned} pinned, "
        f"{pageable} pageable",
        f"{options['tokens']} decode steps with the same {tokens_of(report)} tokens for all, "
        f"{options['prompt_tokens']} before them, {options['runs']} runs in turn;",
        f"in place {read}, by the host {compute}; x: against upstream's best; "
        f"dymoe at r = {options['retention']}",
        "bound: the slower of computing (all on the GPU) and what tokens missed / those speeds",
        "rows 1 to 6: Table 3 of DyMoE, misses copied",
    ]

    def section(rows: list[Result]) -> list[str]:
        more = [row for row in rows if "error" not in row]
        return [_HEAD, *map(_row, rows), "", _HEAD_2, *map(_more, more)]

    return document(report, intro, section, ["", "goals", *map(_goal, report["goals"])])


def _speeds(copies: list[Result], name: str) -> str:
    if not copies[0][name]:
        return "refused"
    return ", ".join(f"{each[name] / 1e9:.2f}" for each in copies) + " GB/s"


def _number(value: float | None, width: int, digits: int = 2) -> str:
    return " " * width if value is None else f"{value:{width}.{digits}f}"


def _row(row: Result) -> str:
    if "error" in row:
        return f"{row['name']:25} {row['error']}"[:WIDTH]
    moved = row.get("copied_bytes_per_token")
    cells = (
        f"{row['name']:25}{row['tokens_per_s']:8.1f}{row['tpot_ms_p50']:8.2f}"
        f"{row['tpot_ms_p99']:8.2f}{row['ttft_ms']:9.0f}{percent(row.get('hit_rate'), 1):>7}"
        f"{_number(None if moved is None else moved / 1e6, 8, 1)}{mix_of(row):>11}"
        f"{_number(row.get('speedup'), 8)}{_number(row.get('ttft_speedup'), 8)}"
    )
    return cells.rstrip()


def _more(row: Result) -> str:
    speeds = row.get("prompt_copy_speed_runs")
    speed = sorted(speeds)[len(speeds) // 2] / 1e9 if speeds else None
    over = " OVER cap" if row["over_cap"] else ""
    cells = (
        f"{row['name']:25}{_number(row.get('bound_tpot_ms'), 9)}{_share(row.get('of_bound')):>7}"
        f"  {row.get('bound_by', ''):10}{_number(speed, 12)}{_share(row.get('of_copy_peak')):>8}"
        f"{_number(row.get('over_demand'), 8)}{row['used_bytes'] / 2**20:9.0f}{over}"
    )
    return cells.rstrip()


def _share(value: float | None) -> str:
    return "" if value is None else f"{value * 100:.0f} %"


def _goal(goal: Result) -> str:
    verdict = {True: "met", False: "missed", None: "not measured"}[goal["met"]]
    where = "" if goal["cap"] is None else f"{goal['cap']:.0%}: "
    text = f"  {where}{goal['goal']}"
    if goal["least"] is not None:
        text += f" >= {goal['least']:.2f}"
    if goal["measured"] is not None:
        text += f": {goal['measured']:.2f} ({goal['row']})"
    return f"{text}: {verdict}"
