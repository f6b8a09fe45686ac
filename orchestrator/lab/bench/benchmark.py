"""The form of every benchmark: cases in processes of their own, and a report of all of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

from orchestrator.lab.bench.cases import Case, chosen
from orchestrator.lab.bench.loop import Loop, Measured
from orchestrator.lab.bench.models import Note
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.report import by_cap, heading
from orchestrator.lab.bench.rows import Result
from orchestrator.lab.experiment import Experiment
from orchestrator.lab.table import Column, Table, document

L = TypeVar("L", bound="Loop[Any]")

# Said before anything else.
QUICK_NOTE = (
    "--quick: a tiny model and few tokens show that the benchmark runs. Its figures mean nothing."
)


class Benchmark(Experiment[L, Result]):
    """A benchmark is measured on a loop, which holds its options and its model. The report is one
    JSON-ready object, whose rows are under "cases"; they are shown under columns."""

    options: ClassVar[type[BenchOptions]]
    columns: ClassVar[Sequence[Column]]

    def prepare(self, options: BenchOptions, note: Note) -> L:
        """The loop; makes the model where it is not there yet. Raises MoeEdgeError."""
        return cast(L, Loop.prepare(options, note))

    @abstractmethod
    def cases(self, loop: L) -> list[Case]:
        """What is compared, in the order of the tables."""

    def watch(self, loop: L, case: Case, number: int, measured: Measured) -> None:
        """Looks at a case in the minute in which it ran; nothing by default."""

    @abstractmethod
    def figures(self, loop: L, measured: Measured) -> Result:
        """What follows from all runs, at least the rows."""

    @abstractmethod
    def intro(self, report: Result) -> list[str]:
        """What was measured and what the columns mean, a paragraph each."""

    def notes(self, rows: Sequence[Result]) -> list[str]:
        """What else is to be said of the rows of one cap."""
        return []

    def tables(self, found: Result) -> list[Table]:
        return [
            Table(title, self.columns, rows, self.notes(rows)) for title, rows in by_cap(found)
        ]

    def measure(self, on: L) -> Result:
        """The report. A case that fails is reported in its row."""
        listed = chosen(self.cases(on), on.options.rows)
        measured = on.run(listed, partial(self.watch, on))
        return on.describe(measured) | self.figures(on, measured)

    def run(self, options: BenchOptions, note: Note = lambda text: None) -> Result:
        """Makes the model, measures everything and returns the report; note gets progress lines.
        Raises MoeEdgeError where no model can be made or read."""
        if options.quick:
            note(QUICK_NOTE)
        return self.measure(self.prepare(options, note))

    def text(self, report: Result) -> str:
        """The report for a terminal."""
        quick = [QUICK_NOTE] if report["options"]["quick"] else []
        head = [*quick, *heading(report), *self.intro(report)]
        return document(head, self.tables(report), report["skipped"])
