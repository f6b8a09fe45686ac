"""Tables of metrics, rendered as text, Markdown or JSON."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

_TIED = "\N{NO-BREAK SPACE}"

# Maximum length of a line of text.
WIDTH = 100

# A row: values by name. The row of a failed run has a message in "error" instead.
Row = dict[str, Any]


def fixed(digits: int, per: float = 1.0) -> Callable[[float], str]:
    """Return a function that divides a number by `per` and formats it with `digits` decimals."""
    return lambda value: f"{value / per:.{digits}f}"


def percent(digits: int = 0, unit: str = "") -> Callable[[float], str]:
    """Return a function that formats a fraction as a percentage with `digits` decimals.

    `unit` is appended to the number.
    """
    return lambda value: f"{100 * value:.{digits}f}{unit}"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table of results.

    - of: the key of the value in a row, or a function that computes it from the row.
    - show: formats the value. A missing value or None gives an empty cell.
    - left: align the text to the left.
    """

    name: str
    of: str | Callable[[Row], Any]
    show: Callable[[Any], str] = str
    unit: str = ""
    left: bool = False

    @property
    def heading(self) -> str:
        return f"{self.name} {self.unit}".strip()

    def cell(self, row: Row) -> str:
        value = row.get(self.of) if isinstance(self.of, str) else self.of(row)
        return "" if value is None else self.show(value)


@dataclass(slots=True)
class Table:
    """A table of results: rows (dicts of values) under columns.

    `totals` are additional rows that are shown, but are not part of the data.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    footnotes: list[str] = field(default_factory=list)
    totals: Sequence[Row] = ()

    def _cells(self) -> list[list[str]]:
        """Return the text of each cell, row by row.

        A row of a failed run has only its name and the error message.
        """
        return [
            [self.columns[0].cell(row), row["error"]]
            if "error" in row
            else [column.cell(row) for column in self.columns]
            for row in (*self.rows, *self.totals)
        ]

    @property
    def headings(self) -> list[str]:
        return [column.heading for column in self.columns]

    def text(self) -> str:
        """Format the table for a terminal, in lines of at most WIDTH characters if possible."""
        cells = self._cells()
        full = [self.headings, *(row for row in cells if len(row) == len(self.columns))]
        widths = [max(map(len, each)) for each in zip(*full, strict=True)]
        widths[0] = max(widths[0], *(len(row[0]) for row in cells), 0)
        gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "

        def line(row: Sequence[str]) -> str:
            if len(row) < len(self.columns):
                return f"{row[0]:{widths[0]}}{gap}{row[1]}"[:WIDTH]
            padded = (
                cell.ljust(width) if column.left else cell.rjust(width)
                for cell, width, column in zip(row, widths, self.columns, strict=True)
            )
            return gap.join(padded).rstrip()

        title = [wrapped(self.title)] if self.title else []
        notes = (wrapped(note, "  ") for note in self.footnotes)
        return "\n".join([*title, line(self.headings), *map(line, cells), *notes])

    def markdown(self) -> str:
        """Format the table in Markdown, with columns that are also aligned in the source."""
        heads = self.headings
        rows = [row + [""] * (len(heads) - len(row)) for row in self._cells()]
        widths = [max(map(len, each)) for each in zip(heads, *rows, strict=True)]

        def line(cells: Sequence[str]) -> str:
            padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            return f"| {' | '.join(padded)} |"

        rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
        body = [line(heads), rule, *map(line, rows)]
        notes = ["", *self.footnotes] if self.footnotes else []
        return "\n".join([f"**{self.title}**", "", *body, *notes])

    def as_dict(self) -> dict[str, Any]:
        """Return the table as a dict for JSON: its formatted text, and the rows with their data."""
        return {
            "title": self.title,
            "columns": self.headings,
            "rows": self._cells(),
            "data": list(self.rows),
            "notes": self.footnotes,
        }


def wrapped(text: str, indent: str = "") -> str:
    """Wrap a paragraph to lines of at most WIDTH characters.

    All lines begin with `indent`. Lines after the first are indented further. A number stays on one
    line with its unit.
    """
    own = text[: len(text) - len(text.lstrip())]
    filled = textwrap.fill(
        re.sub(r"(?<=\d) (?=[%A-Za-z])", _TIED, text),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}{own}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace(_TIED, " ")


@dataclass(slots=True)
class Report:
    """A report of an experiment: heading, tables and notes."""

    heading: list[str]
    tables: list[Table]
    notes: list[str]

    @property
    def rows(self) -> list[Row]:
        """The rows of all tables, in one list."""
        return [row for table in self.tables for row in table.rows]

    def text(self) -> str:
        """Format the whole report for a terminal."""
        parts = ["\n".join(map(wrapped, self.heading))]
        parts += [table.text() for table in self.tables]
        if self.notes:
            parts.append("\n".join(wrapped(f"note: {note}") for note in self.notes))
        return "\n\n".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Return the whole report as a dict for JSON."""
        tables = [table.as_dict() for table in self.tables]
        return {"heading": self.heading, "tables": tables, "notes": self.notes}
