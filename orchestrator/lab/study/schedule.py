"""Section 4.3 of DyMoE: how the critical experts are spread over the depth, at the same mean."""

from __future__ import annotations

from pathlib import Path

from orchestrator.allocation.critical import SCHEDULES
from orchestrator.lab.study import plot
from orchestrator.lab.study.figures import DONE, LABEL, quality, row_of
from orchestrator.lab.study.study import Configuration, ScoredStudy, Scores
from orchestrator.lab.study.subject import SKIP, Subject
from orchestrator.lab.table import Column, Table

HIGH = "high"
RATIOS = (0.6, 0.75, 0.9)


def _low_tiers(subject: Subject) -> tuple[str, str]:
    return SKIP, subject.low


class DepthSchedule(ScoredStudy):
    """The ways in which the share of critical experts may fall with depth."""

    name = "schedule"

    def cases(self, subject: Subject) -> list[Configuration]:
        return [
            Configuration(subject.high, subject.uniform(subject.high), group=HIGH),
            *(
                Configuration(
                    f"{subject.high} / {low}, {name}",
                    subject.mixed(low, ratio, schedule=name),
                    ratio,
                    low,
                )
                for low in _low_tiers(subject)
                for name in SCHEDULES
                for ratio in RATIOS
            ),
        ]

    def tables(self, found: Scores) -> list[Table]:
        subject, base = found.subject, found.one(HIGH)
        rows = [
            row_of(each, score, base, critical=list(score.critical))
            for low in _low_tiers(subject)
            for each, score in found.of(low)
        ]
        by_layer = Column(
            "critical by layer", "critical", lambda counts: " ".join(map(str, counts))
        )
        title = f"Depth schedules at the same mean ratio (4.3): {subject.basis}"
        columns = (LABEL, *DONE, *quality(subject.tiers[0], subject.high), by_layer)
        return [Table(title, columns, rows)]

    def draw(self, found: Scores, folder: Path) -> list[Path]:
        subject, base = found.subject, found.one(HIGH)
        with plot.figure(folder, self.name, 2) as axes:
            for axis, low in zip(axes, _low_tiers(subject), strict=True):
                for number, (label, pairs) in enumerate(found.lines(low)):
                    x = [score.realised or 0.0 for _, score in pairs]
                    changes = [score.against(base) for _, score in pairs]
                    plot.percent_line(axis, x, changes, label.rpartition(", ")[2], number)
                plot.level(axis, 0.0, f"all {subject.high}")
                axis.set_title(f"{subject.high} / {low}", fontsize=9)
                axis.set_xlabel("realised share of critical experts")
                axis.set_ylabel(f"perplexity against {subject.high}, %")
                axis.legend()
        return plot.files(folder, self.name)
