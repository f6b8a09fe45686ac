"""Studies as pictures: one PNG and one SVG each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from orchestrator.lab.eval.arithmetic import Estimate
from orchestrator.lab.plotting import COLOURS, require_matplotlib, save_figure

MARKERS = "os^Dv"


def require() -> Any:
    """pyplot, drawing to files. Raises ConfigError where matplotlib is not installed."""
    require_matplotlib("--study")
    import_module("matplotlib").use("Agg")
    return import_module("matplotlib.pyplot")


def files(folder: Path, name: str) -> list[Path]:
    """The paths of a picture."""
    return [folder / f"{name}.png", folder / f"{name}.svg"]


@contextmanager
def figure(folder: Path, name: str, panels: int = 1, rows: int = 1) -> Iterator[Sequence[Any]]:
    """Axes side by side, in rows; written to `files` at the end."""
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
            for path in files(folder, name):
                save_figure(drawing, path)
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
        color=COLOURS[number % len(COLOURS)],
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
