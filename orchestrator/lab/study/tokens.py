"""Section 4.2.1 of DyMoE: the share of a prompt's tokens that count as heavy hitters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from orchestrator.lab.study import plot
from orchestrator.lab.study.figures import DONE, LABEL, quality, row_of
from orchestrator.lab.study.study import Configuration, ScoredStudy, Scores
from orchestrator.lab.study.subject import SKIP, Subject
from orchestrator.lab.table import Table

HIGH = "high"
RATIOS = (0.6, 0.75, 0.9)
SHARES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)


class Tokens(ScoredStudy):
    """From few heavy hitters to all tokens."""

    name = "tokens"

    def cases(self, subject: Subject) -> list[Configuration]:
        high = subject.uniform(subject.high)
        return [
            Configuration(subject.high, high, group=HIGH, prefill=True),
            *(
                Configuration(
                    f"{share:.0%}",
                    subject.mixed(SKIP, ratio, heavy_hitters=share),
                    ratio,
                    f"{ratio:g}",
                    prefill=True,
                )
                for ratio in RATIOS
                for share in SHARES
            ),
        ]

    def tables(self, found: Scores) -> list[Table]:
        subject, base = found.subject, found.one(HIGH)
        rows = [
            row_of(each, score, base) for ratio in RATIOS for each, score in found.of(f"{ratio:g}")
        ]
        title = f"Heavy hitters of prompts, {subject.high} / {SKIP}: {subject.basis}"
        columns = (replace(LABEL, name="heavy"), *DONE, *quality(subject.tiers[0], subject.high))
        return [Table(title, columns, rows)]

    def draw(self, found: Scores, folder: Path) -> list[Path]:
        subject, base = found.subject, found.one(HIGH)
        with plot.figure(folder, self.name) as (axis,):
            for number, ratio in enumerate(RATIOS):
                changes = [score.against(base) for _, score in found.of(f"{ratio:g}")]
                x = [100 * share for share in SHARES]
                plot.percent_line(axis, x, changes, f"r = {ratio:g}", number)
            axis.set_xlabel("tokens that are heavy hitters, % (100: total load)")
            axis.set_ylabel(f"perplexity against {subject.high}, %")
            axis.set_title(subject.basis, fontsize=9)
            axis.legend()
        return plot.files(folder, self.name)
