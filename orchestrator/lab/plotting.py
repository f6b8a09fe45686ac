"""Plots: shared settings, and panels of lines or bars, written as PNG and SVG."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.cache.files import whole_file
from orchestrator.errors import ConfigError

# The palette of Okabe and Ito, suitable for color-blind readers.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")


def require_matplotlib(option: str | None = None) -> None:
    """Raise ConfigError if matplotlib is not installed.

    `option` is the command's option that needs matplotlib. The message suggests to remove it. None
    means that the command cannot run without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        advice = f", or remove {option}" if option else ""
        raise ConfigError(f"a plot needs matplotlib: run `pip install 'moe-edge[plot]'`{advice}")


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure to a PNG or SVG file, depending on the ending of the path.

    The file is replaced atomically. The same figure always gives the same SVG bytes. Raises OSError
    if the file cannot be written.
    """
    kind = path.suffix.lower().removeprefix(".")
    metadata = {"Date": None} if kind == "svg" else None
    with whole_file(path) as file:
        figure.savefig(file, format=kind, dpi=150, metadata=metadata)


MARKERS = "os^Dv"
GREY = "#666666"


@dataclass(frozen=True, slots=True)
class Line:
    """One line (data series) of a plot.

    `y` holds a pair [value, standard error] for each x. The error may be None. `style` is the index
    of color and marker; None uses the index of the line in its plot.
    """

    label: str
    x: Sequence[float]
    y: Sequence[Sequence[float | None]]
    dashed: bool = False
    style: int | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot of a figure: labels of the axes and lines.

    - levels: values of horizontal lines for comparison, by label.
    - percent: the values are fractions, and are shown in percent.
    - scale: scale of the y axis, "linear", "log" or "symlog".
    - ends: limits of the y axis. None chooses a limit from the data.
    - bars: draw bars instead of lines.
    - ticks: labels of the x positions 0, 1, 2 and so on.
    """

    x: str
    y: str
    lines: Sequence[Line]
    title: str = ""
    levels: Mapping[str, float] = field(default_factory=dict)
    percent: bool = False
    scale: str = "linear"
    ends: tuple[float | None, float | None] = (None, None)
    bars: bool = False
    ticks: Sequence[Any] = ()


def exact(values: Sequence[float]) -> list[list[float | None]]:
    """Convert values without a standard error to pairs for the field `y` of Line.

    Each pair is [value, None], so the plot shows no error bar.
    """
    return [[each, None] for each in values]


def figure_of(panels: Sequence[Panel], rows: int) -> Any:
    """Return a matplotlib figure that shows the plots in this number of rows."""
    columns = len(panels) // rows
    figure = import_module("matplotlib.figure").Figure(
        figsize=(5.6 * columns, 4.2 * rows), layout="constrained"
    )
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, panel in zip(axes.ravel(), panels, strict=True):
        _draw_panel(axis, panel)
    return figure


def draw(folder: Path, name: str, panels: Sequence[Panel], rows: int) -> None:
    """Draw plots in this number of rows, and write them to NAME.png and NAME.svg."""
    with import_module("matplotlib").rc_context({"svg.hashsalt": name, "font.size": 10}):
        figure = figure_of(panels, rows)
        for ending in ("png", "svg"):
            save_figure(figure, folder / f"{name}.{ending}")


def _draw_panel(axis: Any, panel: Panel) -> None:
    unit = 100 if panel.percent else 1
    for number, line in enumerate(panel.lines):
        style = number if line.style is None else line.style
        y, errors = unit * np.array(line.y, float).reshape(-1, 2).T
        looks = {"yerr": errors, "color": COLOURS[style % len(COLOURS)], "capsize": 3}
        if panel.bars:
            axis.bar(line.x, y, **looks)
            continue
        marker, dash = MARKERS[style % len(MARKERS)], "--" if line.dashed else "-"
        looks |= {"marker": marker, "markersize": 5, "linestyle": dash, "label": line.label}
        axis.errorbar(line.x, y, **looks)
    for label, value in panel.levels.items():
        at = unit * value
        axis.axhline(at, color=GREY, linestyle=":", linewidth=1.2)
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axis.annotate(label, (0.01, at), xytext=(0, 3), color=GREY, fontsize=8, **place)
    if panel.ticks:
        places = range(len(panel.ticks))
        names = [str(each) for each in panel.ticks]
        turned = {"rotation": 60, "ha": "right"} if max(map(len, names)) > 3 else {}
        axis.set_xticks(places, names, fontsize=8, **turned)
    if not panel.bars and any(line.label for line in panel.lines):
        axis.legend(fontsize=7)
    axis.set_xlabel(panel.x)
    axis.set_ylabel(panel.y)
    axis.set_title(panel.title, fontsize=9)
    if panel.scale == "symlog":
        axis.set_yscale("symlog", linthresh=10)
    else:
        axis.set_yscale(panel.scale)
    axis.set_ylim(*panel.ends)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
