"""Figure 3 of DynaExq: perplexity over the number of demoted experts in each layer, by the order in
which they are demoted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.eval.arithmetic import Estimate
from orchestrator.eval.run import pair
from orchestrator.lab.study import plot
from orchestrator.lab.study.figures import PERPLEXITY, change_from, domains_of
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

    def measure(self, on: Subject) -> Demoted:
        residency, first = Residency.of_second_half(on)
        scored = residency.subject
        hotness = residency.hotness(first)
        n = residency.n_expert
        levels = sorted({round(n * step / STEPS) for step in range(STEPS + 1)})
        # Where none or all are demoted, the order does not matter.
        ends = {high: residency.fixed(f"{n - high} demoted", high, None) for high in (n, 0)}

        def score_of(order: str, demoted: int) -> Score:
            n_high, label = n - demoted, f"{demoted} demoted, {order}"
            if n_high in ends:
                return ends[n_high]
            if order == RANDOM:
                return _mean(
                    [residency.fixed(label, n_high, residency.random(seed)) for seed in SEEDS]
                )
            scores = hotness if order == COLD else hotness.max() - hotness
            return residency.fixed(label, n_high, scores)

        found = Demoted(scored, n, on.on(first).n_tokens, levels, [], {})
        for order in ORDERS:
            found.changes[order] = []
            for demoted in levels:
                score = score_of(order, demoted)
                change = score.against(ends[n])
                found.changes[order].append(change)
                found.rows.append(
                    {
                        "demoted": demoted,
                        "order": order,
                        "routed_high": high_share(score),
                        "perplexity": pair(score.text.perplexity),
                        "domains": domains_of(score),
                        "change": pair(change),
                    }
                )
        return found

    def tables(self, found: Demoted) -> list[Table]:
        scored = found.scored
        columns = (
            Column("demoted", "demoted", lambda n: f"{n} of {found.n_expert}"),
            Column("order", "order", left=True),
            Column("routed to high", "routed_high", percent(1, " %")),
            PERPLEXITY,
            change_from(f"all {scored.high}"),
        )
        note = (
            f"Hotness: tokens routed to each expert in {found.n_hot_tokens} other tokens of the "
            f"same text, every expert in {scored.high}. Residency does not change while the text "
            f"is read. {RANDOM}: mean log-likelihood of {len(SEEDS)} seeds."
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


def _mean(scores: list[Score]) -> Score:
    """One score, with log-likelihoods and the share of high averaged over all."""
    usage = scores[0].usage
    if usage is not None:
        usage = replace(usage, high=sum(map(high_share, scores)) / len(scores))
    return replace(scores[0].averaged(scores[1:]), usage=usage)
