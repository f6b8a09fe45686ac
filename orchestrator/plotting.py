"""What all plots share: whether they can be drawn, and their colours."""

from __future__ import annotations

import importlib.util

from orchestrator.errors import ConfigError

# The palette of Okabe and Ito, which colour-blind people can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")


def require_matplotlib(option: str) -> None:
    """Raises ConfigError where matplotlib is not installed; option: what asked for a plot."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"a plot needs matplotlib: run `pip install -e '.[plot]'`, or leave {option} away"
        )
