"""`moe-edge bench firm`: what each part of FIRM-MoE brings (its Tables 1, 2 and Figures 4, 5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.cases import REFERENCE, Case, global_lru
from orchestrator.lab.bench.firm_replay import (
    BASE,
    LENGTH_ROWS,
    NO_PREFETCH,
    OURS,
    PAPERS,
    FirmOptions,
    play,
    play_lengths,
    played_rows,
    record,
)
from orchestrator.lab.bench.loop import Loop, Measured
from orchestrator.lab.bench.report import HIT, NAME, by_cap, cap_title, memory_notes, moved
from orchestrator.lab.bench.rows import Result, case_row, median_ratio
from orchestrator.lab.table import Column, Table, fixed
from orchestrator.native.llama import Bindings
from orchestrator.policy.firm import RANK


def live_cases(options: FirmOptions) -> list[Case]:
    """Our own rows under each cap, in real runs."""
    if not options.live:
        return []
    listed = [REFERENCE]
    for cap in options.caps:
        listed.append(global_lru(cap))
        rows = [NO_PREFETCH, "dymoe, r=1", *(f"firm, {RANK}, n={n}" for n in (1, 2, 3))]
        for row in played_rows(8):
            if row.name in rows:
                listed.append(
                    Case(row.name, "engine", cap, "", {**row.settings, "policy": row.policy})
                )
    return listed


COLUMNS = (
    NAME,
    Column("TPOT", "tpot_ms_p50", fixed(2), "ms"),
    Column("mean", "tpot_ms_mean", fixed(2), "ms"),
    Column("x base", "speedup", fixed(3)),
    moved("bytes_per_token", 2),
    Column("x none", "bytes_ratio", fixed(2)),
    HIT,
    Column("K,P", "votes", left=True),
)

LENGTH_COLUMNS = (
    Column("prompt", "prompt"),
    Column("answer", "answer"),
    *(Column(name, name, fixed(1)) for name in LENGTH_ROWS),
    Column("x lru", lambda row: row[LENGTH_ROWS[-1]] / row["lru"], fixed(2)),
    Column("x dymoe", lambda row: row[LENGTH_ROWS[-1]] / row["dymoe, r=1"], fixed(2)),
)


class Firm(Benchmark[Loop[FirmOptions]]):
    """The parts of FIRM-MoE: in virtual time over one recorded run, and live where asked for."""

    options = FirmOptions
    listed = staticmethod(live_cases)

    def figures(self, loop: Loop[FirmOptions], measured: Measured) -> Result:
        rows = [
            case_row(case, runs, loop.limit_bytes(case)) | {"world": None}
            for case, runs in measured.each()
        ]
        _compare([row for row in rows if "error" not in row], NO_PREFETCH)
        loop.note("recording the routing, with everything in memory")
        trace = record(loop, loop.options)
        speed = loop.options.bandwidth or int(measured.bandwidths[0].bytes_per_s)
        library = Bindings.load().library()
        for cap in loop.options.caps:
            loop.note(f"replaying at {cap:.0%}")
            for world in (OURS, PAPERS):
                some = [
                    play(library, trace, row, cap, speed, loop.options)
                    for row in played_rows(trace.n_expert_used)
                    if row.world == world
                ]
                _compare(some, NO_PREFETCH if world == OURS else BASE)
                rows += some
        return {
            "cases": rows,
            "lengths": self._lengths(loop, library, speed),
            "replay_bytes_per_s": speed,
        }

    def _lengths(self, loop: Loop[FirmOptions], library: Any, bytes_per_s: int) -> list[Result]:
        """Figure 5: a run is recorded for each length of the prompt, with the longest answer."""
        found = []
        for n_prompt in loop.options.prompts:
            loop.note(f"recording a prompt of {n_prompt} tokens")
            longest = max(loop.options.answers)
            options = replace(loop.options, prompt_tokens=n_prompt, tokens=longest)
            trace = record(loop, options)
            for cap in options.caps:
                found += play_lengths(library, trace, cap, bytes_per_s, options)
        return found

    def intro(self, report: Result) -> list[str]:
        options, speed = report["options"], report["replay_bytes_per_s"] / 1e9
        return [
            f"{options['tokens']} decode steps. Virtual time: routing recorded once, reads of "
            f"{speed:.2f} GB/s and {options['latency_us']} us. n: matrices of an expert that are "
            f"loaded ahead; rank, mol, margin: the vote, with K and P tuned; x base: against no "
            f"prefetch, or BB; x none: bytes against no prefetch"
        ]

    def tables(self, report: Result) -> list[Table]:
        live = [row for row in report["cases"] if row["world"] is None]
        found = [
            Table(title, COLUMNS, rows, memory_notes(rows))
            for title, rows in by_cap(report | {"cases": live})
        ]
        for world, rows in _by_world(report):
            found.append(Table(f"{cap_title(rows[0]['cap'], rows)}, {world}", COLUMNS, rows))
        for cap in dict.fromkeys(row["cap"] for row in report["lengths"]):
            rows = [row for row in report["lengths"] if row["cap"] == cap]
            title = (
                f"tokens of an answer by the seconds of its prompt and itself, {cap:.0%}, {OURS}"
            )
            found.append(Table(title, LENGTH_COLUMNS, rows))
        return found


def _by_world(report: Result) -> Iterator[tuple[str, list[Result]]]:
    rows = [row for row in report["cases"] if row["world"] is not None]
    for cap, world in dict.fromkeys((row["cap"], row["world"]) for row in rows):
        yield world, [row for row in rows if (row["cap"], row["world"]) == (cap, world)]


def _compare(rows: list[Result], base: str) -> None:
    """Adds how much faster than the base under the same cap, and how much more is read."""
    for row in rows:
        for other in rows:
            if other["name"] == base and other["cap"] == row["cap"]:
                row["speedup"] = _times_as_fast(row, other)
                if other.get("bytes_per_token") and "bytes_per_token" in row:
                    row["bytes_ratio"] = row["bytes_per_token"] / other["bytes_per_token"]


def _times_as_fast(row: Result, other: Result) -> float:
    """Means of a run in virtual time, which nothing disturbs; of real runs the ratios within each
    run, since the machine's speed drifts."""
    if "tpot_ms_p50_runs" in row:
        return median_ratio(other["tpot_ms_p50_runs"], row["tpot_ms_p50_runs"])
    return float(other["tpot_ms_mean"] / row["tpot_ms_mean"])
