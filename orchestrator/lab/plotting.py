"""What all plots share: whether they can be drawn, their colours, and their files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from orchestrator.cache.files import whole_file
from orchestrator.errors import ConfigError

# The palette of Okabe and Ito, which colour-blind people can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")


def require_matplotlib(option: str) -> None:
    """Raises ConfigError where matplotlib is not installed; option: what asked for a plot."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"a plot needs matplotlib: run `pip install 'moe-edge[plot]'`, or leave {option} away"
        )


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure of matplotlib, whole or not at all, as what the name's ending says: PNG or
    SVG, of which equal figures have equal bytes. Raises OSError."""
    kind = path.suffix.lower().removeprefix(".")
    metadata = {"Date": None} if kind == "svg" else None
    with whole_file(path) as file:
        figure.savefig(file, format=kind, dpi=150, metadata=metadata)
