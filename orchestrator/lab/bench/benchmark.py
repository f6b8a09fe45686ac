"""The form of every benchmark: cases in processes of their own, and a report of all of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

from orchestrator.errors import ConfigError
from orchestrator.lab.bench.cases import Case
from orchestrator.lab.bench.loop import Loop, Measured
from orchestrator.lab.bench.models import Note
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.report import heading
from orchestrator.lab.bench.rows import Result
from orchestrator.lab.experiment import Experiment
from orchestrator.lab.table import document

L = TypeVar("L", bound="Loop[Any]")


def only(cases: list[Case], words: Sequence[str]) -> list[Case]:
    """The cases whose names have one of these words, all without words. Raises ConfigError where
    none is left."""
    found = [case for case in cases if not words or any(word in case.name for word in words)]
    if words and not found:
        names = ", ".join(dict.fromkeys(case.name for case in cases))
        raise ConfigError(f"--rows {','.join(words)}: no row is left of {names}")
    return found


# Said before anything else.
QUICK_NOTE = (
    "--quick: a tiny model and few tokens show that the benchmark runs. Its figures mean nothing."
)


class Benchmark(Experiment[L, Result]):
    """A benchmark is measured on a loop, which holds its options and its model. The report is one
    JSON-ready object, whose rows are under "cases"."""

    options: ClassVar[type[BenchOptions]]
    listed: ClassVar[staticmethod[[Any], list[Case]]]  # the cases that options ask for

    def prepare(self, options: BenchOptions, note: Note) -> L:
        """The loop; makes the model where it is not there yet. Raises MoeEdgeError."""
        return cast(L, Loop.prepare(options, note))

    def cases(self, loop: L) -> list[Case]:
        """What is compared, in the order of the tables."""
        listed: list[Case] = type(self).listed(loop.options)
        return listed

    def watch(self, loop: L, case: Case, number: int, measured: Measured) -> None:
        """Looks at a case in the minute in which it ran; nothing by default."""

    @abstractmethod
    def figures(self, loop: L, measured: Measured) -> Result:
        """What follows from all runs, at least the rows."""

    def goals(self, loop: L, rows: Sequence[Result]) -> list[Result] | None:
        """Each goal with what was measured, and whether it was "met"; None without goals."""
        return None

    @abstractmethod
    def intro(self, report: Result) -> list[str]:
        """What was measured and what the columns mean, a paragraph each."""

    def measure(self, on: L) -> Result:
        """The report. A case that fails is reported in its row."""
        measured = on.run(only(self.cases(on), on.options.rows), partial(self.watch, on))
        report = on.describe(measured) | self.figures(on, measured)
        goals = self.goals(on, report["cases"])
        if goals is None:
            return report
        return report | {"goals": [] if on.options.quick else goals}

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
