"""Plots for `moe-edge inspect` and `plan`.

They show the bytes of each layer, and the plans by speed and loss.

They need matplotlib (the extra `plot`). Equal input gives byte-identical SVG files.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf_tools.units import format_size
from orchestrator.chat.console import strip_controls
from orchestrator.errors import ConfigError
from orchestrator.lab.plotting import COLOURS, require_matplotlib, save_figure

if TYPE_CHECKING:
    from orchestrator.cost.plans import Candidate, Frontier

_FORMATS = (".png", ".svg")
_DENSE_COLOUR = "#999999"
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
# Names from a file are shown literally, not parsed as formulas.
_STYLE: dict[str, Any] = {
    "font.size": 10,
    "svg.hashsalt": "moe-edge",
    "svg.fonttype": "none",
    "text.parse_math": False,
}
# Below this, the KL axis is linear, so that lossless plans (KL 0) can be shown.
_LEAST_KL = 1e-4
# Plans with an unknown KL are drawn this many times above the largest known one.
_ABOVE = 4.0
_MARKERS = "os^DvP"


def prepare(path: Path) -> None:
    """Check that a plot can later be written to this path. Raises ConfigError if not.

    A command calls this function before it does any work. Nothing is written yet.
    """
    require_matplotlib("--plot")
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--plot {path}: the name must end in {' or '.join(_FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder does not exist")


@contextmanager
def _picture(path: Path, width: float, height: float) -> Iterator[tuple[Any, Any]]:
    """Yield a new figure and its axes, and save the figure to `path` when the block ends.

    width, height: size in inches. Raises OSError if the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        yield figure, axes
        save_figure(figure, path)


def draw_layers(facts: dict[str, Any], path: Path) -> None:
    """Draw a bar for each layer of a model that shows the bytes of its dense weights and experts.

    facts: the result of gguf_tools.inspect.describe. Raises OSError if the file cannot be written.
    """
    from matplotlib.ticker import MaxNLocator

    layers = facts["per_layer"]
    dense = [layer["dense_bytes"] for layer in layers]
    parts = [(f"dense weights\n{format_size(sum(dense))}", _DENSE_COLOUR, dense)]
    for number, tier in enumerate(facts["tiers"]):
        held = [layer["tiers"][number]["bytes"] if layer["tiers"] else 0 for layer in layers]
        parts.append((_label(tier), COLOURS[number % len(COLOURS)], held))
    tops = [sum(sizes) for sizes in zip(*(held for *_, held in parts), strict=True)]
    scale, unit = next((each for each in _UNITS if max(tops) >= each[0]), _UNITS[-1])

    width = min(14.0, max(9.0, 2.5 + 0.22 * len(layers)))
    with _picture(path, width, 4.6) as (figure, axes):
        bottom = [0.0] * len(layers)
        for label, colour, held in parts:
            sizes = [each / scale for each in held]
            numbers = [layer["layer"] for layer in layers]
            axes.bar(numbers, sizes, 0.82, bottom, color=colour, label=label)
            bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
        axes.set_xlim(-0.6, len(layers) - 0.4)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
        axes.set_xlabel("layer")
        axes.set_ylabel(f"{unit} in the layer")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        handles, labels = axes.get_legend_handles_labels()
        columns = min(len(parts), int(width // 2.25))
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            fontsize=9,
        )
        figure.suptitle(_title(facts), fontsize=11)


def draw_plans(found: Frontier, title: str, path: Path) -> None:
    """Draw the ways to run a model (plans) as points: milliseconds per token against KL divergence.

    Plans with an unknown KL divergence are hollow points on a line above the others. Raises OSError
    if the file cannot be written.
    """
    with _picture(path, 9.0, 5.2) as (_, axes):
        shown = found.candidates
        unknown = _ABOVE * max([_LEAST_KL, *(each.kl or 0.0 for each in shown)])

        def at(each: Candidate) -> tuple[float, float]:
            return each.token_ms, unknown if each.kl is None else each.kl

        for number, name in enumerate(dict.fromkeys(each.policy for each in shown)):
            mine = [each for each in shown if each.policy == name]
            colour, marker = COLOURS[number % len(COLOURS)], _MARKERS[number % len(_MARKERS)]
            faces = ["none" if each.kl is None else colour for each in mine]
            where = zip(*map(at, mine), strict=True)
            axes.scatter(*where, s=44, marker=marker, edgecolors=colour, facecolors=faces, zorder=3)
            # an empty series, so that the legend has a filled marker
            axes.plot([], [], label=name, marker=marker, color=colour, linestyle="none")
        if any(each.kl is None for each in shown):
            axes.axhline(unknown, color="#999999", linewidth=1, linestyle=":")
            axes.annotate(
                "KL unknown",
                (0.5, unknown),
                xycoords=("axes fraction", "data"),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        edge = [each for each in shown if each.best]
        for each in edge:  # only these are labelled: more labels would overlap
            axes.annotate(
                f"{each.policy} {'/'.join(each.tiers)}",
                (each.token_ms, each.kl or 0.0),
                xytext=(5, 5),
                textcoords="offset points",
                fontsize=8,
                rotation=30,  # neighbours often have nearly the same loss
                rotation_mode="anchor",
            )
        steps = zip(*((each.token_ms, each.kl or 0.0) for each in edge), strict=True)
        axes.step(*(steps if edge else ([], [])), where="post", color="#999999", linewidth=1)
        ring: dict[str, Any] = {"facecolors": "none", "edgecolors": "black", "zorder": 4}
        axes.scatter(*at(found.taken), s=190, label="taken", **ring)
        axes.set_yscale("symlog", linthresh=_LEAST_KL)
        axes.set_ylim(bottom=-_LEAST_KL / 4)
        axes.yaxis.set_major_formatter(lambda kl, _: f"{kl:g}")  # the default writes formulas
        axes.margins(x=0.12)
        axes.set_xlabel("predicted ms per token")
        axes.set_ylabel("predicted KL divergence from the best precision, in nats per token")
        axes.set_title(title, fontsize=11)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)


def _label(tier: dict[str, Any]) -> str:
    name = _short(tier["name"], 20)
    return (
        f"experts in {name}\n{tier['bits_per_weight']:.2f} bits/weight,"
        f" {format_size(tier['bytes'])}"
    )


def _title(facts: dict[str, Any]) -> str:
    name = _short(facts["name"], 40)
    return (
        f"{name}: {facts['moe_layers']} layers of {facts['experts']} experts,"
        f" top-{facts['experts_used']}, file of {format_size(facts['file_bytes'])}\n"
        f"weights outside the layers: {format_size(facts['outside_layers_bytes'])}"
    )


def _short(name: str, most: int) -> str:
    """Return a name from a file on one line, with at most `most` characters."""
    name = " ".join(strip_controls(name).split())
    return name if len(name) <= most else name[: most - 3] + "..."
