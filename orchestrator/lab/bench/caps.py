"""`moe-edge bench`: upstream and every policy under memory caps, and against the bound."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from orchestrator.config import Config
from orchestrator.cost.time import TimeModel
from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.cases import (
    LESS,
    MANAGED,
    NO_REPACK,
    PLAIN,
    REPACK,
    RESIDENT,
    Case,
    mapped,
    policies,
    uniform,
)
from orchestrator.lab.bench.job import DECODE
from orchestrator.lab.bench.loop import Loop, Measured
from orchestrator.lab.bench.models import tier_expert_bytes, uniform_tiers
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.report import MIX, by_cap, memory_notes, moved, speeds, tokens_of
from orchestrator.lab.bench.rows import Result, case_row, median_ratio, named
from orchestrator.lab.table import Column, Table, fixed, percent
from orchestrator.memory.footprint import scratch_bytes
from orchestrator.memory.machine import probe
from orchestrator.memory.plan import plan_memory
from orchestrator.native.llama import Bindings

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


_KEY = "predicted_"


def predict(loop: Loop[Any], case: Case, number: int, measured: Measured) -> None:
    """Adds to the last result of a case of our engine what its plan was to take, by what this
    machine computes in the same minute, the routing that the run measured so far, and the disk's
    speed before and after. Raises MoeEdgeError."""
    if case.system != "engine" or case.tier is not None:
        return
    result = measured.results[case.key][-1]
    speed = statistics.mean(result.get("disk", [measured.bandwidths[-1].bytes_per_s]))
    uses, job, options = _uses(loop, measured), loop.job(case, number), loop.options
    config = job.config()
    plan = plan_memory(config, loop.model, probe())
    behind = options.prompt_tokens + options.warmup + options.tokens // 2
    disk = measured.bandwidths[-1]._replace(bytes_per_s=speed).beside(config)
    with TimeModel(Bindings.load(), config, loop.model, disk, uses, fresh=True) as times:
        found = times.of_plan(plan)
        result |= {
            f"{_KEY}tpot_ms": 1e3 * found.token_s(behind),
            f"{_KEY}ttft_ms": 1e3 * found.prompt_s(options.prompt_tokens, first=not job.warm),
            f"{_KEY}hit_rate": found.residency.hit_rate,
        }


def predicted(runs: Sequence[Result]) -> Result:
    """The medians of what was predicted in all runs of a case; nothing where nothing was."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for name, value in run.items():
            if name.startswith(_KEY):
                found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def _uses(loop: Loop[Any], measured: Measured) -> np.ndarray | None:
    """The routing that a run measured, in every layer alike, which says as much of hits as the
    layers' own; None where none did."""
    runs = (each for row in measured.results.values() for each in row)
    use = next((each["routing"]["use"] for each in runs if "routing" in each), None)
    if use is None:
        return None
    chances = np.asarray(use) * loop.model.n_expert_used / max(sum(use), 1e-300)
    return np.tile(np.minimum(chances, 1.0), (loop.model.n_layers, 1))


def prediction_notes(rows: Sequence[Result]) -> list[str]:
    """Prediction and measurement of each row, and their ratio."""
    return [
        f"{row['name']}: predicted {row['predicted_tpot_ms']:.1f} ms a token, measured over that "
        f"{row['tpot_ms_p50'] / row['predicted_tpot_ms']:.2f}; TTFT "
        f"{row['predicted_ttft_ms']:.0f} ms, {row['ttft_ms'] / row['predicted_ttft_ms']:.2f}; "
        f"hits {row['predicted_hit_rate']:.1%}"
        for row in rows
        if "predicted_tpot_ms" in row
    ]


COLUMNS = (
    *speeds(1),
    moved("bytes_per_token"),
    MIX,
    Column("of bound", "of_bound", percent(0, " %")),
    Column("x mmap", "speedup_mmap", fixed(1)),
)


# Beside the experts, what reading one tensor at a time into another layout takes.
_REPACKED = ("q4_k", "q2_k")


def cap_cases(options: BenchOptions) -> list[Case]:
    """Everything in memory; then, under each cap, upstream and every policy of ours."""
    listed = [*RESIDENT, *LESS]
    for cap in options.caps:
        listed += [
            mapped(cap),
            Case("upstream mmap, repack", "upstream", cap, "", {"mmap": True, "extra_bufts": True}),
            *policies(cap, options.retention),
        ]
    return listed


def largest_whole(loop: Loop[BenchOptions], cap: float) -> str | None:
    """The largest uniform type of the experts with which the model fits under a cap as a whole."""
    model, options = loop.model, loop.options
    config = Config.build(model=loop.high, ctx=options.n_ctx, ubatch=options.n_ubatch)
    fixed = model.dense_bytes + model.kv_bytes(options.n_ctx) + scratch_bytes(model, config)
    for tier in uniform_tiers(options):
        experts = tier_expert_bytes(model, tier)
        if experts is None:
            continue
        if not options.caps_process:
            if experts <= cap * model.tier_bytes[0]:
                return tier
            continue
        tensor = experts // (3 * model.n_layers) if tier in _REPACKED else 0
        if fixed + experts + tensor <= cap * loop.file_bytes:
            return tier
    return None


