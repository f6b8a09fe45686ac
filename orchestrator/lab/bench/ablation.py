"""`moe-edge bench ablation`: what each part of DyMoE brings (the paper's Table 3)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_tools.units import format_size
from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.cases import REFERENCE, Case, global_lru, mapped
from orchestrator.lab.bench.job import Part, decode, prompt, settle
from orchestrator.lab.bench.loop import Loop, Measured
from orchestrator.lab.bench.models import LOW
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.report import HIT, MIX, NAME, by_cap, memory_notes, moved, tokens_of
from orchestrator.lab.bench.rows import Result, case_row, median_ms, median_ratio
from orchestrator.lab.plotting import COLOURS, save_figure
from orchestrator.lab.table import Column, Table, fixed, percent
from orchestrator.settings import FROM_1, again, setting

COLD = "cold"
BASELINE = "1 load on demand"
CACHE, CACHE_AHEAD = "2 cache", "3 cache + prefetch"
MIXED, MIXED_AHEAD = "4 cache + 4/2", "5 cache + 4/2 + prefetch"
SKIP_AHEAD = "6 cache + 4/0 + prefetch"

# The speed-ups of a token over row 1 in the Table 3 of the paper that the goals were taken from.
PAPER = {MIXED_AHEAD: 2.43, SKIP_AHEAD: 2.67}

COLUMNS = (
    NAME,
    Column("TTFT", "ttft_ms", fixed(1), "ms"),
    Column("x row 1", "speedup_ttft", fixed(2)),
    Column("cold", "ttft_cold_ms", fixed(1), "ms"),
    Column("TPOT", "tpot_ms_p50", fixed(2), "ms"),
    Column("x row 1", "speedup_tpot", fixed(2)),
    Column("p99", "tpot_ms_p99", fixed(1), "ms"),
    HIT,
    moved("bytes_per_token"),
    MIX,
)


@dataclass(frozen=True)
class AblationOptions(BenchOptions):
    """turns: prompts after the first one, each followed by its share of the decode steps.

    The first prompt finds empty slots (cold); the others find what decoding left there, as
    the second question of a chat does. Each starts a conversation of its own. prefetch: how the
    rows with look-ahead do it; "auto" would mix in the steps of its trials without. Raises
    ConfigError.
    """

    routing: str = again(BenchOptions, "routing", "zipf")
    tokens: int = again(BenchOptions, "tokens", 96)
    prompt_tokens: int = again(BenchOptions, "prompt_tokens", 32)
    runs: int = again(BenchOptions, "runs", 3)
    turns: int = setting(
        3, "Prompts of one process after a first one; they share the decode steps.", within=FROM_1
    )
    prefetch: str = setting(
        "on",
        "auto: as in a chat, with its trials whether it pays.",
        metavar="[on|auto]",
        choices=("on", "auto"),
    )

    def parts(self) -> list[Part]:
        steps, seconds = -(-self.tokens // self.turns), self.max_seconds / self.turns
        turn = [prompt(self.prompt_tokens), decode(steps, seconds)]
        first = [prompt(self.prompt_tokens, COLD), settle(self.warmup, self.max_seconds / 3)]
        return first + turn * self.turns

    def described(self, *more: str) -> dict[str, Any]:
        return super().described("turns", "prefetch", *more)


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


class Ablation(Benchmark[Loop[AblationOptions]]):
    """The parts of DyMoE, one after the other."""

    options = AblationOptions
    draws = True
    listed = staticmethod(ablation_cases)

    def figures(self, loop: Loop[AblationOptions], measured: Measured) -> Result:
        rows = []
        for case, runs in measured.each():
            row = case_row(case, runs, loop.limit_bytes(case))
            if "error" not in row:
                cold = median_ms(runs, COLD)
                row |= {"ttft_cold_ms": statistics.median(cold), "ttft_cold_ms_runs": cold}
            rows.append(row)
        _add_speedups(rows)
        return {"cases": rows}

    def intro(self, report: Result) -> list[str]:
        options = report["options"]
        return [
            f"{options['turns']} prompts of {options['prompt_tokens']} {tokens_of(report)} tokens, "
            f"each followed by its share of {options['tokens']} decode steps; cold: one before "
            f"them, into empty slots. {options['runs']} runs in turn, medians; 4/2 and 4/0 at r = "
            f"{options['retention']}",
        ]

    def tables(self, report: Result) -> list[Table]:
        quick = report["options"]["quick"]
        return [
            Table(
                title,
                COLUMNS,
                rows,
                [
                    *memory_notes(rows),
                    *([] if quick else _paper_notes(rows)),
                    *_look_ahead_notes(rows),
                ],
            )
            for title, rows in by_cap(report)
        ]

    def draw(self, found: Result, folder: Path) -> list[Path]:
        return draw_bars(found, folder)


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


def _paper_notes(rows: Sequence[Result]) -> list[str]:
    """The paper's speed-ups over loading on demand beside ours, and whether plain LRU, which keeps
    what it read and decides nothing, meets them as well."""
    speedups = {row["name"]: row["speedup_tpot"] for row in rows if "speedup_tpot" in row}
    baseline = speedups.get("lru")
    lines = []
    for name, goal in PAPER.items():
        if name not in speedups:
            continue
        verdict = "met" if speedups[name] >= goal else "MISSED"
        if baseline is not None and baseline >= goal:
            verdict += f"; met by LRU as well: x {baseline:.2f}"
        lines.append(f"{name}: x {speedups[name]:.2f} of row 1, the paper's x {goal}: {verdict}")
    return lines


def _look_ahead_notes(rows: Sequence[Result]) -> list[str]:
    """How well the next layer's experts were foreseen while decoding, layer by layer."""
    lines = []
    for row in rows:
        policy = row.get("policy", {})
        shares = {key: policy.get(key) or [] for key in ("recall", "precision")}
        if all(share is None for share in shares["recall"]):
            continue
        if shares["recall"] == shares["precision"]:  # as many were asked for as were used
            shares = {"recall and precision": shares["recall"]}
        lines.append(f"{row['name']}: prefetch {policy['prefetch']}, look-ahead by layer in %:")
        for key, values in shares.items():
            text = " ".join("-" if share is None else percent()(share) for share in values)
            lines.append(f"  {key} {text}")
    return lines


