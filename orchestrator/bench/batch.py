"""`moe-edge bench batch`: several sequences that decode together, under every policy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.bench.job import Part, decode, prompt, settle
from orchestrator.bench.loop import Loop
from orchestrator.bench.models import Note
from orchestrator.bench.plan import REFERENCE, SKIPPING, BenchOptions, Case, policies
from orchestrator.bench.report import WIDTH, heading, mix_of, percent, title, tokens_of
from orchestrator.bench.rows import (
    Result,
    failure,
    median_ms,
    median_ratio,
    named,
    store_figures,
    times_ms,
)
from orchestrator.config import MOST_SEQUENCES
from orchestrator.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BatchOptions(BenchOptions):
    """batches: how many sequences decode together, one stretch of `tokens` steps each, all of
    them behind a prompt of their own that the sequences share. Raises ConfigError."""

    routing: str = "zipf"
    caps: tuple[float, ...] = (0.8,)
    tokens: int = 64
    prompt_tokens: int = 32
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)

    def __post_init__(self) -> None:
        BenchOptions.__post_init__(self)
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


def batch_name(n: int) -> str:
    return f"batch {n}"


def batch_cases(options: BatchOptions) -> list[Case]:
    """Everything in memory; under each cap one precision, two by token, and two by hotness."""
    listed = [REFERENCE]
    for cap in options.caps:
        listed += [each for each in policies(cap, options.retention) if each.name != SKIPPING]
    return listed


def run_batch(options: BatchOptions, note: Note = lambda text: None) -> dict[str, Any]:
    """Measures all cases and returns one JSON-ready object, as bench.run does."""
    loop = Loop.prepare(options, note)
    listed = batch_cases(options)
    measured = loop.run(listed)
    rows: list[Result] = []
    for n in options.batches:
        for case in listed:
            runs, limit = measured.results[case.key], loop.limit_bytes(case)
            rows.append(batch_row(case, n, runs, limit, loop.model.n_layers))
    _compare(rows)
    report = loop.describe(measured)
    report["options"] |= {"batches": list(options.batches)}
    return report | {"cases": rows}


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


def _compare(rows: Sequence[Result]) -> None:
    """Adds the speed against everything resident with as many sequences, within a run."""
    good = [row for row in rows if "error" not in row]
    resident = {row["batch"]: row for row in good if row["role"] == "reference"}
    for row in good:
        base = resident.get(row["batch"])
        if base is not None and base is not row:
            row["of_speed"] = median_ratio(base["step_ms_p50_runs"], row["step_ms_p50_runs"])


_HEAD = (
    f"{'':18}{'tok/s':>8}{'each':>7}{'step ms':>8}{'p99':>8}{'speed':>7}{'hit %':>7}"
    f"{'MB/tok':>8}{'wait ms':>9}{'hi/lo/skip':>12}{'experts':>8}"
)


def render_batch(report: dict[str, Any]) -> str:
    """The report of run_batch as text."""
    options, rows = report["options"], report["cases"]
    n_expert = report["model"]["n_expert"]
    lines = [
        *heading(report),
        f"{options['tokens']} steps of {tokens_of(report)} tokens behind a prompt of "
        f"{options['prompt_tokens']}; {options['runs']} runs in turn, medians",
        "each: tokens a second of one sequence; speed: of everything resident with as many; wait:",
        f"of a step; experts: different ones of the {n_expert} that a step uses in a layer; dymoe "
        f"4/2 at r = {options['retention']}",
    ]
    caps = [cap for cap in dict.fromkeys(row["cap"] for row in rows) if cap is not None]
    for cap in caps:
        of_cap = [row for row in rows if row["cap"] in (None, cap)]
        lines += ["", title(cap, [row for row in of_cap if row["cap"] == cap])]
        for n in options["batches"]:
            together = f"{n} together" if n > 1 else "1 alone"
            lines += ["", f"{together:18}" + _HEAD[18:]]
            lines += [_line(row) for row in of_cap if row["batch"] == n]
    lines += ["", *(f"note: {reason}" for reason in report["skipped"])]
    return "\n".join(lines).rstrip()


def _line(row: Result) -> str:
    if "error" in row:
        return f"{row['name']:18} {row['error']}"[:WIDTH]
    speed = f"{row['of_speed']:7.2f}" if "of_speed" in row else " " * 7
    return (
        f"{row['name']:18}{row['tokens_per_s']:8.1f}{row['tokens_per_s_each']:7.1f}"
        f"{row['step_ms_p50']:8.2f}{row['step_ms_p99']:8.2f}{speed}"
        f"{percent(row['hit_rate'], 1):>7}{row['bytes_per_token'] / 1e6:8.2f}"
        f"{row['wait_ms_per_step']:9.2f}{mix_of(row):>12}{row['experts']:8.1f}"
    )
