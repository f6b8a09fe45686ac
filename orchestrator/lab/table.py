"""Tables of figures: described once, shown as text for a terminal, as Markdown, and as JSON."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

_TIED = "\N{NO-BREAK SPACE}"

# Columns of a terminal that a line of text may take.
WIDTH = 100

# Figures by name. A row with "error" says in the place of its figures why it has none.
Row = dict[str, Any]


def fixed(digits: int, per: float = 1.0) -> Callable[[float], str]:
    """Shows a number with so many digits behind the point, counted in units of `per`."""
    return lambda value: f"{value / per:.{digits}f}"


def percent(digits: int = 0, unit: str = "") -> Callable[[float], str]:
    """Shows a share as a number of percent."""
    return lambda value: f"{100 * value:.{digits}f}{unit}"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    of: the name of the figure in a row, or a function that takes it from the row. show turns the
    figure into text; a figure that is missing or None is an empty cell. left: the cells are words
    and stand at the left of the column in text.
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
    """Rows of figures under columns. totals are rows below the others that are shown and are no
    data of their own."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    footnotes: list[str] = field(default_factory=list)
    totals: Sequence[Row] = ()

    def _cells(self) -> list[list[str]]:
        """The text of all rows; of a failed row, its name and the error."""
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
        """The table for a terminal, in lines of at most WIDTH where the figures allow it."""
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
        """The table in Markdown, its columns aligned, so that it reads well as it is too."""
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
        """The table for JSON: its texts, and the figures of its rows as data."""
        return {
            "title": self.title,
            "columns": self.headings,
            "rows": self._cells(),
            "data": list(self.rows),
            "notes": self.footnotes,
        }


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph in lines of at most WIDTH, those behind the first one further to the right. A
    number stays on the line of what it counts."""
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
    """What was measured, its tables, and what is to be said of all of it."""

    heading: list[str]
    tables: list[Table]
    notes: list[str]

    @property
    def rows(self) -> list[Row]:
        """The rows of all tables."""
        return [row for table in self.tables for row in table.rows]

    def text(self) -> str:
        """The report for a terminal."""
        parts = ["\n".join(map(wrapped, self.heading))]
        parts += [table.text() for table in self.tables]
        if self.notes:
            parts.append("\n".join(wrapped(f"note: {note}") for note in self.notes))
        return "\n\n".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        tables = [table.as_dict() for table in self.tables]
        return {"heading": self.heading, "tables": tables, "notes": self.notes}
