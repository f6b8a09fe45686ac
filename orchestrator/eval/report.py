"""What was measured, as text: the figures of one configuration, and tables of studies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gguf_tools.units import format_size

_LABEL = 16


def render(result: dict[str, Any]) -> str:
    """The result of run.evaluate, one figure a line."""
    decode = result["form"] == "decode"
    lines = [f"{result['model']}, {result['mode']}"]
    if (text := result.get("text")) is not None:
        how = "each token decided on its own" if decode else "read as prompts"
        lines.append(
            _line(
                "perplexity",
                with_error(text["perplexity"]),
                f"{text['tokens']} tokens, {how}, windows of {result['window']}",
            )
        )
        lines += [_line(f"  {name}", with_error(value)) for name, value in text["domains"].items()]
        if (prefill := result.get("prefill_perplexity")) is not None:
            note = "read as prompts: decisions see later tokens"
            lines.append(_line("prefill form", with_error(prefill), note))
        if "kl" in text:
            lines.append(_line(f"KL from {text['best_tier']}", with_error(text["kl"], 5), "nats"))
            lines.append(_line("same top token", percent(text["top1"])))
    if (choices := result.get("choices")) is not None:
        lines.append(
            _line(
                "acc, acc_norm",
                f"{percent(choices['acc'])}, {percent(choices['acc_norm'])}",
                f"{choices['questions']} questions",
            )
        )
    if (usage := result["usage"]) is not None:
        asked = ", ".join(
            f"{100 * usage[key]:.1f} % {key}"
            for key in ("high", "low", "skip")
            if usage[key] is not None
        )
        lines.append(_line("experts asked", asked))
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


def percent(pair: Sequence[float | None], digits: int = 1) -> str:
    """A share with its standard error in per cent."""
    return f"{with_error([None if x is None else 100 * x for x in pair], digits)} %"


def change(pair: Sequence[float | None]) -> str:
    """A relative change with its standard error, as "+1.23 % +- 0.45"."""
    value, error = (0.0 if each is None else 100 * each for each in pair)
    return f"{value:+.2f} % +- {error:.2f}"


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a study. rows hold text in the order of columns; data: the same figures as
    numbers, fit for JSON."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    data: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """The table in Markdown, columns aligned, so that it reads well as it is too."""
        widths = [
            max(len(row[i]) for row in (self.columns, *self.rows)) for i in range(len(self.columns))
        ]

        def line(cells: Sequence[str]) -> str:
            padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            return f"| {' | '.join(padded)} |"

        rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
        body = [line(self.columns), rule, *(line(row) for row in self.rows)]
        notes = ["", *self.notes] if self.notes else []
        return "\n".join([f"**{self.title}**", "", *body, *notes])
