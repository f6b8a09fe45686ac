"""Tables 1 and 2 of DyMoE: each tier and uniform type alone, then high/skip and high/low at three
ratios."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from orchestrator.lab.eval.compare import Reference
from orchestrator.lab.plotting import COLOURS
from orchestrator.lab.study import plot
from orchestrator.lab.study.figures import (
    ANSWERS,
    DONE,
    LABEL,
    SIZE,
    answers_of,
    quality,
    row_of,
    size_of,
)
from orchestrator.lab.study.study import Configuration, ScoredStudy, Scores
from orchestrator.lab.study.subject import SKIP, Score, Subject
from orchestrator.lab.study.uniform import tiers_of
from orchestrator.lab.table import Row, Table

UNIFORM, MIXED = "uniform", "mixed"
RATIOS = (0.75, 0.9, 1.0)


class Accuracy(ScoredStudy):
    """Quality of each type alone, and of two tiers together."""

    name = "accuracy"
    asks = True
    rivals = True

    def cases(self, subject: Subject) -> list[Configuration]:
        return [
            *(
                Configuration(tier, subject.uniform(tier), group=UNIFORM)
                for tier in reversed(subject.tiers)
            ),
            *(
                Configuration(f"{subject.high} / {low}", subject.mixed(low, r), r, MIXED)
                for low in (SKIP, subject.low)
                for r in RATIOS
            ),
        ]

    def others(self, on: Subject, reference: Reference) -> Iterator[tuple[Configuration, Score]]:
        for each, score in on.uniform_files(reference, ask=True):
            yield Configuration(each.label, {}, group=UNIFORM, file=each), score

    def tables(self, found: Scores) -> list[Table]:
        subject = found.subject
        figures = (
            *quality(subject.tiers[0], subject.high),
            *(ANSWERS if subject.questions else ()),
        )
        note = (
            f"KL (nats) and same top token: against {subject.tiers[0]}. Every token is decided on "
            f"its own, every expert computed in the tier that was decided."
        )
        return [
            Table(
                f"Uniform precision (Table 1): {subject.basis}",
                (LABEL, *SIZE, *figures),
                _uniform(found),
            ),
            Table(
                f"High / low and skip (Table 2): {subject.basis}",
                (LABEL, *DONE, *figures),
                _rows(found, MIXED),
                [note],
            ),
        ]

    def draw(self, found: Scores, folder: Path) -> list[Path]:
        subject = found.subject
        uniform, mixed = _uniform(found), _rows(found, MIXED)
        rows = [*uniform, *mixed]
        labels = [
            row["configuration"] + (f"\nr = {row['retention']:g}" if row["retention"] else "")
            for row in rows
        ]
        with plot.figure(folder, self.name) as (axis,):
            places = range(len(rows))
            axis.bar(
                places,
                [row["kl"][0] for row in rows],
                yerr=[row["kl"][1] for row in rows],
                capsize=3,
                color=[COLOURS[0]] * len(uniform) + [COLOURS[1]] * len(mixed),
            )
            axis.set_xticks(places, labels, rotation=60, ha="right", fontsize=8)
            axis.set_ylabel(f"KL from {subject.tiers[0]}, nats")
            axis.set_title(subject.basis, fontsize=9)
        return plot.files(folder, self.name)


def _uniform(found: Scores) -> list[Row]:
    """The types that stand alone, with their size, the smallest first."""
    sizes = tiers_of(found.subject.config)
    files = [each.file or sizes[each.label] for each, _ in found.of(UNIFORM)]
    rows = [row | size_of(file) for row, file in zip(_rows(found, UNIFORM), files, strict=True)]
    return sorted(rows, key=lambda row: (row["bytes"], row["configuration"]))


def _rows(found: Scores, group: str) -> list[Row]:
    high = found.subject.high
    base = next(score for each, score in found.of(UNIFORM) if each.label == high)
    return [row_of(each, score, base, **answers_of(score)) for each, score in found.of(group)]
