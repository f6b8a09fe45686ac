"""Settings that several policies share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gguf_tools.units import format_size
from orchestrator.settings import RATE, Settings, setting

USUAL_RATE = 128 << 20  # bytes a second


@dataclass(frozen=True)
class Background(Settings):
    """Settings of policies that change the tiers of experts in the background during decoding."""

    profile: Path | None = setting(
        None,
        "File that records how often each expert is used. Default for a chat: a file in "
        "moe-edge's own cache folder.",
        recorded=False,
    )
    transition_rate: int | None = setting(
        None,
        "Bytes per second that may be read during decoding to change the precision of experts, "
        "such as 64MiB; 0 for no limit.",
        within=(0, 2**48),
        unit=RATE,
        shown=f"{format_size(USUAL_RATE)} per second; with --policy context, unlimited",
    )


@dataclass(frozen=True)
class Shared(Settings):
    """Declarations of settings that several unrelated policies have.

    Each of these policies copies the declarations that it needs with `inherit`.
    """

    hot_experts: int | None = setting(
        None,
        "Maximum number of experts per layer in the high precision.",
        within=(0, 65535),
        shown="as many experts as fit in memory",
    )
    losses: Path | None = setting(
        None,
        "File of moe-edge calibrate with the quality loss of each expert and precision, for "
        "choosing precisions. Together with --policy context, it needs --near-slots shared.",
        shown="FILE.calib.json",
        recorded=False,
    )
