"""Figure 11 of DyMoE: quality over the retention ratio."""

from __future__ import annotations

from pathlib import Path

from orchestrator.lab.eval.arithmetic import Estimate
from orchestrator.lab.study import plot
from orchestrator.lab.study.figures import (
    ANSWERS,
    DONE,
    LABEL,
    answers_of,
    quality,
    row_of,
)
from orchestrator.lab.study.study import Configuration, ScoredStudy, Scores
from orchestrator.lab.study.subject import SKIP, Score, Subject
from orchestrator.lab.table import Table

HIGH, LOW, MIXED = "high", "low", "mixed"
SWEEP = (0.6, 0.7, 0.75, 0.8, 0.9, 1.0)


class Retention(ScoredStudy):
    """From few critical experts to all of them."""

    name = "retention"
    asks = True

    def cases(self, subject: Subject) -> list[Configuration]:
        return [
            Configuration(subject.high, subject.uniform(subject.high), group=HIGH),
            Configuration(subject.low, subject.uniform(subject.low), group=LOW),
            *(
                Configuration(f"{subject.high} / {low}", subject.mixed(low, r), r, MIXED)
                for low in (SKIP, subject.low)
                for r in SWEEP
            ),
        ]

    def tables(self, found: Scores) -> list[Table]:
        subject, base = found.subject, found.one(HIGH)
        columns = (
            LABEL,
            *DONE,
            *quality(subject.tiers[0], subject.high),
            *(ANSWERS if subject.questions else ()),
        )
        rows = [row_of(each, score, base, **answers_of(score)) for each, score in found.scored]
        title = f"Quality over the retention ratio (Figure 11): {subject.basis}"
        return [Table(title, columns, rows)]

    def draw(self, found: Scores, folder: Path) -> list[Path]:
        subject, base, least = found.subject, found.one(HIGH), found.one(LOW)
        with plot.figure(folder, self.name, 2 if subject.questions else 1) as axes:
            for number, (label, pairs) in enumerate(found.lines(MIXED)):
                x = [score.realised or 0.0 for _, score in pairs]
                changes = [score.against(base) for _, score in pairs]
                plot.percent_line(axes[0], x, changes, label, number)
                if subject.questions:
                    plot.percent_line(axes[1], x, [_acc(s) for _, s in pairs], label, number)
            plot.level(axes[0], 0.0, f"all {subject.high}")
            plot.level(axes[0], 100 * least.against(base).value, f"all {subject.low}")
            axes[0].set_ylabel(f"perplexity against {subject.high}, %")
            if subject.questions:
                plot.level(axes[1], 100 * _acc(base).value, f"all {subject.high}")
                plot.level(axes[1], 100 * _acc(least).value, f"all {subject.low}")
                axes[1].set_ylabel("multiple choice, acc, %")
            for axis in axes:
                axis.set_xlabel("realised share of critical experts")
                axis.legend()
            axes[0].set_title(subject.basis, fontsize=9)
        return plot.files(folder, self.name)


def _acc(score: Score) -> Estimate:
    return score.choices.acc if score.choices is not None else Estimate(0.0, 0.0)
