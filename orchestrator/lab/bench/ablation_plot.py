"""The ablation as a picture. Needs matplotlib, the extra `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf_tools.units import format_size
from orchestrator.lab.bench.ablation import (
    BASELINE,
    CACHE,
    CACHE_AHEAD,
    MIXED,
    MIXED_AHEAD,
    SKIP_AHEAD,
)
from orchestrator.lab.plotting import COLOURS, save_figure

SHOWN = (BASELINE, CACHE, CACHE_AHEAD, MIXED, MIXED_AHEAD, SKIP_AHEAD, "lru")
LABELS = {"lru": "null baseline: global LRU"}
SIDES = (
    ("ttft_ms", "speedup_ttft", "TTFT, ms"),
    ("tpot_ms_p50", "speedup_tpot", "TPOT, ms (median step)"),
)


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
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
            _bars(axes, rows, names, caps, key, speedup)
            axes.set_xlabel(label)
            axes.grid(axis="x", alpha=0.3)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        sides[0].set_yticks(range(len(names)), [LABELS.get(name, name) for name in names])
        sides[0].invert_yaxis()
        handles, labels = sides[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(caps), frameon=False)
        figure.suptitle(_title(report, caps), fontsize=11)
        stem = folder / f"ablation-{report['model']['shape']}"
        paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
        for path in paths:
            save_figure(figure, path)
    return paths


def _bars(
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


def _title(report: dict[str, Any], caps: list[float]) -> str:
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
