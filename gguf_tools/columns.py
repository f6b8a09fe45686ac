"""Rows of text in columns of one width each."""

import textwrap
from collections.abc import Callable, Mapping, Sequence

# Where there are fewer columns, what is said of a name stands below it, so far to the right.
_NARROW, _BELOW = 60, 6
# Of the names; what is longer stands on a line of its own.
_MOST_NAME = 26


def aligned(rows: Sequence[Sequence[str]], pad: Callable[[str, int], str] = str.ljust) -> list[str]:
    """A line for each row, with two spaces between the columns. pad: str.rjust aligns them at
    their right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(pad(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def explained(groups: Mapping[str, Sequence[tuple[str, str]]], columns: int) -> str:
    """Names and what they mean, below the heading of each group, in lines of so many columns. No
    word is broken."""
    names = [len(name) for rows in groups.values() for name, _ in rows]
    indent = " " * (min(max(names), _MOST_NAME) + 4 if columns >= _NARROW else _BELOW)
    lines = []
    for heading, rows in groups.items():
        lines += ["", f"{heading}:"]
        for name, text in rows:
            first = f"  {name}  ".ljust(len(indent))
            if len(first) > len(indent):
                lines.append(first.rstrip())
                first = indent
            lines += textwrap.wrap(
                text,
                columns,
                initial_indent=first,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines[1:])
