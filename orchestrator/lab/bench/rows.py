"""Rows of benchmark tables: the metrics of a case, comparisons of rows, columns and footnotes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from orchestrator.lab.bench.cases import Case
from orchestrator.lab.bench.child import COLD, DECODE, PROMPT
from orchestrator.lab.table import Column, fixed, percent

Result = dict[str, Any]


def named(run: Result, name: str) -> list[Result]:
    """Return the parts (prompts or decode steps) of a run that have this name."""
    return [part for part in run["parts"] if part["name"] == name]


def times_ms(run: Result, name: str) -> list[float]:
    """Return the times of the prompts or decode steps of one process, in milliseconds.

    - run: the measurements of the process. They consist of named parts, each with one or more
      prompts or decode steps.
    - name: the parts to use, such as "decode".
    """
    return [each for part in named(run, name) for each in part["ms"]]


def median_ms(runs: Sequence[Result], name: str) -> list[float]:
    """Return a list with one time for each run: the median over its prompts or decode steps.

    The times are in milliseconds.

    - runs: the measurements of each run. They consist of named parts, each with one or more prompts
      or decode steps.
    - name: the parts to use, such as "decode".
    """
    return [float(np.median(times_ms(run, name))) for run in runs]


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Compute numerator / denominator for each run, and return the median of these ratios.

    Only values of the same run are divided, because the machine's speed drifts between runs.
    """
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def good(rows: Sequence[Result]) -> list[Result]:
    """Return only the rows whose measurement did not fail."""
    return [row for row in rows if "error" not in row]


def best_runs(rows: Sequence[Result], key: str = "tpot_ms_p50_runs") -> list[float]:
    """Return the smallest time among several table rows, separately for each run.

    A run is one repetition of the measurement. Each row has a list with one time for each run, and
    the result is such a list too. Rows whose measurement failed are ignored. If all rows failed,
    the result is [].

    - key: the key of the list in a row. By default, a time in the list is the median over all
      decode steps of the run.
    """
    return [min(each) for each in zip(*(row[key] for row in good(rows)), strict=True)]


def add_ratio(
    rows: Sequence[Result], name: str, bases: Sequence[Result], key: str = "tpot_ms_p50_runs"
) -> None:
    """Add to each table row its speed relative to the fastest row of `bases`, under the key `name`.

    Does nothing if `bases` is empty.

    - key: the key under which a row has its list of times. By default, these are the median times
      of decode steps.
    """
    best = best_runs(bases, key)
    for row in good(rows):
        if best:
            row[name] = median_ratio(best, row[key])


def caps_of(rows: Sequence[Result]) -> list[list[Result]]:
    """Group rows of a benchmark by memory cap, and return one list of rows for each cap.

    The lists, and the rows in each list, are in the order in which they first appear in `rows`.
    """
    caps = dict.fromkeys(row["cap"] for row in rows)
    return [[row for row in rows if row["cap"] == cap] for cap in caps]


def add_bound(row: Result, compute_ms: Sequence[float], waits_ms: Sequence[list[float]]) -> None:
    """Add a lower bound of the time per token, in milliseconds, to a table row.

    A decode step takes at least its compute time, and at least the time to load its missing
    experts. The longer of these two times is the bound of the step.

    - compute_ms: for each run (repetition), the compute time of a step.
    - waits_ms: for each run, a list with the time to load the missing experts of each step.

    The row gets these entries, among others:

    - "bound_tpot_ms": the median of the steps' bounds in each run, and then the median over the
      runs.
    - "of_bound": the bound divided by the measured time per token, as a median over the runs.
    """
    bounds = [
        statistics.median(max(compute, wait) for wait in waits)
        for compute, waits in zip(compute_ms, waits_ms, strict=True)
    ]
    waited = [statistics.median(waits) for waits in waits_ms]
    row |= {
        "bound_tpot_ms": statistics.median(bounds),
        "bound_by": "misses" if sum(waited) > sum(compute_ms) else "computing",
        "bound_compute_ms": statistics.median(compute_ms),
        "bound_wait_ms": statistics.median(waited),
        "of_bound": median_ratio(bounds, row["tpot_ms_p50_runs"]),
    }


def per_token(run: Result, key: str) -> float:
    """Return the mean value of a counter per decoded token, such as the bytes read from disk.

    - run: the measurements of one process.
    - key: name of the counter, such as "bytes". It is one of the counters of the expert store, the
      cache of experts in memory.
    """
    parts = named(run, DECODE)
    return float(sum(part["store"][key] for part in parts) / sum(part["tokens"] for part in parts))


