"""Figure 5 of DyMoE: one layer at a time in the low tier, all others in the best one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from orchestrator.lab.plotting import COLOURS
from orchestrator.lab.study import plot
from orchestrator.lab.study.figures import quality, quality_of
from orchestrator.lab.study.policies import OneLayer
from orchestrator.lab.study.study import Configuration, ScoredStudy, Scores
from orchestrator.lab.study.subject import Subject
from orchestrator.lab.table import Column, Table

BEST, LOWERED = "best", "lowered"


class Depth(ScoredStudy):
    """What each layer loses."""

    name = "depth"

    def cases(self, subject: Subject) -> list[Configuration]:
        best = subject.tiers[0]
        settings = subject.mixed(subject.low, 0.5, high_tier=best)
        return [
            Configuration(best, subject.uniform(best), group=BEST),
            *(
                Configuration(
                    f"layer {il}",
                    settings,
                    group=LOWERED,
                    deciders=(partial(OneLayer, layer=layer, tier=1),),
                )
                for layer, il in enumerate(subject.layer_ids)
            ),
        ]

    def tables(self, found: Scores) -> list[Table]:
        subject, base = found.subject, found.one(BEST)
        best = subject.tiers[0]
        rows = [
            {"layer": il, **quality_of(score, base)}
            for il, (_, score) in zip(subject.layer_ids, found.of(LOWERED), strict=True)
        ]
        return [
            Table(
                f"One layer in {subject.low}, all others in {best} (Figure 5): {subject.basis}",
                (Column("layer", "layer"), *quality(best, best)),
                rows,
            )
        ]

    def draw(self, found: Scores, folder: Path) -> list[Path]:
        subject, base = found.subject, found.one(BEST)
        changes = [score.against(base) for _, score in found.of(LOWERED)]
        with plot.figure(folder, self.name) as (axis,):
            axis.bar(
                subject.layer_ids,
                [100 * each.value for each in changes],
                yerr=[100 * each.error for each in changes],
                color=COLOURS[0],
                capsize=3,
            )
            axis.set_xticks(subject.layer_ids)
            axis.set_xlabel(f"the layer in {subject.low}")
            axis.set_ylabel(f"perplexity against all {subject.tiers[0]}, %")
            axis.set_title(subject.basis, fontsize=9)
        return plot.files(folder, self.name)
