"""The form of every benchmark: cases in processes of their own, and a report of all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from orchestrator.lab.bench.cases import Case, chosen
from orchestrator.lab.bench.loop import Loop
from orchestrator.lab.bench.models import Note
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.report import MIB, heading, made_of, row_notes
from orchestrator.lab.bench.rows import Result, caps_of, case_row
from orchestrator.lab.table import Column, Report, Table

# Said before anything else.
QUICK_NOTE = (
    "--quick: a tiny model and few tokens show that the benchmark runs. Its figures mean nothing."
)


class Benchmark(ABC):
    """A benchmark is measured on a loop, which holds its options and its model: a list of cases, a
    row for each, and columns."""

    options: ClassVar[type[BenchOptions]]
    loop: ClassVar[type[Loop]] = Loop
    columns: ClassVar[Sequence[Column]]

    @abstractmethod
    def cases(self, loop: Any) -> list[Case]:
        """What is compared, in the order of the tables."""

    def row(self, loop: Any, case: Case, runs: Sequence[Result]) -> Result:
        """The figures of one case over its runs, or "error"."""
        return case_row(case, runs, loop.limit_bytes(case))

    @abstractmethod
    def compare(self, loop: Any, rows: Sequence[Result], runs: Sequence[Sequence[Result]]) -> None:
        """Adds to the rows what follows from all of them. runs: of each."""

    def rows(self, loop: Any) -> list[Result]:
        """Measures all rows. A case that failed is reported in its row."""
        listed = chosen(self.cases(loop), loop.options.rows)
        runs = loop.run(listed)
        rows = [self.row(loop, case, each) for case, each in zip(listed, runs, strict=True)]
        self.compare(loop, rows, runs)
        return rows

    @abstractmethod
    def intro(self, loop: Any) -> list[str]:
        """What was measured and what the columns mean, a paragraph each."""

    def notes(self, rows: Sequence[Result]) -> list[str]:
        """What else is to be said of the rows of one table."""
        return row_notes(rows)

    def run(self, options: BenchOptions, note: Note = lambda text: None) -> Report:
        """Makes the model, measures everything and reports it, in a table for each cap, everything
        resident first; note gets progress lines. Raises MoeEdgeError where no model can be made or
        read."""
        quick = [QUICK_NOTE] if options.quick else []
        for line in quick:
            note(line)
        loop, tables = self.loop(options, note), []
        for same in caps_of(self.rows(loop)):
            cap, limit = same[0]["cap"], same[0]["limit_bytes"]
            title = "everything resident" if cap is None else loop.cap_words.format(cap)
            title += "" if limit is None else f", {limit / MIB:.0f} MiB"
            tables.append(Table(f"{title}; {made_of(loop)}", self.columns, same, self.notes(same)))
        return Report([*quick, *heading(loop), *self.intro(loop)], tables, loop.skipped)
