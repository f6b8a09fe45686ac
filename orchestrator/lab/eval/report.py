"""What was measured of one configuration, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gguf_tools.units import format_size

_LABEL = 16


def render(result: dict[str, Any]) -> str:
    """The result of run.evaluate, one figure a line."""
    decode = result["form"] == "decode"
    lines = [f"{result['model']}, {result['mode']}"]
    if (text := result.get("text")) is not None:
        prompt = result["prompt_tokens"]
        behind = f" behind prompts of {prompt} tokens or more" if prompt else ""
        how = "each token decided on its own" if decode else "read as prompts"
        if "kl" in text:
            lines.append(_line(f"KL from {text['best_tier']}", with_error(text["kl"], 5), "nats"))
        lines.append(
            _line(
                "perplexity",
                with_error(text["perplexity"]),
                f"{text['tokens']} tokens, {how}{behind}, windows of {result['window']}",
            )
        )
        lines += [_line(f"  {name}", with_error(value)) for name, value in text["domains"].items()]
        if "top1" in text:
            lines.append(_line("same top token", share_with_error(text["top1"])))
    if (choices := result.get("choices")) is not None:
        lines.append(
            _line(
                "acc, acc_norm",
                f"{share_with_error(choices['acc'])}, {share_with_error(choices['acc_norm'])}",
                f"{choices['questions']} questions",
            )
        )
    if (usage := result["usage"]) is not None:
        if usage["kl_estimate"] is not None:
            lines.append(
                _line(
                    "KL foreseen", f"{usage['kl_estimate']:.5f}", "by the loss table, or as learned"
                )
            )
        asked = ", ".join(
            f"{100 * usage[key]:.1f} % {key}"
            for key in ("high", "low", "skip")
            if usage[key] is not None
        )
        lines.append(_line("experts asked", asked))
        if (virtual := result.get("virtual")) is not None and virtual["tpot_ms_mean"]:
            note = (
                f"virtual: reads of {format_size(virtual['bandwidth'])}/s and "
                f"{virtual['latency_us']} us, computing {virtual['compute_ms']:.2f} ms"
            )
            lines.append(_line("time a token", f"{virtual['tpot_ms_mean']:.2f} ms", note))
        if usage["computed_low"] is not None:
            how = "exact tiers" if result["exact_tiers"] else "high copies in memory reused"
            lines.append(_line("computed low", f"{100 * usage['computed_low']:.1f} %", how))
        reads = format_size(usage["bytes_read"])
        if usage["hit_rate"] is not None:
            reads += f", {100 * usage['hit_rate']:.1f} % found in memory"
        lines.append(_line("read", reads))
    return "\n".join(lines)


def _line(label: str, value: str, note: str = "") -> str:
    return f"{label:{_LABEL}}{value}{f'  ({note})' if note else ''}"


def with_error(pair: Sequence[float | None], digits: int = 3) -> str:
    """A value with its standard error, as "12.345 +- 0.210"."""
    value, error = pair
    shown = "?" if value is None else f"{value:.{digits}f}"
    return shown if error is None else f"{shown} +- {error:.{digits}f}"


def share_with_error(pair: Sequence[float | None], digits: int = 1) -> str:
    """A share with its standard error in per cent."""
    return f"{with_error([None if x is None else 100 * x for x in pair], digits)} %"