class Caps(Benchmark[Loop[BenchOptions]]):
    """Upstream and every policy side by side."""

    options = BenchOptions
    listed = staticmethod(cap_cases)

    def cases(self, loop: Loop[BenchOptions]) -> list[Case]:
        """Those of the options, and under each cap the largest uniform type that fits whole."""
        listed = super().cases(loop)
        for cap in loop.options.caps:
            tier = largest_whole(loop, cap)
            if tier is None:
                loop.skip(f"no uniform type of the experts fits {cap:.0%} as a whole")
                continue
            last = max(at for at, case in enumerate(listed) if case.cap == cap)
            listed[last + 1 : last + 1] = uniform(cap, tier)
        return listed

    def watch(self, loop: Loop[BenchOptions], case: Case, number: int, measured: Measured) -> None:
        predict(loop, case, number, measured)

    def figures(self, loop: Loop[BenchOptions], measured: Measured) -> Result:
        rows = [
            case_row(case, runs, loop.limit_bytes(case)) | predicted(runs)
            for case, runs in measured.each()
        ]
        compute = computing(rows, loop.fewer_experts[1] / loop.model.n_expert_used)
        for row, (_, runs) in zip(rows, measured.each(), strict=True):
            if compute and "error" not in row and "disk" in runs[0]:
                add_bound(row, runs, compute)
        _add_speedups(rows)
        fewer = loop.fewer_experts[1]
        return {"ratios": _resident_ratios(rows), "fewer_experts": fewer, "cases": rows}

    def intro(self, report: Result) -> list[str]:
        options = report["options"]
        return [
            f"{options['tokens']} decode steps with the same {tokens_of(report)} tokens for all, "
            f"{options['prompt_tokens']} before them; {options['runs']} runs in turn, speeds from "
            f"the median step; dymoe at r = {options['retention']}",
            "bound: the median over the steps of the slower of computing and missed bytes / "
            "bandwidth. Computing is upstream's at its best flags with everything resident, less "
            "what low and skipped experts save there; the bandwidth is the best that the probes "
            f"before and after or the row itself showed. fewer experts: {report['fewer_experts']} "
            f"of {report['model']['n_expert_used']} a token",
            "all TYPE: every expert in the largest type with which the model fits whole. It is "
            "the rival by speed; what types and mixes lose is no matter of random weights, and "
            "stands in docs/quality.md",
        ]

    def tables(self, report: Result) -> list[Table]:
        found = [
            Table(
                title,
                COLUMNS,
                rows,
                [*memory_notes(rows), *bound_notes(rows), *prediction_notes(rows)],
            )
            for title, rows in by_cap(report)
        ]
        found[0].footnotes += _ratio_notes(report["ratios"])
        return found


def _add_speedups(rows: list[Result]) -> None:
    """Adds the speed of each row against upstream's better way of mapping the file, run by run."""
    good = [row for row in rows if "error" not in row and row["cap"] is not None]
    for row in good:
        mapped_runs = [
            each["tpot_ms_p50_runs"]
            for each in good
            if each["role"] == "mmap" and each["cap"] == row["cap"]
        ]
        if mapped_runs:
            best = [min(each) for each in zip(*mapped_runs, strict=True)]
            row["speedup_mmap"] = median_ratio(best, row["tpot_ms_p50_runs"])


def _resident_ratios(rows: list[Result]) -> dict[str, float]:
    """Speed with everything resident against upstream, medians over the runs."""
    steps = {
        row["name"]: row["tpot_ms_p50_runs"]
        for row in rows
        if row["cap"] is None and "error" not in row
    }
    upstream = [steps[name] for name in (REPACK, NO_REPACK) if name in steps]
    ratios = {}
    if PLAIN in steps and upstream:
        best = [min(each) for each in zip(*upstream, strict=True)]
        ratios["plain_of_best_upstream"] = median_ratio(best, steps[PLAIN])
    if MANAGED in steps and NO_REPACK in steps:
        ratios["managed_of_upstream_without_repack"] = median_ratio(
            steps[NO_REPACK], steps[MANAGED]
        )
    return ratios


def _ratio_notes(ratios: dict[str, float]) -> list[str]:
    labels = {
        "plain_of_best_upstream": "resident, plain path: {:.2f} of upstream at its best flags",
        "managed_of_upstream_without_repack": (
            "resident, managed path: {:.2f} of upstream without repack"
        ),
    }
    return [labels[key].format(value) for key, value in ratios.items()]
