"""Where the bytes of a model lie, as a picture: by layer and tier. Needs matplotlib, the extra
`plot`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from gguf_tools.units import format_size
from orchestrator.chat.console import strip_controls
from orchestrator.errors import ConfigError
from orchestrator.lab.plotting import COLOURS, require_matplotlib, save_figure

_FORMATS = (".png", ".svg")
_DENSE_COLOUR = "#999999"
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def prepare(path: Path) -> None:
    """Checks, before anything is read, that a plot can be written there. Raises ConfigError."""
    require_matplotlib("--plot")
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--plot {path}: name a file that ends in {' or '.join(_FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no such folder")


def draw(facts: dict[str, Any], path: Path) -> None:
    """Writes the facts of gguf_tools.inspect.describe as stacked bars, one for each layer.

    Equal facts give equal SVG bytes. Raises OSError where the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    layers = facts["per_layer"]
    dense = [layer["dense_bytes"] for layer in layers]
    parts = [(f"dense weights\n{format_size(sum(dense))}", _DENSE_COLOUR, dense)]
    for number, tier in enumerate(facts["tiers"]):
        held = [layer["tiers"][number]["bytes"] if layer["tiers"] else 0 for layer in layers]
        parts.append((_label(tier), COLOURS[number % len(COLOURS)], held))
    tops = [sum(sizes) for sizes in zip(*(held for *_, held in parts), strict=True)]
    scale, unit = next((each for each in _UNITS if max(tops) >= each[0]), _UNITS[-1])

    # names out of the file are shown as they are, not read as formulas
    style = {
        "font.size": 10,
        "svg.hashsalt": "moe-edge",
        "svg.fonttype": "none",
        "text.parse_math": False,
    }
    with matplotlib.rc_context(style):
        width = min(14.0, max(9.0, 2.5 + 0.22 * len(layers)))
        figure = Figure(figsize=(width, 4.6), layout="constrained")
        axes = figure.subplots()
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
        axes.spines[["top", "right"]].set_visible(False)
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
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            save_figure(figure, path)


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
        f" top-{facts['experts_used']}, {format_size(facts['file_bytes'])}\n"
        f"outside of the layers: {format_size(facts['outside_layers_bytes'])}"
    )


def _short(name: str, most: int) -> str:
    """A name out of the file, on one line and not longer than that."""
    name = " ".join(strip_controls(name).split())
    return name if len(name) <= most else name[: most - 3] + "..."
