"""What the reports of all benchmarks share: their heading, columns, titles and footnotes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gguf_tools.units import format_size
from orchestrator.lab.bench.rows import Result, caps_of
from orchestrator.lab.table import Column, fixed, percent

MIB, MB = 2**20, 1e6


def show_mix(mix: dict[str, float]) -> str:
    """Shares of high, low and skipped experts in percent."""
    return "/".join(percent()(mix[key]) for key in ("high", "low", "skip"))


NAME = Column("", "name", left=True)
HIT = Column("hit", "hit_rate", percent(1), "%")
MIX = Column("hi/lo/skip", "mix", show_mix, "%")
TOKENS = Column("tok/s", "tokens_per_s", fixed(1))
TTFT = Column("TTFT", "ttft_ms", fixed(0), "ms")


def step(digits: int) -> Column:
    """The median decode step, in milliseconds with so many digits."""
    return Column("p50", "tpot_ms_p50", fixed(digits), "ms")


def slowest(digits: int) -> Column:
    """What the slowest hundredth of the steps took at least."""
    return Column("p99", "tpot_ms_p99", fixed(digits), "ms")


def moved(key: str = "bytes_per_token", digits: int = 1) -> Column:
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
    for rows in caps_of(report["cases"]):
        cap, limit = rows[0]["cap"], rows[0]["limit_bytes"]
        title = "everything resident" if cap is None else report["cap"].format(cap)
        if limit is not None:
            title += f", {limit / MIB:.0f} MiB"
        yield f"{title}; {made}", rows


def memory_notes(rows: Sequence[Result]) -> list[str]:
    """Memory against what was promised, and what else does not fit a table."""
    lines = []
    for row in rows:
        if "budget_bytes" not in row:
            continue
        parts = [f"peak {row['peak_bytes'] / MIB:.0f} MiB"]
        if row["limit_bytes"]:
            over = row["peak_bytes"] > row["limit_bytes"]
            promised = "OVER its promise of" if over else "promised"
            parts.append(f"{promised} {row['limit_bytes'] / MIB:.0f}")
        parts.append(f"slots {row['budget_bytes'] / MIB:.0f} MiB")
        if row["callback_us_p50"] is not None:
            parts.append(f"callback {row['callback_us_p50']:.0f} us")
        lines.append(f"{row['name']}: {', '.join(parts)}")
    return lines


def bound_note(row: Result) -> str:
    """What binds a row that has a bound."""
    return (
        f"{row['name']}: bound {1e3 / row['bound_tpot_ms']:.1f} tok/s by {row['bound_by']} "
        f"(computing {row['bound_compute_ms']:.1f} ms, misses {row['bound_wait_ms']:.1f})"
    )
