"""Rows of text in columns of one width each."""

from collections.abc import Callable, Sequence


def aligned(rows: Sequence[Sequence[str]], pad: Callable[[str, int], str] = str.ljust) -> list[str]:
    """A line for each row, with two spaces between the columns. pad: str.rjust aligns them at
    their right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(pad(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
