"""`moe-edge bench`: upstream and every policy under memory caps, and against the bound."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.config import MOST_SEQUENCES, Config
from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.cases import REFERENCE, RESIDENT, Case, mapped, policies, uniform
from orchestrator.lab.bench.child import DECODE, Part
from orchestrator.lab.bench.models import tier_expert_bytes, uniform_tiers
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.rows import (
    HIT,
    MIX,
    NAME,
    SLOWEST,
    TOKENS,
    TTFT,
    Result,
    add_bound,
    add_ratio,
    best_runs,
    caps_of,
    moved,
    named,
    step,
)
from orchestrator.lab.table import Column, fixed, percent
from orchestrator.memory.plan import scratch_bytes
from orchestrator.settings import setting

# Beside the experts, what reading one tensor at a time into another layout takes.
_REPACKED = ("q4_k", "q2_k")


@dataclass(frozen=True)
class CapOptions(BenchOptions):
    """together: so many sequences go on from the prompt and decode at once. Raises ConfigError."""

    together: int = setting(
        1, "Sequences that decode together, a token each a step.", within=(1, MOST_SEQUENCES)
    )

    def parts(self) -> list[Part]:
        *before, last = super().parts()
        return [*before, last._replace(sequences=self.together if self.together > 1 else 0)]


class Computing(NamedTuple):
    """Milliseconds a token of upstream at its best flags, one for each run: with everything in the
    high precision; all experts in the low one; and as many experts as `fewer_share` of them. Empty
    where that was not measured."""

    high: Sequence[float]
    low: Sequence[float]
    fewer: Sequence[float]
    fewer_share: float

    def of_mix(self, run: int, mix: Mapping[str, float]) -> float:
        """What a token of this mix computes, from what its parts save: a low expert what all of
        them save together, a skipped one in proportion to the share that `fewer` leaves out."""
        high = self.high[run]
        found = high
        if self.low:
            found -= mix["low"] * max(0.0, high - self.low[run])
        if self.fewer and self.fewer_share < 1:
            saved = max(0.0, high - self.fewer[run]) / (1 - self.fewer_share)
            found -= mix["skip"] * saved
        return max(0.0, found)


def computing(rows: Sequence[Result], fewer_share: float) -> Computing:
    """From the rows with everything in memory, the better flags of each run."""
    high, low, fewer = (
        best_runs([row for row in rows if row["cap"] is None and row["role"] == role])
        for role in ("upstream", "low", "fewer")
    )
    return Computing(high, low, fewer, fewer_share)


def add_disk_bound(row: Result, runs: Sequence[Result], compute: Computing) -> None:
    """Adds the bound of a row that reads: bytes that a step missed, over the bandwidth. That is the
    best that the disk showed: in the probes right before and after, or under the row itself."""
    waits, reads, probes = [], [], []
    for run in runs:
        parts = named(run, DECODE)
        seconds = sum(sum(part["ms"]) for part in parts) / 1e3
        reads.append(sum(part["store"]["bytes"] for part in parts) / seconds)
        probes += run["disk"]
        fastest = max(reads[-1], *run["disk"])
        waits.append([each / fastest * 1e3 for part in parts for each in step_bytes(part)])
    add_bound(row, [compute.of_mix(at, row["mix"]) for at in range(len(runs))], waits)
    row |= {"read_bytes_per_s": statistics.median(reads), "probe_bytes_per_s": probes}


def step_bytes(part: Result) -> list[float]:
    """What each step of a part needed to read: what it waited for, and of what was read ahead the
    share that was used."""
    used = part["store"]["used_ahead"]
    return [demand + used * ahead for demand, ahead in part["step_reads"]]


class Caps(Benchmark):
    """Upstream and every policy side by side."""

    options = CapOptions
    columns = (
        NAME,
        TOKENS,
        step(1),
        SLOWEST,
        TTFT,
        HIT,
        moved(),
        MIX,
        Column("of bound", "of_bound", percent(0, " %")),
        Column("x mmap", "speedup_mmap", fixed(1)),
    )

    def cases(self) -> list[Case]:
        """Everything in memory; then, under each cap, upstream, every policy of ours, and the
        largest uniform type that fits whole. Sequences that decode together are of our managed path
        alone."""
        options = self.on
        if options.together > 1:
            listed = [REFERENCE]
            for cap in options.caps:
                listed += policies(cap, options.retention)
            return listed
        listed = [*RESIDENT]
        for cap in options.caps:
            repacked = {"mmap": True, "extra_bufts": True}
            listed += [
                mapped(cap),
                Case("upstream mmap, repack", "upstream", cap, "", repacked),
                *policies(cap, options.retention),
            ]
            tier = self.largest_whole(cap)
            if tier is None:
                self.skip(f"no uniform type of the experts fits {cap:.0%} as a whole")
            else:
                listed.append(uniform(cap, tier))
        return listed

    def largest_whole(self, cap: float) -> str | None:
        """The largest uniform type of the experts with which the model fits whole under a cap."""
        model, options = self.model, self.on
        config = Config.build(model=self.high, ctx=options.n_ctx, ubatch=options.n_ubatch)
        fixed = model.dense_bytes + model.kv_bytes(options.n_ctx) + scratch_bytes(model, config)
        for tier in uniform_tiers(options):
            experts = tier_expert_bytes(model, tier)
            if experts is None:
                continue
            tensor = experts // (3 * model.n_layers) if tier in _REPACKED else 0
            taken, whole = fixed + experts + tensor, self.file_bytes
            if not options.caps_process:
                taken, whole = experts, model.tier_bytes[0]
            if taken <= cap * whole:
                return tier
        return None

    def compare(self, rows: Sequence[Result], runs: Sequence[Sequence[Result]]) -> None:
        compute = computing(rows, self.fewer_experts[1] / self.model.n_expert_used)
        for row, each in zip(rows, runs, strict=True):
            if compute.high and "error" not in row and "disk" in each[0]:
                add_disk_bound(row, each, compute)
        add_ratio(rows, "of_resident", [row for row in rows if row["role"] == "reference"])
        for same in caps_of(rows):
            add_ratio(same, "speedup_mmap", [row for row in same if row["role"] == "mmap"])

    def intro(self) -> list[str]:
        options = self.on
        behind = (
            f"behind the same {options.prompt_tokens} {options.words} tokens for all; "
            f"{options.runs} runs in turn, speeds from the median step; dymoe at r = "
            f"{options.retention}"
        )
        if options.together > 1:
            return [f"{options.together} sequences, {options.tokens} decode steps {behind}"]
        return [
            f"{options.tokens} decode steps {behind}",
            "bound: the median over the steps of the slower of computing and missed bytes / "
            "bandwidth. Computing is upstream's at its best flags with everything resident, less "
            "what low and skipped experts save there; the bandwidth is the best that the probes "
            f"before and after or the row itself showed. fewer experts: {self.fewer_experts[1]} "
            f"of {self.model.n_expert_used} a token",
            "all TYPE: every expert in the largest type with which the model fits whole. It is "
            "the rival by speed; what types and mixes lose is no matter of random weights, and "
            "stands in docs/quality.md",
        ]

    def notes(self, rows: Sequence[Result]) -> list[str]:
        """Rows that decode together have no bound but everything resident."""
        return super().notes(rows) + [
            f"{row['name']}: {row['of_resident']:.2f} of the speed of everything resident"
            for row in rows
            if {"budget_bytes", "of_resident"} <= row.keys() and row["cap"]
            if "bound_tpot_ms" not in row
        ]
