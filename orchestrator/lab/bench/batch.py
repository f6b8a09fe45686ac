"""`moe-edge bench batch`: several sequences that decode together, under every policy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from orchestrator.config import MOST_SEQUENCES
from orchestrator.errors import ConfigError
from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.cases import REFERENCE, SKIPPING, Case, policies
from orchestrator.lab.bench.job import Part, decode, prompt, settle
from orchestrator.lab.bench.loop import Loop, Measured
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.report import HIT, MIX, NAME, cap_title, moved, tokens_of
from orchestrator.lab.bench.rows import (
    Result,
    failure,
    median_ms,
    median_ratio,
    named,
    store_figures,
    times_ms,
)
from orchestrator.lab.lists import numbers
from orchestrator.lab.table import Column, Table, fixed
from orchestrator.settings import again, setting

COLUMNS = (
    Column("tok/s", "tokens_per_s", fixed(1)),
    Column("each", "tokens_per_s_each", fixed(1)),
    Column("step", "step_ms_p50", fixed(2), "ms"),
    Column("p99", "step_ms_p99", fixed(2)),
    Column("speed", "of_speed", fixed(2)),
    HIT,
    moved("bytes_per_token", 2),
    Column("wait", "wait_ms_per_step", fixed(2), "ms"),
    MIX,
    Column("experts", "experts", fixed(1)),
)


@dataclass(frozen=True)
class BatchOptions(BenchOptions):
    """batches: how many sequences decode together, one stretch of `tokens` steps each, all of
    them behind a prompt of their own that the sequences share. Raises ConfigError."""

    routing: str = again(BenchOptions, "routing", "zipf")
    caps: tuple[float, ...] = again(BenchOptions, "caps", (0.8,))
    tokens: int = again(BenchOptions, "tokens", 64)
    prompt_tokens: int = again(BenchOptions, "prompt_tokens", 32)
    batches: tuple[int, ...] = setting(
        (1, 2, 4, 8, 16, 32),
        "How many sequences decode together.",
        notation=numbers("batches"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        batches = self.batches
        if not batches or min(batches) < 1 or len(set(batches)) < len(batches):
            raise ConfigError("batches are different numbers of sequences, as 1,8,32")
        if max(batches) > MOST_SEQUENCES:
            raise ConfigError(f"batches hold {MOST_SEQUENCES} sequences at most")

    @property
    def n_ubatch(self) -> int:
        return max(self.prompt_tokens, *self.batches)

    def parts(self) -> list[Part]:
        seconds = self.max_seconds / len(self.batches)
        parts = [prompt(self.prompt_tokens), settle(self.warmup, seconds)]
        for n in self.batches:
            parts.append(prompt(self.prompt_tokens))
            parts.append(decode(self.tokens, seconds, batch_name(n))._replace(sequences=n))
        return parts

    def described(self, *more: str) -> dict[str, Any]:
        return super().described("batches", *more)


def batch_name(n: int) -> str:
    return f"batch {n}"


def batch_cases(options: BatchOptions) -> list[Case]:
    """Everything in memory; under each cap one precision, two by token, and two by hotness."""
    listed = [REFERENCE]
    for cap in options.caps:
        listed += [each for each in policies(cap, options.retention) if each.name != SKIPPING]
    return listed


class Batch(Benchmark[Loop[BatchOptions]]):
    """Sequences that decode together."""

    options = BatchOptions
    listed = staticmethod(batch_cases)

    def figures(self, loop: Loop[BatchOptions], measured: Measured) -> Result:
        rows: list[Result] = []
        for n in loop.options.batches:
            for case, runs in measured.each():
                limit = loop.limit_bytes(case)
                rows.append(batch_row(case, n, runs, limit, loop.model.n_layers))
        _add_speeds(rows)
        return {"cases": rows}

    def intro(self, report: Result) -> list[str]:
        options = report["options"]
        return [
            f"{options['tokens']} steps of {tokens_of(report)} tokens behind a prompt of "
            f"{options['prompt_tokens']}; {options['runs']} runs in turn, medians",
            "each: tokens a second of one sequence; speed: of everything resident with as many; "
            f"wait: of a step; experts: different ones of the {report['model']['n_expert']} that a "
            f"step uses in a layer; dymoe 4/2 at r = {options['retention']}",
        ]

    def tables(self, report: Result) -> list[Table]:
        """One for each cap and number of sequences, with everything resident beside it."""
        found, rows = [], report["cases"]
        for cap in dict.fromkeys(row["cap"] for row in rows if row["cap"] is not None):
            head = cap_title(cap, [row for row in rows if row["cap"] == cap])
            for n in report["options"]["batches"]:
                first = replace(NAME, name=f"{n} together" if n > 1 else "1 alone")
                shown = [row for row in rows if row["batch"] == n and row["cap"] in (None, cap)]
                found.append(Table(head, (first, *COLUMNS), shown))
                head = ""
        return found


def batch_row(
    case: Case, n: int, runs: Sequence[Result], limit_bytes: int | None, n_layers: int
) -> Result:
    """The figures of n sequences in one case, speeds as medians of a run's steps and then of
    the runs. experts: different ones that a step used in a layer, on average."""
    row: Result = {"name": case.name, "cap": case.cap, "role": case.role, "batch": n}
    row["limit_bytes"] = limit_bytes
    if failed := failure(runs):
        return row | failed
    name = batch_name(n)
    medians = median_ms(runs, name)
    parts = [part for run in runs for part in named(run, name)]
    steps = [each for run in runs for each in times_ms(run, name)]
    step_ms = statistics.median(medians)
    found = store_figures(parts)
    routed = sum(sum(part["store"]["routed"].values()) for part in parts)
    return row | {
        "step_ms_p50": step_ms,
        "step_ms_p50_runs": medians,
        "step_ms_p99": float(np.percentile(steps, 99)),
        "tokens_per_s": n * 1e3 / step_ms,
        "tokens_per_s_each": 1e3 / step_ms,
        "hit_rate": found["hit_rate"],
        "mix": found["mix"],
        "bytes_per_token": found["bytes_per_token"],
        "wait_ms_per_step": found["wait_ms_per_token"] * n,
        "experts": routed / (n_layers * len(steps)),
        "mode": runs[0]["mode"],
    }


def _add_speeds(rows: Sequence[Result]) -> None:
    """Adds the speed against everything resident with as many sequences, within a run."""
    good = [row for row in rows if "error" not in row]
    resident = {row["batch"]: row for row in good if row["role"] == "reference"}
    for row in good:
        base = resident.get(row["batch"])
        if base is not None and base is not row:
            row["of_speed"] = median_ratio(base["step_ms_p50_runs"], row["step_ms_p50_runs"])
