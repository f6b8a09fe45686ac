"""The form of every benchmark: cases in processes of their own, and a report of all of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeVar, cast

from orchestrator.lab.bench.cases import Case, chosen
from orchestrator.lab.bench.loop import Loop
from orchestrator.lab.bench.models import Note
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.report import MIB, heading, made_of, row_notes
from orchestrator.lab.bench.rows import Result, caps_of, case_row
from orchestrator.lab.experiment import Experiment
from orchestrator.lab.table import Column, Report, Table

L = TypeVar("L", bound="Loop[Any]")

# Said before anything else.
QUICK_NOTE = (
    "--quick: a tiny model and few tokens show that the benchmark runs. Its figures mean nothing."
)


class Benchmark(Experiment[L, Report]):
    """A benchmark is measured on a loop, which holds its options and its model: a list of cases, a
    row for each, and columns."""

    options: ClassVar[type[BenchOptions]]
    loop: ClassVar[type[Loop[Any]]] = Loop
    columns: ClassVar[Sequence[Column]]

    @abstractmethod
    def cases(self, loop: L) -> list[Case]:
        """What is compared, in the order of the tables."""

    def row(self, loop: L, case: Case, runs: Sequence[Result]) -> Result:
        """The figures of one case over its runs, or "error"."""
        return case_row(case, runs, loop.limit_bytes(case))

    def compare(self, loop: L, rows: Sequence[Result], runs: Sequence[Sequence[Result]]) -> None:
        """Adds to the rows what follows from all of them; nothing by default. runs: of each."""

    def rows(self, loop: L) -> list[Result]:
        """Measures all rows. A case that failed is reported in its row."""
        listed = chosen(self.cases(loop), loop.options.rows)
        runs = loop.run(listed)
        rows = [self.row(loop, case, each) for case, each in zip(listed, runs, strict=True)]
        self.compare(loop, rows, runs)
        return rows

    def groups(self, loop: L, rows: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
        """(title, rows) of each table: of each cap, everything resident first."""
        for same in caps_of(rows):
            cap, limit = same[0]["cap"], same[0]["limit_bytes"]
            title = "everything resident" if cap is None else loop.cap_words.format(cap)
            yield title + ("" if limit is None else f", {limit / MIB:.0f} MiB"), same

    @abstractmethod
    def intro(self, loop: L) -> list[str]:
        """What was measured and what the columns mean, a paragraph each."""

    def notes(self, rows: Sequence[Result]) -> list[str]:
        """What else is to be said of the rows of one table."""
        return row_notes(rows)

    def measure(self, on: L) -> Report:
        tables = [
            Table(f"{title}; {made_of(on)}", self.columns, rows, self.notes(rows))
            for title, rows in self.groups(on, self.rows(on))
        ]
        quick = [QUICK_NOTE] if on.options.quick else []
        return Report([*quick, *heading(on), *self.intro(on)], tables, on.skipped)

    def tables(self, found: Report) -> list[Table]:
        return found.tables

    def run(self, options: BenchOptions, note: Note = lambda text: None) -> Report:
        """Makes the model, measures everything and reports it; note gets progress lines. Raises
        MoeEdgeError where no model can be made or read."""
        if options.quick:
            note(QUICK_NOTE)
        return self.measure(cast(L, self.loop(options, note)))
