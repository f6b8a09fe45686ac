"""Settings that several policies have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gguf_tools.units import format_size
from orchestrator.settings import RATE, Settings, setting

USUAL_RATE = 128 << 20  # bytes a second


@dataclass(frozen=True)
class Background(Settings):
    """Settings of policies that exchange versions beside decoding, by what was used so far."""

    profile: Path | None = setting(
        None,
        "Where it is kept which experts were used; without it, a chat uses the user cache.",
        recorded=False,
    )
    transition_rate: int | None = setting(
        None,
        "What exchanges of versions may read in a second beside decoding, as 64MiB; 0: no limit.",
        within=(0, 2**48),
        unit=RATE,
        shown=f"{format_size(USUAL_RATE)}, with context no limit",
    )


@dataclass(frozen=True)
class Shared(Settings):
    """Settings of policies that have little else in common. Each takes what it needs by `again`."""

    hot_experts: int | None = setting(
        None,
        "The most experts of a layer that may be high.",
        within=(0, 65535),
        shown="what the budget has room for",
    )
    losses: Path | None = setting(
        None,
        "The loss table that experts' precisions go by, of moe-edge calibrate; with context for "
        "--near-slots shared alone.",
        shown="FILE.calib.json",
        recorded=False,
    )
