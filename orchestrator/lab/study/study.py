"""The base classes of all studies.

A study compares configurations of a model on a text, and returns tables and plots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, ClassVar

import numpy as np

from gguf_tools.units import format_size
from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import pair
from orchestrator.lab.eval.judge import Reference
from orchestrator.lab.eval.run import share_with_error, with_error
from orchestrator.lab.plotting import Line, Panel
from orchestrator.lab.study.subject import Part, Score, Settings, Subject, Wrapper, halves
from orchestrator.lab.study.uniform import UniformFile, tiers_of
from orchestrator.lab.table import Column, Row, Table, fixed, percent
from orchestrator.policy import Policy


def show_change(found: Sequence[float | None]) -> str:
    """Format a relative change and its standard error, for example as "+1.23 % +- 0.45".

    `found` has these two values as fractions. None is shown as 0.
    """
    value, error = (0.0 if each is None else 100 * each for each in found)
    return f"{value:+.2f} % +- {error:.2f}"


def _lower(row: Row) -> float | None:
    """Return the fraction of the routed experts that were computed in a lower tier or skipped."""
    usage = row["usage"]
    if usage is None:
        return None
    skipped = usage.get("skip") or 0.0
    share: float = skipped + (1 - skipped) * (usage.get("computed_low") or 0.0)
    return share


LABEL = Column("configuration", "configuration", left=True)
# Columns: the precision mix of a configuration.
DONE = (
    Column("r", "retention", "{:g}".format),
    Column("realised", lambda row: row["retention"] and row["realised"], fixed(3)),
    Column("low or skipped", _lower, percent(1, " %")),
)
# Columns: size of all experts in one type, and bits per weight.
SIZE = (Column("experts", "bytes", format_size), Column("bits", "bits", fixed(2)))
ANSWERS = (Column("acc", "acc", share_with_error), Column("acc_norm", "acc_norm", share_with_error))
four_digits = partial(with_error, digits=4)
share = percent(1, " %")


def quality(best: str, base: str) -> tuple[Column, ...]:
    """Return the table columns that show the quality of a model in some configuration.

    They are the KL divergence from the best tier, the perplexity, its change, and how often the
    most likely token is the same as in the best tier.

    - best: name of the best tier, for a column title.
    - base: name of the configuration from which the change of the perplexity is computed, for a
      column title.
    """
    return (
        Column(f"KL from {best}", "kl", four_digits),
        Column("perplexity", "perplexity", with_error),
        Column(f"change from {base}", "change", show_change),
        Column("same top token", "top1", share_with_error),
    )


def figures(score: Score, base: Score) -> Row:
    """Return the metrics of a configuration for a table row.

    Quality metrics are pairs of a value and its standard error. `base` is the score with which the
    perplexity is compared.
    """
    found: Row = {
        "realised": score.realised,
        "usage": score.usage,
        "kl": pair(arithmetic.mean(score.text.kl)),
        "perplexity": pair(score.text.perplexity),
        "change": pair(arithmetic.change(score.text.nll, base.text.nll)),
        "top1": pair(arithmetic.mean(score.text.agrees)),
        "domains": {name: pair(each) for name, each in score.text.by_domain().items()},
    }
    if score.choices is not None:
        found |= {"acc": pair(score.choices.acc), "acc_norm": pair(score.choices.acc_norm)}
    return found


def above(score: Score, other: Score) -> list[float | None] | None:
    """Return by how much the KL divergence of one score exceeds that of another score.

    The result is the mean difference per token and its standard error. It is None if both are the
    same score.
    """
    return None if score is other else pair(arithmetic.mean(score.text.kl - other.text.kl))


# The group of cases with all experts in one type: a tier of the model, or another file.
UNIFORM = "uniform"


@dataclass(slots=True)
class Findings:
    """The results of a study: tables, and plots (panels) that are drawn in `rows` rows."""

    tables: list[Table]
    panels: list[Panel]
    rows: int = 1


class Study(ABC):
    """Base class of a study, which measures configurations of a model on a text.

    If `rivals` is True, the study also measures copies of the model in which all experts have the
    same quantization type.
    """

    rivals: ClassVar[bool] = False

    @abstractmethod
    def measure(self, on: Subject) -> Findings:
        """Perform all measurements and return the results.

        Raises MoeEdgeError if the measurements cannot begin.
        """


@dataclass(frozen=True, slots=True)
class Case:
    """A case: one configuration of the model, whose quality a study measures.

    - settings: settings that replace the study's own settings.
    - group: name of the table or plot that shows the case.
    - row: further values for the case's table row.
    - part: the part of the text to score; None for the whole text.
    - used: returns the expert usage that the policy knows at the start; None for no usage.
    - decider: takes the policy, and returns one that decides instead, for example at random. None
      keeps the policy.
    - prefill: read the text as prompts, not token by token.
    - ask: also score the multiple-choice questions.
    """

    label: str
    settings: Settings
    group: str = ""
    row: Row = field(default_factory=dict)
    part: Part | None = None
    used: Callable[[], np.ndarray] | None = None
    decider: Callable[[Policy], Wrapper] | None = None
    prefill: bool = False
    ask: bool = False

    @property
    def row_key(self) -> tuple[str, str, Row, Part | None]:
        """The key of the table row that shows the case.

        Consecutive cases with the same key share one row, which shows their mean score.
        """
        return self.group, self.label, self.row, self.part


Scored = tuple[Case, Score]


def uniform_cases(on: Subject, tiers: Sequence[str], ask: bool = False) -> list[Case]:
    """Return a case (a configuration to measure) for each tier. In it, all experts have this tier.

    - on: the model and the text.
    - tiers: names of the tiers.
    - ask: whether the study's multiple-choice questions are also scored (the field `ask` of a
      case).
    """
    files = tiers_of(on.config)
    return [_of_file(files[tier], on.uniform(tier), tier, ask) for tier in tiers]


def _of_file(
    file: UniformFile, settings: Settings, tier: str | None = None, ask: bool = False
) -> Case:
    """Return the case of a uniform type. `tier` is its name in the model, None for another file."""
    row: Row = {"bytes": file.n_bytes, "slots": file.slot_bytes, "bits": file.bits}
    row |= {"method": file.method, "tier": tier}
    return Case(file.label, settings, UNIFORM, row, ask=ask)


@dataclass(slots=True)
class Scores:
    """The measured quality of a model in several configurations (cases).

    - on: the model and the text.
    - reference: log-probabilities of the model in its best precision, for all scored tokens.
    - scored: pairs of a case and its score, in the order of scoring.
    """

    on: Subject
    reference: Reference
    scored: list[Scored] = field(default_factory=list)

    def run(self, cases: Sequence[Case]) -> None:
        """Measure the model's quality in each case (configuration). Add the results to `scored`.

        A result is a pair of a case and its score. Consecutive cases with the same `row_key` repeat
        one measurement, for example with another random seed. They give only one result: the first
        of these cases, with the mean of their scores.
        """
        # Consecutive cases with the same settings share a loaded model.
        runs: list[Scored] = []
        for (settings, part, used), same in groupby(
            cases, key=lambda each: (each.settings, each.part, each.used)
        ):
            on = self.on if part is None else self.on.on(part.second)
            whole = part is None or len(part.places) == self.on.n_tokens
            against = self.reference if whole else self.reference.part(part.places)
            with on.open(settings, used and used()) as evaluator:
                for each in same:
                    what = each.label if part is None else f"{part.name}: {each.label}"
                    score = on.score(evaluator, what, against, each.decider, each.prefill, each.ask)
                    runs.append((each, score))
        for _, several in groupby(runs, key=lambda each: each[0].row_key):
            (case, score), *others = several
            self.scored.append((case, score.averaged([each for _, each in others])))

    def of(self, group: str, part: Part | None = None) -> list[Scored]:
        """Return the configurations of the model that belong to a table or plot, with their scores.

        - group: name of the table or plot.
        - part: return only configurations whose quality was measured on this part of the text. None
          returns all.
        """
        return [
            (case, score)
            for case, score in self.scored
            if case.group == group and (part is None or case.part is part)
        ]

    def by_size(self) -> list[Scored]:
        """Return the configurations with all experts in one quantization type, with their scores.

        They are sorted by the size of the experts, the smallest first.
        """
        return sorted(self.of(UNIFORM), key=lambda each: (each[0].row["bytes"], each[0].label))

    def one(self, group: str) -> Score:
        """Return the score of the only case (configuration of the model) in a group.

        `group` is the name of the table or plot that shows the case. It must have exactly one case.
        """
        ((_, score),) = self.of(group)
        return score

    def tier(self, name: str) -> Score:
        """Return the measured quality of the model with all experts in one precision.

        `name` is the name of this precision (tier), such as "q8_0". The result has, for example,
        the KL divergence of each token. `run` must have measured this configuration before.
        """
        return next(score for case, score in self.scored if case.row.get("tier") == name)

    def rows(self, found: Iterable[Scored], base: Score) -> list[Row]:
        """Return a table row for each configuration of the model, with its quality on the text.

        - found: the configurations (cases) with their scores.
        - base: the score of the configuration with which each perplexity is compared.
        """
        return [
            {"configuration": case.label, "retention": None, **case.row, **figures(score, base)}
            for case, score in found
        ]

    def table(
        self,
        title: str,
        columns: Sequence[Column],
        found: Iterable[Scored],
        base: Score,
        name: str,
        after: Sequence[Column] = (),
        note: str = "",
    ) -> Table:
        """Return a table that compares the quality of configurations, with one row for each.

        - columns, after: columns before and after the columns that show quality.
        - found: the configurations (cases) with their scores.
        - base, name: score and name of the configuration with which perplexity is compared.
        - note: a footnote.
        """
        every = (*columns, *quality(self.on.best, name), *after)
        rows, notes = self.rows(found, base), [note] if note else []
        return Table(f"{title}: {self.on.basis}", every, rows, notes)


# The key of a value in a row, or a function that returns the value.
Figure = str | Callable[[Row], Any]


def lines(
    rows: Iterable[Row],
    x: Figure,
    y: Figure,
    by: Figure = "configuration",
    dashed: Callable[[str], bool] = lambda label: False,
    share: int = 1,
) -> list[Line]:
    """Return the lines of a plot. Rows with the same label become the points of one line.

    - x, y, by: a row's key, or a function of the row, for the x value, the y value and the label.
    - dashed: returns whether the line with a given label is dashed.
    - share: number of consecutive lines that have the same color.
    """

    def of(row: Row, figure: Figure) -> Any:
        return row[figure] if isinstance(figure, str) else figure(row)

    points: dict[str, list[tuple[Any, Any]]] = {}
    for row in rows:
        points.setdefault(of(row, by), []).append((of(row, x), of(row, y)))
    return [
        Line(name, [x for x, _ in each], [y for _, y in each], dashed(name), number // share)
        for number, (name, each) in enumerate(points.items())
    ]


class ScoredStudy(Study):
    """A study of the quality of configurations (cases), compared with the model's best precision.

    If `halved` is True, each kind of text is divided into two halves. Expert usage is measured on
    the first half, and quality on the second half.
    """

    halved: ClassVar[bool] = False

    @abstractmethod
    def cases(self, on: Subject) -> list[Case]:
        """Return the cases (configurations of the model) whose quality is measured, in this order.

        - on: the model and the text.
        """

    @abstractmethod
    def show(self, found: Scores, on: Subject) -> Findings:
        """Return tables and plots of the measured quality of all configurations.

        - found: the configurations with their scores.
        - on: the model with the whole text, including parts on which quality was not measured.
        """

    def scored(self, on: Subject) -> Subject:
        """Return a Subject (model and text) with only the part of the text that is scored.

        Quality is measured on this part. It is the second half of each kind of text if the class
        attribute `halved` is True, and otherwise the whole text.

        - on: the same model with the whole text.
        """
        return on.on(halves(on.windows)[1]) if self.halved else on

    def n_usage_passes(self, on: Subject) -> int:
        """Return how often the study reads text to measure which experts are used most.

        The number is 1 if the study measures usage on the first half of the text (`halved`), and
        otherwise 0.
        """
        return int(self.halved)

    def measure(self, on: Subject) -> Findings:
        scored, cases = self.scored(on), self.cases(on)
        n_files = on.uniform_types.n_files if self.rivals else 0
        on.passes.expect(1 + len(cases) + n_files + self.n_usage_passes(on), on.n_tokens)
        with scored.reference() as reference:
            found = Scores(scored, reference)
            found.run(cases)
            if self.rivals:
                note = on.uniform_types.cost()
                if note:
                    on.note(note)
                # Each file is deleted before the next one is created.
                for file in on.uniform_types.files(on.report):
                    settings = {**on.uniform(""), "model": file.path, "high_tier": None}
                    found.run([_of_file(file, settings)])
        return self.show(found, on)
