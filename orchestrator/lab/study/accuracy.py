"""Tables 1 and 2 of DyMoE: each tier alone, then high/skip and high/low at three ratios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.eval import arithmetic
from orchestrator.eval.report import share_with_error
from orchestrator.eval.run import pair
from orchestrator.lab.study import plot
from orchestrator.lab.study.figures import (
    ANSWERS,
    DONE,
    LABEL,
    answers_of,
    change_from,
    change_of,
    kl_of,
    row_of,
    show_kl,
)
from orchestrator.lab.study.study import Configuration, ScoredStudy, Scores
from orchestrator.lab.study.subject import SKIP, Score, Subject
from orchestrator.lab.table import Column, Row, Table
from orchestrator.plotting import COLOURS

UNIFORM, MIXED = "uniform", "mixed"
RATIOS = (0.75, 0.9, 1.0)


class Accuracy(ScoredStudy):
    """Quality of each tier, and of two tiers together."""

    name = "accuracy"
    asks = True
    compares = True

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

    def tables(self, found: Scores) -> list[Table]:
        subject = found.subject
        columns = (
            LABEL,
            *DONE,
            change_from(subject.high),
            Column("KL", "kl", show_kl),
            Column("same top token", "top1", share_with_error),
            *(ANSWERS if subject.questions else ()),
        )
        note = (
            f"KL (nats) and same top token: against {subject.tiers[0]}. Every token is decided on "
            f"its own, every expert computed in the tier that was decided."
        )
        return [
            Table(f"Uniform precision (Table 1): {subject.basis}", columns, _rows(found, UNIFORM)),
            Table(
                f"High / low and skip (Table 2): {subject.basis}",
                columns,
                _rows(found, MIXED),
                [note],
            ),
        ]

    def draw(self, found: Scores, folder: Path) -> list[Path]:
        subject = found.subject
        uniform, mixed = _rows(found, UNIFORM), _rows(found, MIXED)
        rows = [*uniform, *mixed]
        labels = [
            row["configuration"] + (f"\nr = {row['retention']:g}" if row["retention"] else "")
            for row in rows
        ]
        with plot.figure(folder, self.name) as (axis,):
            places = range(len(rows))
            axis.bar(
                places,
                [100 * row["change"][0] for row in rows],
                yerr=[100 * row["change"][1] for row in rows],
                capsize=3,
                color=[COLOURS[0]] * len(uniform) + [COLOURS[1]] * len(mixed),
            )
            axis.set_xticks(places, labels, rotation=60, ha="right", fontsize=8)
            axis.set_ylabel(f"perplexity against {subject.high}, %")
            axis.set_title(subject.basis, fontsize=9)
        return plot.files(folder, self.name)


def _rows(found: Scores, group: str) -> list[Row]:
    high = found.subject.high
    base = next(score for each, score in found.of(UNIFORM) if each.label == high)
    return [row_of(each, score, **_figures(score, base)) for each, score in found.of(group)]


def _figures(score: Score, base: Score) -> dict[str, Any]:
    agrees = score.text.agrees
    if agrees is None:
        raise ValueError("scored without a reference")
    return {
        "change": change_of(score, base),
        "kl": kl_of(score),
        "top1": pair(arithmetic.mean(agrees.astype(float))),
        **answers_of(score),
    }