def case_row(case: Case, runs: Sequence[Result], limit_bytes: int | None) -> Result:
    """Return the metrics of one benchmark case as a table row (dict), over all its runs.

    A case is one system under one memory cap. The metrics include decode speed, time to the first
    token, cache hits and memory. If a run failed, the row has its "error" instead.

    - runs: the measurements of each run.
    - limit_bytes: the memory limit of the case. None means no limit.
    """
    row: Result = {"name": case.name, "cap": case.cap, "role": case.role}
    row["limit_bytes"] = limit_bytes
    failed = [run for run in runs if "error" in run]
    if failed:
        return row | {"error": failed[0]["error"]}
    times = [each for run in runs for each in times_ms(run, DECODE)]
    parts = [part for run in runs for part in named(run, DECODE)]
    medians, ttft = median_ms(runs, DECODE), median_ms(runs, PROMPT)
    tpot_ms = statistics.median(medians)
    tokens = sum(part["tokens"] for part in parts)
    row |= {
        "tpot_ms_p50": tpot_ms,
        "tpot_ms_p99": float(np.percentile(times, 99)),
        "tpot_ms_p50_runs": medians,
        "tokens_per_s": tokens / len(times) * 1e3 / tpot_ms,
        "ttft_ms": statistics.median(ttft),
        "ttft_ms_runs": ttft,
        "peak_bytes": max(each["peak_rss"] for each in runs),
        "policy": runs[-1].get("policy", {}),
    }
    if any(part["name"] == COLD for part in runs[0]["parts"]):
        row["ttft_cold_ms"] = statistics.median(median_ms(runs, COLD))
    if "store" in parts[0]:
        stores = [part["store"] for part in parts]
        requests = sum(each["requests"] for each in stores)
        routed = {key: sum(each["routed"][key] for each in stores) for key in stores[0]["routed"]}
        callbacks = [part["callback_us"] for part in parts if part["callback_us"] is not None]
        row |= {
            "hit_rate": sum(each["hits"] for each in stores) / requests if requests else None,
            "mix": {key: n / max(1, sum(routed.values())) for key, n in routed.items()},
            "bytes_per_token": statistics.median(per_token(run, "bytes") for run in runs),
            "budget_bytes": stores[0]["budget_bytes"],
            "callback_us_p50": statistics.median(callbacks) if callbacks else None,
        }
    return row


MIB, MB = 2**20, 1e6


NAME = Column("", "name", left=True)
HIT = Column("hit", "hit_rate", percent(1), "%")
# The fractions of routed experts that were high, low and skipped.
MIX = Column(
    "hi/lo/skip",
    "mix",
    lambda mix: "/".join(percent()(mix[key]) for key in ("high", "low", "skip")),
    "%",
)
TOKENS = Column("tok/s", "tokens_per_s", fixed(1))
TTFT = Column("TTFT", "ttft_ms", fixed(0), "ms")
# The 99th percentile of the decode step time.
SLOWEST = Column("p99", "tpot_ms_p99", fixed(1), "ms")


def step(digits: int) -> Column:
    """Return the definition of a table column: the time of the median decode step.

    The time is shown in milliseconds, with `digits` decimals.
    """
    return Column("p50", "tpot_ms_p50", fixed(digits), "ms")


def moved(key: str = "bytes_per_token") -> Column:
    """Return the table column "MB/tok": megabytes of experts moved into memory per token.

    - key: the key of the number of bytes per token, in each row of the table. The default is the
      key of the bytes read from disk. GPU benchmarks give the key of the bytes copied to the GPU.
    """
    return Column("MB/tok", key, fixed(1, MB))


def row_notes(rows: Sequence[Result]) -> list[str]:
    """Return the footnotes of a benchmark table, as lines of text.

    A row of our engine gets a footnote with its memory use. A row of llama.cpp gets one only if it
    exceeds its memory limit. If the highest possible speed of a row is known (see add_bound),
    another footnote states it.
    """
    lines = []
    for row in good(rows):
        limit = row["limit_bytes"]
        over = limit is not None and row["peak_bytes"] > limit
        if not over and "budget_bytes" not in row:
            continue
        memory = f"peak memory {row['peak_bytes'] / MIB:.0f} MiB"
        if over:
            memory = f"{memory} (OVER the memory cap of {limit / MIB:.0f} MiB)"
        elif limit is not None:
            memory = f"{memory} (memory cap {limit / MIB:.0f} MiB)"
        parts = [memory]
        if "budget_bytes" in row:
            parts.append(f"expert slots {row['budget_bytes'] / MIB:.0f} MiB")
        if row.get("callback_us_p50") is not None:
            parts.append(f"policy callback {row['callback_us_p50']:.0f} us")
        lines.append(f"{row['name']}: {', '.join(parts)}")
    for row in rows:
        if "bound_tpot_ms" in row:
            lines += _bound_notes(row)
    return lines


def _bound_notes(row: Result) -> list[str]:
    """Return footnotes with the highest possible speed of a row, and with its disk speeds."""
    lines = [
        f"{row['name']}: at most {1e3 / row['bound_tpot_ms']:.1f} tok/s are possible, limited by "
        f"{row['bound_by']} (time per token: computing {row['bound_compute_ms']:.1f} ms, loading "
        f"missing experts {row['bound_wait_ms']:.1f} ms)"
    ]
    if "probe_bytes_per_s" in row:
        probes = row["probe_bytes_per_s"]
        lines.append(
            f"{row['name']}: disk speed {row['read_bytes_per_s'] / 1e9:.2f} GB/s during decoding, "
            f"{min(probes) / 1e9:.2f} to {max(probes) / 1e9:.2f} GB/s in tests of the disk alone"
        )
    return lines
