"""The form of every study: what is measured on a subject becomes tables and a picture."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.lab.eval.compare import Reference
from orchestrator.lab.eval.run import EvalOptions, Report
from orchestrator.lab.experiment import Experiment
from orchestrator.lab.plotting import require_matplotlib
from orchestrator.lab.study.policies import Wrapper
from orchestrator.lab.study.subject import Score, Subject
from orchestrator.lab.study.uniform import NONE, UniformFile
from orchestrator.lab.table import Table
from orchestrator.policy import DEFAULT, Policy, owners
from orchestrator.settings import flag_of

Found = TypeVar("Found")
# With fewer, standard errors are larger than what studies look for.
LEAST_TOKENS = 512


class Study(Experiment[Subject, Found]):
    """A study, by its name; its picture is NAME.png and NAME.svg. rivals: uniform types that fit
    whole are rows of it. policies: those whose settings it takes, beside the default one."""

    name: ClassVar[str]
    draws = True
    policies: ClassVar[tuple[str, ...]] = ()
    rivals: ClassVar[bool] = False

    def n_passes(self, on: Subject) -> int:
        """How many passes over the text it makes; 0 for one alone, whose bar says all."""
        return 0

    @abstractmethod
    def draw(self, found: Found, folder: Path) -> list[Path]:
        """Writes the picture to a folder and returns its paths. Needs matplotlib."""

    def publish(
        self,
        config: Config,
        options: EvalOptions,
        folder: Path | None,
        report: Report,
        note: Callable[[str], None],
    ) -> list[Table]:
        """Measures, and writes NAME.md, NAME.json and the picture to the folder. note gets
        sentences for the user while it does.

        Raises ConfigError without a folder or without matplotlib, before anything is measured.
        """
        if folder is None:
            raise ConfigError("a study writes tables and plots: give --out DIR")
        # It is imported when it draws: what the models take is measured and capped without it.
        require_matplotlib("--study")
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
        subject = Subject(config, options, report, note)
        if subject.n_tokens < LEAST_TOKENS:
            raise ConfigError(
                f"{options.text}: {subject.n_tokens} tokens are too few for a study, whose figures "
                f"would be noise: {LEAST_TOKENS} are the least (a longer --text or --max-tokens)"
            )
        cost = subject.uniform_types.cost()
        if cost:
            note(cost)
        n_passes = self.n_passes(subject)
        if n_passes:
            subject.passes.expect(n_passes, subject.n_tokens)
        folder.mkdir(parents=True, exist_ok=True)
        found = self.measure(subject)
        tables = self.tables(found)
        rows = [{"title": table.title, "rows": list(table.rows)} for table in tables]
        data = {"study": self.name, "model": subject.name, "tokens": subject.n_tokens}
        self.write(folder, self.name, found, tables, {**data, "tables": rows})
        return tables


@dataclass(frozen=True, slots=True)
class Configuration:
    """One configuration that a study scores, as its tables name it.

    settings: changes of the subject's config. group: which table, or line of a picture, it is in.
    prefill: the text is read as prompts. deciders make what decides in the place of the policy;
    of several, each token's figures are averaged over all. file: a file of its own that it is.
    """

    label: str
    settings: dict[str, Any]
    retention: float | None = None
    group: str = ""
    prefill: bool = False
    deciders: tuple[Callable[[Policy], Wrapper], ...] = ()
    file: UniformFile | None = None


@dataclass(slots=True)
class Scores:
    """What each configuration scored, in the order of the configurations."""

    subject: Subject
    scored: list[tuple[Configuration, Score]] = field(default_factory=list)

    def of(self, group: str) -> list[tuple[Configuration, Score]]:
        """The configurations of one group."""
        return [pair for pair in self.scored if pair[0].group == group]

    def one(self, group: str) -> Score:
        """The score of the only configuration of a group."""
        ((_, score),) = self.of(group)
        return score

    def lines(self, *groups: str) -> Iterator[tuple[str, list[tuple[Configuration, Score]]]]:
        """(label, what was scored under it) of the groups, a line of a picture each."""
        chosen = [pair for group in groups for pair in self.of(group)]
        for label in dict.fromkeys(each.label for each, _ in chosen):
            yield label, [pair for pair in chosen if pair[0].label == label]


class ScoredStudy(Study[Scores]):
    """A study of configurations, each compared with what the best tier says to each token. asks:
    questions are put too."""

    asks: ClassVar[bool] = False

    @abstractmethod
    def cases(self, subject: Subject) -> list[Configuration]:
        """What is compared, in the order of the tables. Neighbours with the same settings share
        an engine."""

    def n_passes(self, on: Subject) -> int:
        own = sum(len(each.deciders or (None,)) for each in self.cases(on))
        return 1 + own + (on.uniform_types.n_files if self.rivals else 0)

    def measure(self, on: Subject) -> Scores:
        found = Scores(on)
        with on.reference() as reference:
            for settings, same in groupby(self.cases(on), lambda each: each.settings):
                with on.open(settings) as engine:
                    for each in same:
                        rows = [
                            on.score_open(
                                engine, each.label, decider, each.prefill, reference, self.asks
                            )
                            for decider in each.deciders or (None,)
                        ]
                        score = rows[0].averaged(rows[1:]) if rows[1:] else rows[0]
                        found.scored.append((each, score))
            found.scored += self.others(on, reference)
        return found

    def others(self, on: Subject, reference: Reference) -> Iterator[tuple[Configuration, Score]]:
        """What is scored behind the cases, of files of its own."""
        return iter(())
