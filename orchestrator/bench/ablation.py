"""`moe-edge bench ablation`: what each part of DyMoE brings (the paper's Table 3)."""

from __future__ import annotations

import statistics
import textwrap
from dataclasses import dataclass
from typing import Any

from orchestrator.bench.job import Part, decode, prompt, settle
from orchestrator.bench.loop import Loop
from orchestrator.bench.models import LOW, Note
from orchestrator.bench.plan import REFERENCE, BenchOptions, Case, global_lru, mapped
from orchestrator.bench.report import WIDTH, document, mix_of, notes, percent, tokens_of
from orchestrator.bench.rows import Result, case_row, median_ms, median_ratio
from orchestrator.errors import ConfigError

COLD = "cold"
BASELINE = "1 load on demand"
CACHE, CACHE_AHEAD = "2 cache", "3 cache + prefetch"
MIXED, MIXED_AHEAD = "4 cache + 4/2", "5 cache + 4/2 + prefetch"
SKIP_AHEAD = "6 cache + 4/0 + prefetch"


@dataclass(frozen=True, slots=True)
class AblationOptions(BenchOptions):
    """turns: prompts after the first one, each followed by its share of the decode steps.

    The first prompt finds empty slots (cold); the others find what decoding left there, as
    the second question of a chat does. Each starts a conversation of its own. prefetch: how the
    rows with look-ahead do it; "auto" would mix in the steps of its trials without. Raises
    ConfigError.
    """

    routing: str = "zipf"
    tokens: int = 96
    prompt_tokens: int = 32
    runs: int = 3
    turns: int = 3
    prefetch: str = "on"

    def __post_init__(self) -> None:
        BenchOptions.__post_init__(self)
        if self.turns < 1:
            raise ConfigError("turns must be at least 1")
        check_prefetch(self.prefetch)

    def parts(self) -> list[Part]:
        steps, seconds = -(-self.tokens // self.turns), self.max_seconds / self.turns
        turn = [prompt(self.prompt_tokens), decode(steps, seconds)]
        first = [prompt(self.prompt_tokens, COLD), settle(self.warmup, self.max_seconds / 3)]
        return first + turn * self.turns


def check_prefetch(how: str) -> None:
    """Raises ConfigError unless it is one of the ways to prefetch."""
    if how not in ("on", "auto"):
        raise ConfigError(f"prefetch must be on or auto, not '{how}'")


def paper_rows(cap: float, retention: float, prefetch: str) -> list[Case]:
    """The six rows of Table 3 under one cap.

    Row 1 has slots for one token of one layer: what was read is gone when it is needed again.
    Rows 2 and 3 use one precision; rows 4 to 6 give retention as the share of critical experts.
    """

    def dymoe(name: str, r: float, how: str, low_tier: str | None = None) -> Case:
        settings: dict[str, Any] = {"policy": "dymoe", "retention": r, "prefetch": how}
        if low_tier is not None:
            settings["low_tier"] = low_tier
        return Case(name, "engine", cap, "", settings)

    lru = {"policy": "lru", "force_managed": True}
    return [
        Case(BASELINE, "engine", cap, "", lru, one_token=True),
        dymoe(CACHE, 1.0, "off"),
        dymoe(CACHE_AHEAD, 1.0, prefetch),
        dymoe(MIXED, retention, "off", LOW),
        dymoe(MIXED_AHEAD, retention, prefetch, LOW),
        dymoe(SKIP_AHEAD, retention, prefetch, "skip"),
    ]


def ablation_cases(options: AblationOptions) -> list[Case]:
    """Everything in memory; then, under each cap, upstream (where there is a cap on it), our
    null baseline, and the six rows."""
    listed = [REFERENCE]
    for cap in options.caps:
        listed += [mapped(cap)] if options.caps_process else []
        listed += [global_lru(cap), *paper_rows(cap, options.retention, options.prefetch)]
    return listed


def run_ablation(options: AblationOptions, note: Note = lambda text: None) -> dict[str, Any]:
    """Measures all rows and returns one JSON-ready object, as bench.run does."""
    loop = Loop.prepare(options, note)
    listed = ablation_cases(options)
    measured = loop.run(listed)
    rows = []
    for case in listed:
        runs = measured.results[case.key]
        row = case_row(case, runs, loop.limit_bytes(case))
        if "error" not in row:
            cold = median_ms(runs, COLD)
            row |= {"ttft_cold_ms": statistics.median(cold), "ttft_cold_ms_runs": cold}
        rows.append(row)
    _add_speedups(rows)
    report = loop.describe(measured)
    report["options"] |= {"turns": options.turns, "prefetch": options.prefetch}
    return report | {"cases": rows}


def _add_speedups(rows: list[Result]) -> None:
    """How much faster than row 1 under the same cap, medians over the runs."""
    good = [row for row in rows if "error" not in row]
    for row in good:
        base = next((each for each in good if _is_base(each, row["cap"])), None)
        if base is not None:
            for name in ("ttft", "tpot"):
                key = "ttft_ms_runs" if name == "ttft" else "tpot_ms_p50_runs"
                row[f"speedup_{name}"] = median_ratio(base[key], row[key])


def _is_base(row: Result, cap: float | None) -> bool:
    return bool(row["name"] == BASELINE and row["cap"] == cap)


_HEAD = (
    f"{'':25}{'TTFT ms':>8}{'x row 1':>8}{'cold ms':>8}{'TPOT ms':>8}{'x row 1':>8}{'p99 ms':>7}"
    f"{'hit %':>6}{'MB/tok':>8}{'hi/lo/skip':>12}"
)


def render_ablation(report: dict[str, Any]) -> str:
    """The report of run_ablation as text."""
    options = report["options"]
    intro = [
        f"{options['turns']} prompts of {options['prompt_tokens']} {tokens_of(report)} tokens, "
        f"each followed by its share of {options['tokens']} decode steps;",
        f"cold: one before them, into empty slots. {options['runs']} runs in turn, medians; "
        f"4/2 and 4/0 at r = {options['retention']}",
    ]

    def section(rows: list[Result]) -> list[str]:
        ahead = [line for row in rows for line in _look_ahead(row)]
        return [_HEAD, *(_line(row) for row in rows), *notes(rows), *ahead]

    return document(report, intro, section)


def _line(row: Result) -> str:
    if "error" in row:
        return f"{row['name']:25}{row['error']}"[:WIDTH]

    def times(key: str) -> str:
        return f"{row[key]:8.2f}" if key in row else " " * 8

    moved = row.get("bytes_per_token")
    return (
        f"{row['name']:25}{row['ttft_ms']:8.1f}{times('speedup_ttft')}{row['ttft_cold_ms']:8.1f}"
        f"{row['tpot_ms_p50']:8.2f}{times('speedup_tpot')}{row['tpot_ms_p99']:7.1f}"
        f"{percent(row.get('hit_rate'), 1):>6}{'' if moved is None else f'{moved / 1e6:.1f}':>8}"
        f"{mix_of(row):>12}"
    ).rstrip()


def _look_ahead(row: Result) -> list[str]:
    """How well the next layer's experts were foreseen while decoding, layer by layer."""
    policy = row.get("policy", {})
    shares = {key: policy.get(key) or [] for key in ("recall", "precision")}
    if all(share is None for share in shares["recall"]):
        return []
    if shares["recall"] == shares["precision"]:  # as many were asked for as were used
        shares = {"recall and precision": shares["recall"]}
    lines = [f"  {row['name']}: prefetch {policy['prefetch']}, look-ahead by layer in %:"]
    for key, values in shares.items():
        text = " ".join("-" if share is None else percent(share) for share in values)
        lines += textwrap.wrap(
            f"{key} {text}", WIDTH, initial_indent="    ", subsequent_indent="      "
        )
    return lines
