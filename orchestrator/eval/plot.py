"""Studies as pictures: one PNG and one SVG each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.eval.arithmetic import Estimate

# Told apart by hue and by lightness, on paper too (Okabe and Ito).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^Dv"


def require() -> Any:
    """matplotlib, drawing to files. Raises ConfigError where it is not installed."""
    try:
        matplotlib = import_module("matplotlib")
        matplotlib.use("Agg")
        return import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ConfigError(
            "plots need matplotlib: install it with `pip install -e '.[plot]'`"
        ) from error


@contextmanager
def figure(folder: Path, name: str, panels: int = 1, rows: int = 1) -> Iterator[Sequence[Any]]:
    """Axes side by side, in rows; written as NAME.png and NAME.svg at the end."""
    plt = require()
    with plt.rc_context({"svg.hashsalt": name, "font.size": 10}):
        drawing, axes = plt.subplots(
            rows,
            panels // rows,
            figsize=(5.6 * panels // rows, 4.2 * rows),
            squeeze=False,
            layout="constrained",
        )
        try:
            yield axes.ravel()
            for axis in axes.ravel():
                axis.grid(alpha=0.3)
                axis.spines[["top", "right"]].set_visible(False)
            drawing.savefig(folder / f"{name}.png", dpi=150)
            drawing.savefig(folder / f"{name}.svg", metadata={"Date": None})
        finally:
            plt.close(drawing)


def line(
    axis: Any,
    x: Sequence[float],
    y: Sequence[float],
    label: str,
    number: int,
    error: Sequence[float] | None = None,
    dashed: bool = False,
) -> None:
    """One series with its standard errors; number picks color and marker."""
    axis.errorbar(
        x,
        y,
        yerr=error,
        label=label,
        color=COLORS[number % len(COLORS)],
        marker=MARKERS[number % len(MARKERS)],
        linestyle="--" if dashed else "-",
        capsize=3,
        markersize=5,
    )


def percent_line(
    axis: Any,
    x: Sequence[float],
    y: Sequence[Estimate],
    label: str,
    number: int,
    dashed: bool = False,
) -> None:
    """A series of shares, drawn in per cent with their errors."""
    values, errors = [100 * each.value for each in y], [100 * each.error for each in y]
    line(axis, x, values, label, number, errors, dashed)


def level(axis: Any, y: float, label: str) -> None:
    """A horizontal line to compare with."""
    axis.axhline(y, color="#666666", linestyle=":", linewidth=1.2)
    axis.annotate(
        label,
        (0.01, y),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        color="#444444",
        fontsize=8,
    )
