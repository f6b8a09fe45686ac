"""What the reports of all benchmarks share: their columns and footnotes."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.lab.bench.rows import Result, good
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
# What the slowest hundredth of the steps took at least.
SLOWEST = Column("p99", "tpot_ms_p99", fixed(1), "ms")


def step(digits: int) -> Column:
    """The median decode step, in milliseconds with so many digits."""
    return Column("p50", "tpot_ms_p50", fixed(digits), "ms")


def moved(key: str = "bytes_per_token") -> Column:
    """Megabytes that were moved for a token."""
    return Column("MB/tok", key, fixed(1, MB))


def row_notes(rows: Sequence[Result]) -> list[str]:
    """Memory of the rows with a store, and of those that are over their cap; and what binds the
    rows that have a bound."""
    lines = []
    for row in good(rows):
        limit = row["limit_bytes"]
        over = limit is not None and row["peak_bytes"] > limit
        if not over and "budget_bytes" not in row:
            continue
        parts = [f"peak {row['peak_bytes'] / MIB:.0f} MiB"]
        if limit is not None:
            parts.append(f"{'OVER' if over else 'within'} its cap of {limit / MIB:.0f}")
        if "budget_bytes" in row:
            parts.append(f"slots {row['budget_bytes'] / MIB:.0f} MiB")
        if row.get("callback_us_p50") is not None:
            parts.append(f"callback {row['callback_us_p50']:.0f} us")
        lines.append(f"{row['name']}: {', '.join(parts)}")
    return lines + [_bound_note(row) for row in rows if "bound_tpot_ms" in row]


def _bound_note(row: Result) -> str:
    line = (
        f"{row['name']}: bound {1e3 / row['bound_tpot_ms']:.1f} tok/s by {row['bound_by']} "
        f"(computing {row['bound_compute_ms']:.1f} ms, misses {row['bound_wait_ms']:.1f})"
    )
    if "probe_bytes_per_s" in row:
        probes = row["probe_bytes_per_s"]
        line += (
            f", read at {row['read_bytes_per_s'] / 1e9:.2f} GB/s, probes {min(probes) / 1e9:.2f} "
            f"to {max(probes) / 1e9:.2f}"
        )
    return line
