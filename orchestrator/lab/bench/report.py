"""What the reports of all benchmarks share: their heading, columns, titles and footnotes."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

from gguf_tools.process import processor_name
from gguf_tools.synthetic.tensors import RESIDUAL_POWER
from gguf_tools.units import format_size
from orchestrator.lab.bench.loop import Loop
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


def step(digits: int) -> Column:
    """The median decode step, in milliseconds with so many digits."""
    return Column("p50", "tpot_ms_p50", fixed(digits), "ms")


def slowest(digits: int) -> Column:
    """What the slowest hundredth of the steps took at least."""
    return Column("p99", "tpot_ms_p99", fixed(digits), "ms")


def moved(key: str = "bytes_per_token", digits: int = 1) -> Column:
    """Megabytes that were moved for a token."""
    return Column("MB/tok", key, fixed(digits, MB))


def heading(loop: Loop) -> list[str]:
    """The model, the machine, the disk and the routing."""
    options, model, disks = loop.options, loop.model, loop.bandwidths
    threads, speeds = options.n_threads, [each.bytes_per_s / 1e9 for each in disks]
    return [
        f"{options.model_name}: {model.n_layers} layers of {model.n_expert} experts, top-"
        f"{model.n_expert_used}, {format_size(loop.file_bytes)} in {model.tiers[0].name}, "
        f"{'trained' if options.trained else 'random weights'}",
        f"{processor_name()}, {len(os.sched_getaffinity(0))} cores, {threads} compute "
        f"thread{'s' if threads > 1 else ''}",
        f"{'direct' if all(each.direct for each in disks) else 'buffered'} reads of "
        f"{disks[0].slice_bytes / 1e6:.2f} MB by {options.io_threads} threads: "
        f"{statistics.median(speeds):.2f} GB/s ({', '.join(f'{each:.2f}' for each in speeds)})",
        f"{'trained' if options.trained else options.routing} routing",
    ]


def made_of(loop: Loop) -> str:
    """What a shortened model of random weights is, and how often it ran: a table is quoted without
    its heading."""
    runs = loop.options.runs
    made = f"{loop.model.n_layers} layers, {runs} run{'s' if runs > 1 else ''}"
    if loop.options.trained:
        return made
    return f"{made}, a layer adds {RESIDUAL_POWER:.1f} of the stream's power"


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
