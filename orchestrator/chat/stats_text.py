"""The statistics of an answer, as text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gguf_tools.units import format_size
from orchestrator.events import SKIP_TIER

if TYPE_CHECKING:
    from orchestrator.events import GenerationStats

# Why an answer ended, where it was not the model that ended it.
ENDINGS = {
    "cancelled": "stopped",
    "context": "cut: the context is full (--ctx)",
    "length": "cut at --max-tokens",
}


def stats_fields(stats: GenerationStats, ram_bytes: int) -> list[str]:
    """The statistics of one answer, short: the fields of the dim line below it.

    ram_bytes is the cap on everything that the model takes.
    What the plain path does not have (hits, mix, reads, slots) is left out there.
    """
    fields = [ENDINGS[stats.finish]] if stats.finish in ENDINGS else []
    fields.append(f"TTFT {stats.ttft_ms:.0f} ms")
    if math.isfinite(stats.tokens_per_s):
        fields.append(f"{stats.tokens_per_s:.1f} tokens/s")
    if stats.hit_rate is not None:
        fields.append(f"hits {100 * stats.hit_rate:.0f} %")
        fields.append(_mix_text(stats.mix))
        differs = any(
            abs(stats.mix.get(tier, 0.0) - x) > 0.005 for tier, x in stats.computed.items()
        )
        if differs and SKIP_TIER not in stats.mix:
            fields[-1] += f" (computed {_mix_text(stats.computed)})"
    if stats.kl_estimate is not None and len(stats.mix) > 1:
        fields.append(f"KL about {stats.kl_estimate:.4f}")
    if stats.budget_bytes:
        fields.append(f"read {format_size(stats.bytes_read)}")
    fields.append(f"memory {format_size(stats.peak_rss_bytes)} of {format_size(ram_bytes)}")
    if stats.budget_bytes:
        fields.append(f"expert slots {format_size(stats.budget_bytes)}")
    fields.append(_short_mode(stats.mode))
    return fields


def _mix_text(mix: Mapping[str, float]) -> str:
    return " ".join(f"{tier} {100 * share:.0f} %" for tier, share in mix.items())


def _short_mode(mode: str) -> str:
    """The part of the mode line before its reasons and amounts."""
    if mode.startswith("managed: "):
        return mode.removeprefix("managed: ").split(",")[0]
    return mode.split(":")[0]


def stats_table(stats: GenerationStats) -> str:
    """All statistics of an answer, one a line."""
    rows: list[tuple[str, str]] = []
    values = stats.as_dict()
    policy = values.pop("policy")
    for key, value in (values | policy).items():
        if value is None:
            text = "-"
        elif isinstance(value, list):
            text = " ".join(_short(each) for each in value)
        elif isinstance(value, dict):
            text = ", ".join(f"{name} {_number(share)}" for name, share in value.items())
        elif "bytes" in key:
            text = format_size(value)
        else:
            text = _number(value)
        rows.append((key, text))
    width = max(len(key) for key, _ in rows)
    return "\n".join(f"{key:<{width}}  {text}" for key, text in rows)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _number(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
