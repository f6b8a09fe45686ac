"""The bound of a row under a cap: what a token takes at least, by computing and by reading."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from orchestrator.lab.bench.job import DECODE
from orchestrator.lab.bench.rows import Result, median_ratio, named

# A row above this share of its bound needs an explanation that was checked.
MOST = 1.05
# A row that reads so much faster than the probes beside it shows that the disk changed.
FASTER = 1.05


class Computing(NamedTuple):
    """Milliseconds a token of upstream at its best flags, one for each run: with everything in the
    high precision; all experts in the low one; and as many experts as `fewer_share` of them. None
    where that was not measured."""

    high: Sequence[float]
    low: Sequence[float] | None
    fewer: Sequence[float] | None
    fewer_share: float

    def of_mix(self, run: int, mix: Mapping[str, float]) -> float:
        """What a token of this mix computes, from what its parts save: a low expert what all of
        them save together, a skipped one in proportion to the share that `fewer` leaves out."""
        high = self.high[run]
        found = high
        if self.low is not None:
            found -= mix["low"] * max(0.0, high - self.low[run])
        if self.fewer is not None and self.fewer_share < 1:
            saved = max(0.0, high - self.fewer[run]) / (1 - self.fewer_share)
            found -= mix["skip"] * saved
        return max(0.0, found)


def computing(rows: Sequence[Result], fewer_share: float) -> Computing | None:
    """From the rows with everything in memory, the better flags of each run; None without them."""

    def best(role: str) -> list[float] | None:
        found = [
            row["tpot_ms_p50_runs"] for row in rows if row["role"] == role and "error" not in row
        ]
        return [min(each) for each in zip(*found, strict=True)] if found else None

    high = best("upstream")
    return Computing(high, best("low"), best("fewer"), fewer_share) if high else None


def add_bound(row: Result, runs: Sequence[Result], compute: Computing) -> None:
    """Adds the bound of a row that reads and how much of it was reached, run by run: what a run
    compares ran within minutes of each other, and a machine's speed drifts.

    A step takes at least max(computing, bytes it missed / bandwidth); the bound is the median over
    the steps, as the speed is. The bandwidth is the best that the disk showed: in the probes right
    before and after, or under the row itself, which then says that the disk became faster.
    """
    bounds, waits, computed, reads, probes = [], [], [], [], []
    for at, run in enumerate(runs):
        parts = named(run, DECODE)
        seconds = sum(sum(part["ms"]) for part in parts) / 1e3
        reached = sum(part["store"]["bytes"] for part in parts) / seconds
        fastest = max(reached, *run["disk"])
        needed = [each / fastest * 1e3 for part in parts for each in step_bytes(part)]
        compute_ms = compute.of_mix(at, row["mix"])
        bounds.append(statistics.median(max(compute_ms, wait_ms) for wait_ms in needed))
        waits.append(statistics.median(needed))
        computed.append(compute_ms)
        reads.append(reached)
        probes += run["disk"]
    row |= {
        "bound_tpot_ms": statistics.median(bounds),
        "bound_by": "reading" if sum(waits) > sum(computed) else "computing",
        "bound_compute_ms": statistics.median(computed),
        "bound_read_ms": statistics.median(waits),
        "of_bound": median_ratio(bounds, row["tpot_ms_p50_runs"]),
        "read_bytes_per_s": statistics.median(reads),
        "probe_bytes_per_s": probes,
        "disk_changed": max(reads) > FASTER * max(probes),
    }


def step_bytes(part: Result) -> list[float]:
    """What each step of a part needed to read: what it waited for, and of what was read ahead the
    share that was used."""
    store = part["store"]
    judged = store["prefetch_used"] + store["prefetch_wasted"]
    used = store["prefetch_used"] / judged if judged else 0.0
    return [demand + used * ahead for demand, ahead in part["step_reads"]]


def bound_notes(rows: Sequence[Result]) -> list[str]:
    """What binds each row, how fast it read beside its probes, and which rows need a reason."""
    lines = []
    for row in rows:
        if "bound_tpot_ms" not in row:
            continue
        probes = row["probe_bytes_per_s"]
        line = (
            f"{row['name']}: bound {1e3 / row['bound_tpot_ms']:.1f} tok/s by {row['bound_by']} "
            f"(computing {row['bound_compute_ms']:.1f} ms, reading {row['bound_read_ms']:.1f}), "
            f"read at {row['read_bytes_per_s'] / 1e9:.2f} GB/s, probes {min(probes) / 1e9:.2f} to "
            f"{max(probes) / 1e9:.2f}"
        )
        if row["disk_changed"]:
            line += ": the disk was faster under this row than in its probes"
        if row["of_bound"] > MOST:
            line += f"; ABOVE {MOST:.0%} of its bound"
        lines.append(line)
    return lines
