"""Figure 3 of DynaExq: perplexity over the number of demoted experts in each layer, by the order in
which they are demoted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from orchestrator.lab.eval.arithmetic import Estimate
from orchestrator.lab.study import plot
from orchestrator.lab.study.figures import quality, quality_of
from orchestrator.lab.study.residency import SEEDS, Residency, high_share
from orchestrator.lab.study.study import Study
from orchestrator.lab.study.subject import Score, Subject
from orchestrator.lab.table import Column, Row, Table, percent

STEPS = 8  # points of a curve, besides its start
COLD, RANDOM, HOT = ORDERS = ("cold first", "at random", "hot first")


@dataclass(slots=True)
class Demoted:
    """What came of it. scored: the subject with the half of the text that was scored; n_hot_tokens:
    of the other half; changes: of the perplexity, at each of the levels, by order."""

    scored: Subject
    n_expert: int
    n_hot_tokens: int
    levels: list[int]
    rows: list[Row]
    changes: dict[str, list[Estimate]]


class Demotion(Study[Demoted]):
    """What demotion costs."""

    name = "demotion"

    def n_passes(self, on: Subject) -> int:
        inner = len(_levels(Residency.of_second_half(on)[0].n_expert)) - 2
        return 2 + 2 + inner * sum(len(SEEDS) if order == RANDOM else 1 for order in ORDERS)

    def measure(self, on: Subject) -> Demoted:
        residency, first = Residency.of_second_half(on)
        n, hotness = residency.n_expert, residency.hotness(first)
        levels = _levels(n)
        found = Demoted(residency.subject, n, on.on(first).n_tokens, levels, [], {})
        with residency.subject.reference() as reference:
            # Where none or all are demoted, the order does not matter.
            ends = {
                demoted: residency.fixed(f"{demoted} demoted", n - demoted, None, reference)
                for demoted in (0, n)
            }
            for order in ORDERS:
                found.changes[order] = []
                for demoted in levels:
                    score = ends.get(demoted) or _mean(
                        [
                            residency.fixed(
                                f"{demoted} demoted, {order}", n - demoted, scores, reference
                            )
                            for scores in _hot_sets(residency, order, hotness)
                        ]
                    )
                    found.changes[order].append(score.against(ends[0]))
                    found.rows.append(
                        {
                            "demoted": demoted,
                            "order": order,
                            "routed_high": high_share(score),
                            **quality_of(score, ends[0]),
                        }
                    )
        return found

    def tables(self, found: Demoted) -> list[Table]:
        scored = found.scored
        columns = (
            Column("demoted", "demoted", lambda n: f"{n} of {found.n_expert}"),
            Column("order", "order", left=True),
            Column("routed to high", "routed_high", percent(1, " %")),
            *quality(scored.tiers[0], f"all {scored.high}"),
        )
        note = (
            f"Hotness: tokens routed to each expert in {found.n_hot_tokens} other tokens of the "
            f"same text, every expert in {scored.high}. Residency does not change while the text "
            f"is read. {RANDOM}: each token's figures are means of {len(SEEDS)} seeds."
        )
        title = (
            f"Demoted experts of each layer, {scored.high} to {scored.low} (Figure 3): "
            f"{scored.basis}"
        )
        return [Table(title, columns, found.rows, [note])]

    def draw(self, found: Demoted, folder: Path) -> list[Path]:
        scored = found.scored
        with plot.figure(folder, self.name) as (axis,):
            for number, (order, changes) in enumerate(found.changes.items()):
                plot.percent_line(axis, [float(n) for n in found.levels], changes, order, number)
            axis.set_xlabel(f"experts of each layer in {scored.low}, of {found.n_expert}")
            axis.set_ylabel(f"perplexity against all {scored.high}, %")
            axis.set_title(scored.basis, fontsize=9)
            axis.legend()
        return plot.files(folder, self.name)


def _levels(n_expert: int) -> list[int]:
    """How many experts are demoted, from none to all."""
    return sorted({round(n_expert * step / STEPS) for step in range(STEPS + 1)})


def _hot_sets(residency: Residency, order: str, hotness: np.ndarray) -> list[np.ndarray]:
    """The hotness that demotes in this order; several where chance orders."""
    if order == RANDOM:
        return [residency.random(seed) for seed in SEEDS]
    return [hotness if order == COLD else hotness.max() - hotness]


def _mean(scores: list[Score]) -> Score:
    """One score, with each token's figures and the share of high averaged over all."""
    usage = scores[0].usage
    if usage is not None:
        usage = replace(usage, high=sum(map(high_share, scores)) / len(scores))
    return replace(scores[0].averaged(scores[1:]), usage=usage)