SHOWN = (BASELINE, CACHE, CACHE_AHEAD, MIXED, MIXED_AHEAD, SKIP_AHEAD, "lru")
LABELS = {"lru": "null baseline: global LRU"}
SIDES = (
    ("ttft_ms", "speedup_ttft", "TTFT, ms"),
    ("tpot_ms_p50", "speedup_tpot", "TPOT, ms (median step)"),
)


def draw_bars(report: dict[str, Any], folder: Path) -> list[Path]:
    """Writes ablation-SHAPE.png and .svg of an ablation's report; returns their paths.

    Grouped bars, a colour for each cap, with the speedup over row 1. Upstream under a cap is
    left to the table: its bar would shrink all others. Equal reports give equal SVG bytes.
    """
    import matplotlib
    from matplotlib.figure import Figure

    caps = [cap for cap in dict.fromkeys(row["cap"] for row in report["cases"]) if cap is not None]
    rows = {(row["name"], row["cap"]): row for row in report["cases"] if "error" not in row}
    names = [name for name in SHOWN if any((name, cap) in rows for cap in caps)]
    style = {"font.size": 10, "svg.hashsalt": "moe-edge", "svg.fonttype": "none"}
    with matplotlib.rc_context(style):
        height = 1.9 + 0.24 * len(names) * (len(caps) + 1)
        figure = Figure(figsize=(11, height), layout="constrained")
        sides = figure.subplots(1, 2, sharey=True)
        for axes, (key, speedup, label) in zip(sides, SIDES, strict=True):
            _bars_of(axes, rows, names, caps, key, speedup)
            axes.set_xlabel(label)
            axes.grid(axis="x", alpha=0.3)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        sides[0].set_yticks(range(len(names)), [LABELS.get(name, name) for name in names])
        sides[0].invert_yaxis()
        handles, labels = sides[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(caps), frameon=False)
        figure.suptitle(_bars_title(report, caps), fontsize=11)
        stem = folder / f"ablation-{report['model']['shape']}"
        paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
        for path in paths:
            save_figure(figure, path)
    return paths


def _bars_of(
    axes: Any,
    rows: dict[tuple[str, float], dict[str, Any]],
    names: list[str],
    caps: list[float],
    key: str,
    speedup: str,
) -> None:
    thick = 0.8 / len(caps)
    longest = max((row[key] for (name, _), row in rows.items() if name in names), default=1.0)
    for number, cap in enumerate(caps):
        places = [i for i, name in enumerate(names) if (name, cap) in rows]
        found = [rows[names[i], cap] for i in places]
        bars = axes.barh(
            [i - 0.4 + thick * (number + 0.5) for i in places],
            [row[key] for row in found],
            height=thick * 0.92,
            color=COLOURS[number % len(COLOURS)],
            label=f"cap of {cap:.0%}",
        )
        texts = [_bar_text(row[key], row.get(speedup)) for row in found]
        axes.bar_label(bars, texts, padding=3, fontsize=8)
    axes.set_xlim(0, 1.3 * longest)


def _bar_text(milliseconds: float, speedup: float | None) -> str:
    digits = 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2
    return f"{milliseconds:.{digits}f}" + ("" if speedup is None else f"  ({speedup:.2f}x)")


def _bars_title(report: dict[str, Any], caps: list[float]) -> str:
    model, machine, options = report["model"], report["machine"], report["options"]
    limited = any(row["limit_bytes"] for row in report["cases"])
    what = "whole process" if limited else "expert slots"
    percents = " and ".join(f"{cap:.0%}" for cap in caps)
    weights = "trained" if model["trained"] else f"random weights, {options['routing']} routing"
    of = "file" if limited else "experts"
    return (
        f"{model['shape']}: {model['n_layers']} layers of {model['n_expert']} experts, top-"
        f"{model['n_expert_used']}, {format_size(model['file_bytes'])} in {model['tiers'][0]}, "
        f"{weights}\n"
        f"{what} held to {percents} of the {of}; prompts of {options['prompt_tokens']} tokens; "
        f"r = {options['retention']}\n"
        f"{machine['processor']}, {machine['cores']} cores, reads "
        f"{report['bandwidth']['bytes_per_s'] / 1e9:.1f} GB/s"
    )
