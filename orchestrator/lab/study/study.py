"""The form of every study: settings that are compared on a subject become tables and a picture."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gguf_tools.units import format_size
from orchestrator.cache.files import whole_files
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import pair
from orchestrator.lab.eval.judge import Reference
from orchestrator.lab.eval.run import EvalOptions, share_with_error, with_error
from orchestrator.lab.plotting import Line, Panel, draw, require_matplotlib
from orchestrator.lab.study.subject import Part, Score, Settings, Subject, Wrapper, halves
from orchestrator.lab.study.uniform import NONE, UniformFile, tiers_of
from orchestrator.lab.table import Column, Row, Table, fixed, percent
from orchestrator.policy import DEFAULT, Policy, owners
from orchestrator.runtime.load import Progress
from orchestrator.settings import flag_of


def show_change(found: Sequence[float | None]) -> str:
    """A relative change with its standard error, as "+1.23 % +- 0.45"."""
    value, error = (0.0 if each is None else 100 * each for each in found)
    return f"{value:+.2f} % +- {error:.2f}"


def _lower(row: Row) -> float | None:
    """The share of the routed experts that were computed low, or not at all."""
    usage = row["usage"]
    if usage is None:
        return None
    skipped = usage.get("skip") or 0.0
    share: float = skipped + (1 - skipped) * (usage.get("computed_low") or 0.0)
    return share


LABEL = Column("configuration", "configuration", left=True)
# What a configuration did.
DONE = (
    Column("r", "retention", "{:g}".format),
    Column("realised", lambda row: row["retention"] and row["realised"], fixed(3)),
    Column("low or skipped", _lower, percent(1, " %")),
)
# What all experts take in one type, and what a weight of theirs does.
SIZE = (Column("experts", "bytes", format_size), Column("bits", "bits", fixed(2)))
ANSWERS = (Column("acc", "acc", share_with_error), Column("acc_norm", "acc_norm", share_with_error))
four_digits = partial(with_error, digits=4)
share = percent(1, " %")


def quality(best: str, base: str) -> tuple[Column, ...]:
    """The columns of quality, the same in every table: the distance from the best tier first.
    base: what the perplexity's relative change is from."""
    return (
        Column(f"KL from {best}", "kl", four_digits),
        Column("perplexity", "perplexity", with_error),
        Column(f"change from {base}", "change", show_change),
        Column("same top token", "top1", share_with_error),
    )


def figures(score: Score, base: Score) -> Row:
    """What a configuration came to, its quality with standard errors and by domain. base: what the
    perplexity's change is from."""
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
    """How much higher a KL is than another one, paired; None of itself."""
    return None if score is other else pair(arithmetic.mean(score.text.kl - other.text.kl))


# With fewer, standard errors are larger than what studies look for.
LEAST_TOKENS = 512
# The group of every expert in one type, a tier of the model or another file.
UNIFORM = "uniform"


@dataclass(slots=True)
class Findings:
    """What a study found. rows: of panels in its picture."""

    tables: list[Table]
    panels: list[Panel]
    rows: int = 1


