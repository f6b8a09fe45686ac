"""The table of the quantizations in a repository, as they would run on this machine.

`moe-edge plan hf:OWNER/NAME` and `moe-edge pull OWNER/NAME` print it.
"""

from __future__ import annotations

import os
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from gguf_tools.columns import aligned
from gguf_tools.units import format_size
from orchestrator.chat.console import Console
from orchestrator.cli.options import given, make_config
from orchestrator.cost.outlook import FITS, NO_ROOM, NOT, STREAMS, WELL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gguf_tools.hub import Listing
    from orchestrator.runtime.quantizations import Quantization, Quantizations

# Bytes per second. Streaming from a slower disk is called slow.
SLOW_DISK = 5e8
# Explanations of a table of models.
HERE = (
    f"here = {FITS}: the model fits in the memory of this machine.",
    f"here = {STREAMS}: this machine reads experts from disk as needed.",
)
RANGE = (
    "tok/s as a range: the lower speed assumes that all experts are used equally, the upper speed "
    "that few experts get most of the tokens."
)
COLUMNS = 100
# Two predictions that differ by less than this factor are shown as one number.
_DIFFER = 1.1
# A smaller share of a token's time is not worth a word.
_LITTLE = 0.05
_HEAD = ("", "file", "GiB", "bits", "here", "tok/s", "time goes to", "first", "RAM GiB")


def number(value: float | None) -> str:
    """Format a predicted number; "-" if it is None."""
    return "-" if value is None else f"{value:.2g}" if value < 10 else f"{value:.0f}"


def up_to(least: float | None, most: float | None) -> str:
    """Format a predicted number as text, such as "12", or as a range, such as "12-20".

    The range is from `least` to `most`. Only `least` is shown if `most` is None or hardly larger.
    The text is "-" if `least` is None.
    """
    if least is None or most is None or most < _DIFFER * least:
        return number(least)
    return f"{number(least)}-{number(most)}"


def machine_text(
    processor: str, threads: int, ram_bytes: int, disk_bytes_per_s: float, free_bytes: int
) -> str:
    """Return a line about this machine: processor, memory for a model, and disk."""
    slow = "" if disk_bytes_per_s >= SLOW_DISK else " (slow)"
    return (
        f"CPU: {processor}, {threads} threads; memory for a model: {format_size(ram_bytes)}; disk "
        f"speed: {disk_bytes_per_s / 1e9:.2f} GB/s{slow}; free disk space: "
        f"{format_size(free_bytes)}"
    )


def legend_lines(texts: Iterable[str]) -> list[str]:
    """Wrap the explanations of a table's columns. Each explanation begins on a new line."""
    return [line for text in texts for line in wrap(text, COLUMNS, subsequent_indent="  ")]


def compare_here(listing: Listing, options: dict[str, Any]) -> Quantizations:
    """Predict how the models of a repository would run on this machine. Show the progress.

    The result is a table with the predicted memory and speed of the models. options: the options of
    the command.
    """
    from orchestrator.runtime.answering import Answering
    from orchestrator.runtime.quantizations import compare

    chosen = {"remember": True, **given(options), "model": os.devnull}
    config = make_config(chosen)  # the model is a placeholder
    with Console().bars() as console:
        return compare(listing, Answering(images=True).request(config), console.bar)


def render_compared(found: Quantizations) -> str:
    """Format the table of a repository's quantizations as text."""
    rows = [_HEAD, *(_row(found, each) for each in found.rows)]
    legend = (
        "The model marked * suits this machine best. It is the most precise model with at least "
        f"{WELL:g} tokens per second, or else the fastest model.",
        "bits: mean bits per weight.",
        *HERE,
        f"here = {NOT}: memory is too small even for reading experts as needed.",
        f"here = {NO_ROOM}: the download is larger than the free disk space.",
        "tok/s: tokens per second on the CPU alone.",
        RANGE,
        "time goes to: shares of the time per token for reading from disk and for computing.",
        f"first: seconds until the answer to a first prompt of {found.first_tokens} tokens starts.",
    )
    problems = [f"{each.file}: {each.why}" for each in found.rows if each.why]
    left_out = f"{found.left_out} smaller models were not examined." if found.left_out else ""
    machine = machine_text(
        found.processor,
        found.threads,
        found.ram_bytes,
        found.disk_bytes_per_s,
        found.free_bytes,
    )
    return "\n".join(
        [
            *wrap(machine, COLUMNS),
            "",
            *aligned(rows),
            "",
            *problems,
            *([left_out] if left_out else []),
            *([""] if problems or left_out else []),
            *legend_lines(legend),
            f"For more exact predictions for one model: `moe-edge plan hf:{found.repo}/FILE`",
            f"Only headers were downloaded: {format_size(found.header_bytes)}.",
            *wrap(found.disturbed, COLUMNS),
        ]
    )


def _row(found: Quantizations, row: Quantization) -> tuple[str, ...]:
    outlook = row.outlook
    return (
        "*" if row.file == found.best else "",
        row.file,
        f"{row.disk_bytes / 2**30:.1f}",
        number(row.bits) if row.bits is None else f"{row.bits:.1f}",
        found.here(row) or "-",
        up_to(outlook.tokens_s, outlook.tokens_s_skewed) if outlook else "-",
        _time_text(outlook.reading) if outlook else "-",
        number(outlook.first_s) if outlook else "-",
        f"{outlook.ram_bytes / 2**30:.1f}" if outlook else "-",
    )


def _time_text(reading: float | None) -> str:
    """Return whether a token's time goes to computing, to reading from disk, or to both.

    reading: the share of the time that waits for the disk; None if it is unknown.
    """
    if reading is None:
        return "-"
    if reading < _LITTLE:
        return "computing"
    return f"{reading:.0%} reading, {1 - reading:.0%} computing"
