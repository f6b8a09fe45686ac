"""What the reports of all benchmarks share: their heading, columns, titles and footnotes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gguf_tools.units import format_size
from orchestrator.lab.bench.rows import Result
from orchestrator.lab.table import Column, Table, fixed, percent

MIB, MB = 2**20, 1e6


def show_mix(mix: dict[str, float]) -> str:
    """Shares of high, low and skipped experts in percent."""
    return "/".join(percent()(mix[key]) for key in ("high", "low", "skip"))


NAME = Column("", "name", left=True)
HIT = Column("hit", "hit_rate", percent(1), "%")
MIX = Column("hi/lo/skip", "mix", show_mix, "%")


def speeds(digits: int) -> tuple[Column, ...]:
    """How fast a case is; digits: of milliseconds a token."""
    return (
        NAME,
        Column("tok/s", "tokens_per_s", fixed(1)),
        Column("p50", "tpot_ms_p50", fixed(digits), "ms"),
        Column("p99", "tpot_ms_p99", fixed(digits), "ms"),
        Column("TTFT", "ttft_ms", fixed(0), "ms"),
        HIT,
    )


def moved(key: str, digits: int = 1) -> Column:
    """Megabytes that were moved for a token."""
    return Column("MB/tok", key, fixed(digits, MB))


def heading(report: dict[str, Any]) -> list[str]:
    """The model, the machine, the disk and the routing."""
    model, bandwidth = report["model"], report["bandwidth"]
    threads = report["options"]["threads"]
    return [
        f"{model['shape']}: {model['n_layers']} layers of {model['n_expert']} experts, top-"
        f"{model['n_expert_used']}, {format_size(model['file_bytes'])} in "
        f"{model['tiers'][0]}, {'trained' if model['trained'] else 'random weights'}",
        f"{report['machine']['processor']}, {report['machine']['cores']} cores, "
        f"{threads} compute thread{'s' if threads > 1 else ''}",
        f"{'direct' if bandwidth['direct'] else 'buffered'} reads of "
        f"{bandwidth['slice_bytes'] / 1e6:.2f} MB by {bandwidth['threads']} threads: "
        f"{bandwidth['bytes_per_s'] / 1e9:.2f} GB/s "
        f"({', '.join(f'{each / 1e9:.2f}' for each in bandwidth['runs'])})",
        _routing_line(report["options"]["routing"], report["routing"]),
    ]


def _routing_line(routing: str, measured: dict[str, Any] | None) -> str:
    if measured is None:
        return f"{routing} routing, not measured"
    use = measured["use"]
    top = " ".join(f"{share * 100:.0f}" for share in use[:6])
    return (
        f"{routing} routing, measured on {measured['tokens']} tokens: the experts of a layer are "
        f"used by {top} .. {use[len(use) // 2] * 100:.1f} (median) .. {use[-1] * 100:.1f} % of "
        f"the tokens, most used first; exponent {measured['exponent']:.2f}"
    )


def tokens_of(report: dict[str, Any]) -> str:
    """What the tokens are."""
    return "text" if report["model"]["trained"] else "random"


def by_cap(report: dict[str, Any]) -> Iterator[tuple[str, list[Result]]]:
    """(title, rows) of each cap, everything resident first. A title says what a shortened model
    of random weights is, and how often it ran: a table is quoted without its heading."""
    model, runs = report["model"], report["options"]["runs"]
    made = f"{model['n_layers']} layers, {runs} run{'s' if runs > 1 else ''}"
    if model["residual_power"] is not None:
        made += f", a layer adds {model['residual_power']:.1f} of the stream's power"
    for cap in dict.fromkeys(row["cap"] for row in report["cases"]):
        rows = [row for row in report["cases"] if row["cap"] == cap]
        yield f"{cap_title(cap, rows)}; {made}", rows


def cap_title(cap: float | None, rows: Sequence[Result]) -> str:
    """What the rows of one cap have in common."""
    if cap is None:
        return "everything resident"
    if rows[0].get("vram_bytes"):
        total = rows[0]["vram_bytes"] / MIB
        return f"room for {cap:.0%} of the experts on the GPU, {total:.0f} MiB in all"
    limit = rows[0]["limit_bytes"]
    if limit is None:
        return f"expert slots of {cap:.0%} of the experts"
    return f"whole process within {cap:.0%} of the file, {limit / MIB:.0f} MiB"


def memory_notes(rows: Sequence[Result]) -> list[str]:
    """Memory against what was promised, and what else does not fit a table."""
    lines = []
    for row in rows:
        if "budget_bytes" not in row:
            continue
        parts = [f"peak {row['peak_rss_bytes'] / MIB:.0f} MiB"]
        if row["limit_bytes"]:
            kept = "OVER its promise of" if row["over_promise"] else "promised"
            parts.append(f"{kept} {row['limit_bytes'] / MIB:.0f}")
        parts.append(f"slots {row['budget_bytes'] / MIB:.0f} MiB")
        if row.get("callback_us_p50") is not None:
            parts.append(f"callback {row['callback_us_p50']:.0f} us")
        if not row["direct_io"]:
            parts.append("buffered I/O")
        lines.append(f"{row['name']}: {', '.join(parts)}")
    return lines


_VERDICTS = {True: "met", False: "MISSED", None: "not measured"}


def goal_table(title: str, goals: Sequence[Result], *columns: Column) -> Table:
    """Goals, each under its own columns and with whether it was met."""
    return Table(
        title, (*columns, Column("", lambda goal: _VERDICTS[goal["met"]], left=True)), goals
    )


def at_cap(name: str) -> Callable[[Result], str]:
    """Takes the name of a goal, and the cap that it is for."""

    def named(goal: Result) -> str:
        cap = goal["cap"]
        return str(goal[name]) if cap is None else f"{goal[name]}, at {cap:.0%}"

    return named
