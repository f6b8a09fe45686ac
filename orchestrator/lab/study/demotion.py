"""Figure 3 of DynaExq: perplexity over the number of demoted experts in each layer, by the order in
which they are demoted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np

from orchestrator.lab.study.figures import share
from orchestrator.lab.study.plot import Panel
from orchestrator.lab.study.residency import NEVER, SEEDS, Residency
from orchestrator.lab.study.study import Case, Findings, HalvedStudy, Scores, change_from, lines
from orchestrator.lab.study.subject import Subject, Uses, halves
from orchestrator.lab.table import Column

STEPS = 8  # points of a curve, besides its start
COLD, RANDOM, HOT = ("cold first", "at random", "hot first")


class Demotion(HalvedStudy):
    """What demotion costs. Residency does not change while the text is read."""

    name = "demotion"

    def cases(self, on: Subject) -> list[Case]:
        residency, n = Residency(on), on.n_expert
        hotness = cache(partial(on.uses, halves(on.windows)[0], on.high))

        def coldness() -> np.ndarray:
            cold: np.ndarray = hotness().max() - hotness()
            return cold

        by_chance = [partial(on.random_uses, seed) for seed in SEEDS]
        levels = sorted({round(n * step / STEPS) for step in range(STEPS + 1)})
        listed = []
        ways: dict[str, list[Uses]] = {COLD: [hotness], RANDOM: [*by_chance], HOT: [coldness]}
        for order, several in ways.items():
            for demoted in levels:
                # Where none or all are demoted, the order does not matter.
                if demoted not in (0, n):
                    settings = residency.settings(n - demoted, **NEVER)
                    row = {"demoted": demoted, "order": order}
                    listed += [Case(order, settings, order, row, used=used) for used in several]
        ends = [
            Case("all orders", residency.settings(n - demoted, **NEVER), "", {"demoted": demoted})
            for demoted in (0, n)
        ]
        return [*ends, *listed]

    def show(self, found: Scores, on: Subject) -> Findings:
        scored, n = found.on, on.n_expert
        first, last = found.of("")
        base = first[1]
        curves = [
            (replace(case, label=order, row={**case.row, "order": order}), score)
            for order in (COLD, RANDOM, HOT)
            for case, score in (first, *found.of(order), last)
        ]
        rows = [
            {**row, "routed_high": score.high}
            for row, (_, score) in zip(found.rows(curves, base), curves, strict=True)
        ]
        columns = (
            Column("demoted", "demoted", lambda demoted: f"{demoted} of {n}"),
            Column("order", "order", left=True),
            Column("routed to high", "routed_high", share),
        )
        note = (
            f"Hotness: tokens routed to each expert in {on.n_tokens - scored.n_tokens} other "
            f"tokens of the same text, every expert in {scored.high}. Residency does not change "
            f"while the text is read. {RANDOM}: each token's figures are means of {len(SEEDS)} "
            f"seeds."
        )
        title = f"Demoted experts of each layer, {scored.high} to {scored.low} (Figure 3)"
        table = found.table(title, columns, rows, f"all {scored.high}", (), note)
        drawn = lines(curves, lambda case, _: case.row["demoted"], change_from(base))
        panel = Panel(
            f"experts of each layer in {scored.low}, of {n}",
            f"perplexity against all {scored.high}, %",
            drawn,
            scored.basis,
            percent=True,
        )
        return Findings([table], [panel])
