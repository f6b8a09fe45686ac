"""The benchmark's figures as a table of at most 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gguf_tools.units import format_size

WIDTH = 100

_HEAD = (
    f"{'':22}{'tok/s':>7}{'p50 ms':>8}{'p99 ms':>8}{'TTFT ms':>9}{'hit %':>7}{'MB/tok':>8}"
    f"{'hi/lo/skip %':>14}{'of bound':>10}{'x mmap':>7}"
)


def render(report: dict[str, Any]) -> str:
    """The report of bench.run as text."""
    options = report["options"]
    intro = [
        f"{options['tokens']} decode steps with the same {tokens_of(report)} tokens for all, "
        f"{options['prompt_tokens']} before them,",
        f"{options['runs']} runs in turn, speeds from the median step; dymoe at r = "
        f"{options['retention']}",
        "bound: the slower of the managed path with everything resident, and missed bytes / reads",
    ]
    return document(
        report,
        intro,
        lambda rows: [_HEAD, *(_row(row) for row in rows), *notes(rows)],
        ["", *_ratios(report["ratios"])],
    )


def document(
    report: dict[str, Any],
    intro: Sequence[str],
    section: Callable[[list[dict[str, Any]]], Sequence[str]],
    ends: Sequence[str] = (),
) -> str:
    """A report as text: its heading and intro, a section for the rows of each cap, the ends, and
    what was skipped."""
    lines = [*heading(report), *intro]
    for cap in dict.fromkeys(row["cap"] for row in report["cases"]):
        rows = [row for row in report["cases"] if row["cap"] == cap]
        lines += ["", title(cap, rows), *section(rows)]
    lines += [*ends, "", *(f"note: {reason}" for reason in report["skipped"])]
    return "\n".join(lines).rstrip()


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


def tokens_of(report: dict[str, Any]) -> str:
    """What the tokens are."""
    return "text" if report["model"]["trained"] else "random"


def title(cap: float | None, rows: list[dict[str, Any]]) -> str:
    """What these rows had in common."""
    if cap is None:
        return "everything resident"
    if rows[0].get("vram_bytes"):
        total = rows[0]["vram_bytes"] / 2**20
        return f"room for {cap:.0%} of the experts on the GPU, {total:.0f} MiB in all"
    limit = rows[0]["limit_bytes"]
    if limit is None:
        return f"expert slots of {cap:.0%} of the experts"
    return f"whole process within {cap:.0%} of the file, {limit / 2**20:.0f} MiB"


def _routing_line(routing: str, measured: dict[str, Any] | None) -> str:
    if measured is None:
        return f"{routing} routing, not measured"
    use = measured["use"]
    top = " ".join(f"{share * 100:.0f}" for share in use[:6])
    return (
        f"{routing} routing, measured on {measured['tokens']} tokens: the experts of a layer are "
        f"used by {top} ..\n  {use[len(use) // 2] * 100:.1f} (median) .. {use[-1] * 100:.1f} % of "
        f"the tokens, most used first; exponent {measured['exponent']:.2f}"
    )


def percent(value: float | None, digits: int = 0) -> str:
    """A share as a number of percent; nothing for None."""
    return "" if value is None else f"{value * 100:.{digits}f}"


def _row(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']:22} {row['error']}"[:WIDTH]
    parts = mix_of(row)
    moved = row.get("bytes_per_token")
    bound, speedup = row.get("of_bound"), row.get("speedup_mmap")
    cells = (
        f"{row['name']:22}{row['tokens_per_s']:7.1f}{row['tpot_ms_p50']:8.1f}"
        f"{row['tpot_ms_p99']:8.1f}{row['ttft_ms']:9.0f}{percent(row.get('hit_rate'), 1):>7}"
    )
    cells += f"{'' if moved is None else f'{moved / 1e6:.1f}':>8}{parts:>14}"
    cells += f"{'' if bound is None else f'{bound * 100:.0f} %':>10}"
    cells += f"{'' if speedup is None else f'{speedup:.1f}':>7}"
    return cells.rstrip()


def mix_of(row: dict[str, Any]) -> str:
    """Shares of high, low and skipped experts in percent."""
    mix = row.get("mix")
    return "/".join(percent(mix[key]) for key in ("high", "low", "skip")) if mix else ""


def notes(rows: list[dict[str, Any]]) -> list[str]:
    """Memory against what was promised, and what else does not fit a table."""
    lines = []
    for row in rows:
        if "budget_bytes" not in row:
            continue
        parts = [f"peak {row['peak_rss_bytes'] / 2**20:.0f} MiB"]
        if row["limit_bytes"]:
            kept = "OVER its promise of" if row["over_promise"] else "promised"
            parts.append(f"{kept} {row['limit_bytes'] / 2**20:.0f}")
        parts.append(f"slots {row['budget_bytes'] / 2**20:.0f} MiB")
        if "bound_tpot_ms" in row:
            parts.append(f"bound {1e3 / row['bound_tpot_ms']:.1f} tok/s")
        if row.get("callback_us_p50") is not None:
            parts.append(f"callback {row['callback_us_p50']:.0f} us")
        if not row["direct_io"]:
            parts.append("buffered I/O")
        lines.append(f"  {row['name']}: {', '.join(parts)}")
    return lines


def _ratios(ratios: dict[str, float]) -> list[str]:
    labels = {
        "plain_of_best_upstream": "resident, plain path: {:.2f} of upstream at its best flags",
        "managed_of_upstream_without_repack": (
            "resident, managed path: {:.2f} of upstream without repack"
        ),
    }
    return [labels[key].format(value) for key, value in ratios.items()]
