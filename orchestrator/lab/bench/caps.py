"""`moe-edge bench`: upstream and every policy under memory caps, and against the bound."""

from __future__ import annotations

from orchestrator.config import Config
from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.bounds import add_bound, bound_notes, computing
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
from orchestrator.lab.bench.loop import Loop, Measured
from orchestrator.lab.bench.models import tier_expert_bytes, uniform_tiers
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.predicted import predict, predicted, prediction_notes
from orchestrator.lab.bench.report import MIX, by_cap, memory_notes, moved, speeds, tokens_of
from orchestrator.lab.bench.rows import Result, case_row, median_ratio
from orchestrator.lab.table import Column, Table, fixed, percent
from orchestrator.memory.footprint import scratch_bytes

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
