"""Format rows of text as aligned columns."""

import textwrap
from collections.abc import Callable, Mapping, Sequence

# On a terminal narrower than _NARROW columns, an explanation starts on the line below its name,
# indented by _BELOW columns.
_NARROW, _BELOW = 60, 6
# A name longer than this gets a line of its own.
_MOST_NAME = 26


def aligned(rows: Sequence[Sequence[str]], pad: Callable[[str, int], str] = str.ljust) -> list[str]:
    """Format rows of cells as a table with aligned columns, and return one line per row.

    pad: `str.ljust` aligns the columns to the left, `str.rjust` to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(pad(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def explained(groups: Mapping[str, Sequence[tuple[str, str]]], columns: int) -> str:
    """Format names and their explanations like the list of options in a `--help` text.

    groups: the pairs (name, explanation) of each group, by the group's heading.
    columns: width at which explanations are wrapped, without breaking words.
    """
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