class Drawn(ABC):
    """What is measured on something, and written as tables and a picture."""

    name: ClassVar[str]

    @abstractmethod
    def measure(self, on: Any) -> Findings:
        """Measures everything; raises MoeEdgeError where that cannot begin."""

    def check(self, folder: Path | None) -> Path:
        """The folder. Raises ConfigError without one or without matplotlib, before anything is
        measured."""
        if folder is None:
            raise ConfigError("a study writes tables and plots: give --out DIR")
        # It is imported when it draws: what the models take is measured and capped without it.
        require_matplotlib("--study")
        return folder

    def write(self, folder: Path, found: Findings, **basis: Any) -> list[Table]:
        """Writes NAME.md, NAME.json, NAME.png and NAME.svg to a folder, which is made: all of them
        or none. basis: what it was measured on. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{"title": table.title, "rows": list(table.rows)} for table in found.tables]
        data = {"study": self.name, **basis, "tables": rows}
        text = "\n\n".join(table.markdown() for table in found.tables)
        with whole_files(folder, f"{self.name}.md") as made:
            (made / f"{self.name}.md").write_text(text + "\n")
            (made / f"{self.name}.json").write_text(json.dumps(data, indent=1) + "\n")
            draw(made, self.name, found.panels, found.rows)
        return found.tables


class Study(Drawn):
    """A study of a model and a text. rivals: uniform types that fit whole are rows of it.
    policies: those whose settings it takes, beside the default one."""

    policies: ClassVar[tuple[str, ...]] = ()
    rivals: ClassVar[bool] = False

    def publish(
        self,
        config: Config,
        options: EvalOptions,
        folder: Path | None,
        report: Progress,
        note: Callable[[str], None],
    ) -> list[Table]:
        """Measures, and writes the tables and the picture to the folder. note gets sentences for
        the user while it does. Raises ConfigError for what the study has no use for."""
        folder = self.check(folder)
        for setting in config.of_policies:
            having = owners(setting)
            if not {DEFAULT, *self.policies} & set(having):
                raise ConfigError(
                    f"{flag_of(setting)} is for {' and '.join(having)}: the study {self.name} has "
                    f"no use for it"
                )
        if not self.rivals:
            if options.uniform is not None or options.calib is not None:
                raise ConfigError(f"the study {self.name} has no use for --uniform and --calib")
            options = replace(options, uniform=(NONE,))
        on = Subject(config, options, report, note)
        if on.n_tokens < LEAST_TOKENS:
            raise ConfigError(
                f"{options.text}: {on.n_tokens} tokens are too few for a study, whose figures "
                f"would be noise: {LEAST_TOKENS} are the least (a longer --text or --max-tokens)"
            )
        cost = on.uniform_types.cost()
        if cost:
            note(cost)
        folder.mkdir(parents=True, exist_ok=True)
        return self.write(folder, self.measure(on), model=on.name, tokens=on.n_tokens)


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration that a study scores.

    settings: changes of the subject's config. group: which table, or panel, it is in. row: figures
    that are known beforehand. Of neighbours with one group, label, row and part, each token's
    figures are averaged. part: the text, None for all that is scored. used: says how much each
    expert was used before. decider: what decides in the place of the policy. prefill: the text
    is read as prompts. ask: questions are put too.
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
    def place(self) -> tuple[str, str, Row, Part | None]:
        """What repeated cases have in common."""
        return self.group, self.label, self.row, self.part


Scored = tuple[Case, Score]


def uniform_cases(on: Subject, tiers: Sequence[str], ask: bool = False) -> list[Case]:
    """Every expert in one tier of the model, with its size."""
    files = tiers_of(on.config)
    return [_of_file(files[tier], on.uniform(tier), tier, ask) for tier in tiers]


def _of_file(
    file: UniformFile, settings: Settings, tier: str | None = None, ask: bool = False
) -> Case:
    """tier: the one of the model that it is; None for another type."""
    row: Row = {"bytes": file.n_bytes, "slots": file.slot_bytes, "bits": file.bits}
    row |= {"method": file.method, "tier": tier}
    return Case(file.label, settings, UNIFORM, row, ask=ask)


@dataclass(slots=True)
class Scores:
    """What each case scored, in their order. on: what is scored; reference: of all of it."""

    on: Subject
    reference: Reference
    scored: list[Scored] = field(default_factory=list)

    def run(self, cases: Sequence[Case]) -> None:
        """Score cases. Neighbours that differ only in what decides share a loaded model."""
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
        for _, several in groupby(runs, key=lambda each: each[0].place):
            (case, score), *others = several
            self.scored.append((case, score.averaged([each for _, each in others])))

    def of(self, group: str, part: Part | None = None) -> list[Scored]:
        """The cases of one group, of one part where it is given."""
        return [
            (case, score)
            for case, score in self.scored
            if case.group == group and (part is None or case.part is part)
        ]

    def by_size(self) -> list[Scored]:
        """Every expert in one type, the smallest first."""
        return sorted(self.of(UNIFORM), key=lambda each: (each[0].row["bytes"], each[0].label))

    def one(self, group: str) -> Score:
        """The score of the only case of a group."""
        ((_, score),) = self.of(group)
        return score

    def tier(self, name: str) -> Score:
        """The score of every expert in one tier of the model."""
        return next(score for case, score in self.scored if case.row.get("tier") == name)

    def rows(self, found: Iterable[Scored], base: Score) -> list[Row]:
        """Cases as rows of a table. base: what the perplexity's change is from."""
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
        """Cases under these columns, those of quality and what comes after. base, name: what the
        perplexity's change is from."""
        every = (*columns, *quality(self.on.best, name), *after)
        rows, notes = self.rows(found, base), [note] if note else []
        return Table(f"{title}: {self.on.basis}", every, rows, notes)


# The name of a figure of rows, or what takes it from one.
Figure = str | Callable[[Row], Any]


def lines(
    rows: Iterable[Row],
    x: Figure,
    y: Figure,
    by: Figure = "configuration",
    dashed: Callable[[str], bool] = lambda label: False,
    share: int = 1,
) -> list[Line]:
    """A line for each label, which `by` says, through its rows. share: so many lines have a
    colour."""

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
    """A study of cases, each compared with what the best tier says to each token. halved: each
    domain's first half says how experts are used, and its second half is scored."""

    halved: ClassVar[bool] = False

    @abstractmethod
    def cases(self, on: Subject) -> list[Case]:
        """What is compared, in the order of the tables. No pass is made here."""

    @abstractmethod
    def show(self, found: Scores, on: Subject) -> Findings:
        """The tables and panels. on: the subject with all of its text."""

    def scored(self, on: Subject) -> Subject:
        """What is scored of a subject."""
        return on.on(halves(on.windows)[1]) if self.halved else on

    def n_before(self, on: Subject) -> int:
        """Passes beside the cases, the files and the reference: those that count uses."""
        return int(self.halved)

    def measure(self, on: Subject) -> Findings:
        scored, cases = self.scored(on), self.cases(on)
        n_files = on.uniform_types.n_files if self.rivals else 0
        on.passes.expect(1 + len(cases) + n_files + self.n_before(on), on.n_tokens)
        with scored.reference() as reference:
            found = Scores(scored, reference)
            found.run(cases)
            if self.rivals:
                # Each is gone before the next one is made.
                for file in on.uniform_types.files(on.report):
                    settings = {**on.uniform(""), "model": file.path, "high_tier": None}
                    found.run([_of_file(file, settings)])
        return self.show(found, on)
