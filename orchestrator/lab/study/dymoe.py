"""Tables 1 and 2 and Figures 3, 5 and 11 of DyMoE: what its choices lose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

from orchestrator.lab.eval.arithmetic import Estimate
from orchestrator.lab.study.figures import ANSWERS, DONE, LABEL, SIZE
from orchestrator.lab.study.plot import Line, Panel
from orchestrator.lab.study.policies import OneLayer, RandomCritical
from orchestrator.lab.study.study import (
    UNIFORM,
    Case,
    Findings,
    ScoredStudy,
    Scores,
    change_from,
    lines,
    uniform_cases,
)
from orchestrator.lab.study.subject import SKIP, Score, Subject
from orchestrator.lab.table import Column

MIXED, HIGH, LOW = "mixed", "high", "low"


def _mixes(on: Subject, ratios: tuple[float, ...], ask: bool = False) -> list[Case]:
    """High / skip and high / low at these ratios."""
    return [
        Case(f"{on.high} / {low}", on.mixed(low, r), MIXED, {"retention": r}, ask=ask)
        for low, r in product((SKIP, on.low), ratios)
    ]


class Accuracy(ScoredStudy):
    """Tables 1 and 2: each tier alone, then high/skip and high/low at three ratios."""

    name = "accuracy"

    def cases(self, on: Subject) -> list[Case]:
        alone = uniform_cases(on, on.tiers[::-1], ask=True)
        return [*alone, *_mixes(on, (0.75, 0.9, 1.0), ask=True)]

    def show(self, found: Scores, on: Subject) -> Findings:
        alone, mixed, base = found.by_size(), found.of(MIXED), found.tier(on.high)
        answers = ANSWERS if on.questions else ()
        note = (
            f"KL (nats) and same top token: against {on.best}. Every token is decided on its own, "
            f"every expert computed in the tier that was decided."
        )
        tables = [
            found.table(title, (LABEL, *columns), found.rows(several, base), on.high, answers, note)
            for title, columns, several, note in (
                ("Uniform precision (Table 1)", SIZE, alone, ""),
                ("High / low and skip (Table 2)", DONE, mixed, note),
            )
        ]
        labels = [case.label for case, _ in alone]
        labels += [f"{case.label}\nr = {case.row['retention']:g}" for case, _ in mixed]
        kl = [score.mean_kl for _, score in (*alone, *mixed)]
        n, every = len(alone), range(len(kl))
        bars = [Line(UNIFORM, every[:n], kl[:n]), Line(MIXED, every[n:], kl[n:])]
        panel = Panel("", f"KL from {on.best}, nats", bars, on.basis, bars=True, ticks=labels)
        return Findings(tables, [panel])


class Retention(ScoredStudy):
    """Figure 11: quality over the retention ratio, from few critical experts to all of them."""

    name = "retention"

    def cases(self, on: Subject) -> list[Case]:
        ends = [Case(tier, on.uniform(tier), tier, ask=True) for tier in (on.high, on.low)]
        return [*ends, *_mixes(on, (0.6, 0.7, 0.75, 0.8, 0.9, 1.0), ask=True)]

    def show(self, found: Scores, on: Subject) -> Findings:
        base, rows = found.one(on.high), found.rows(found.scored, found.one(on.high))
        answers = ANSWERS if on.questions else ()
        title = "Quality over the retention ratio (Figure 11)"

        def panel(y: str, share: Callable[[Case, Score], Estimate]) -> Panel:
            drawn = lines(found.of(MIXED), lambda _, score: score.realised or 0.0, share)
            ends = [found.of(tier)[0] for tier in (on.high, on.low)]
            levels = {f"all {case.label}": share(case, score).value for case, score in ends}
            x = "realised share of critical experts"
            return Panel(x, y, drawn, on.basis, levels, percent=True)

        panels = [panel(f"perplexity against {on.high}, %", change_from(base))]
        if on.questions:
            panels.append(panel("multiple choice, acc, %", lambda _, score: _accuracy(score)))
        return Findings([found.table(title, (LABEL, *DONE), rows, on.high, answers)], panels)


def _accuracy(score: Score) -> Estimate:
    return score.choices.acc if score.choices is not None else Estimate(0.0, 0.0)


SEEDS = (1, 2, 3)
FORMS = {False: "decode steps", True: "prompts"}
# For each form: (label, setting of `importance`, at random?)
KINDS = {
    False: (("gate score", "window", False), ("random", "load", True)),
    True: (
        ("heavy hitters", "window", False),
        ("heavy hitters, exact", "exact", False),
        ("total load", "load", False),
        ("random", "load", True),
    ),
}
SPREADS = {"cosine": "depth-based", "flat": "equal"}


class Critical(ScoredStudy):
    """Figure 3: which experts are critical, chosen by importance or at random, with the cosine
    schedule and with the same ratio in every layer; for decode steps and for prompts."""

    name = "critical"

    def cases(self, on: Subject) -> list[Case]:
        high = on.uniform(on.high)
        listed = [Case(on.high, high, form, prefill=prefill) for prefill, form in FORMS.items()]
        by_chance = [partial(RandomCritical, seed=seed) for seed in SEEDS]
        for (prefill, form), low in product(FORMS.items(), (SKIP, on.low)):
            for kind, importance, at_random in KINDS[prefill]:
                for (schedule, name), r in product(SPREADS.items(), (0.6, 0.75, 0.9)):
                    case = Case(
                        f"{kind}, {name}",
                        on.mixed(low, r, schedule=schedule, importance=importance),
                        f"{form}, {on.high} / {low}",
                        {"retention": r},
                        prefill=prefill,
                    )
                    deciders = by_chance if at_random else [None]
                    listed += [replace(case, decider=decider) for decider in deciders]
        return listed

    def show(self, found: Scores, on: Subject) -> Findings:
        shown = Findings([], [], rows=2)
        note = f"random: each token's figures are means of {len(SEEDS)} seeds."
        for form, low in product(FORMS.values(), (SKIP, on.low)):
            group, base = f"{form}, {on.high} / {low}", found.one(form)
            several = found.of(group)
            rows, title = found.rows(several, base), f"Critical experts of {group} (Figure 3)"
            shown.tables.append(found.table(title, (LABEL, *DONE), rows, on.high, (), note))
            drawn = lines(
                several,
                lambda _, score: score.high,
                change_from(base),
                dashed=lambda label: label.endswith(SPREADS["flat"]),
                share=len(SPREADS),
            )
            shown.panels.append(
                Panel(
                    "share of routed experts in high",
                    f"perplexity against {on.high}, %",
                    drawn,
                    group,
                    {"": 0.0},
                    percent=True,
                    scale="symlog" if low == SKIP else "linear",
                )
            )
        return shown


class Depth(ScoredStudy):
    """Figure 5: one layer at a time in the low tier, all others in the best one."""

    name = "depth"

    def cases(self, on: Subject) -> list[Case]:
        settings = on.mixed(on.low, 0.5, high_tier=on.best)
        best = Case(on.best, on.uniform(on.best), HIGH)
        return [best] + [
            Case(
                f"layer {il}",
                settings,
                LOW,
                {"layer": il},
                decider=partial(OneLayer, layer=layer, tier=1),
            )
            for layer, il in enumerate(on.layer_ids)
        ]

    def show(self, found: Scores, on: Subject) -> Findings:
        base, lowered = found.one(HIGH), found.of(LOW)
        rows, title = found.rows(lowered, base), f"One layer in {on.low}, all others in {on.best}"
        changes = [score.against(base) for _, score in lowered]
        panel = Panel(
            f"the layer in {on.low}",
            f"perplexity against all {on.best}, %",
            [Line("", range(len(changes)), changes)],
            on.basis,
            percent=True,
            bars=True,
            ticks=on.layer_ids,
        )
        table = found.table(f"{title} (Figure 5)", (Column("layer", "layer"),), rows, on.best)
        return Findings([table], [panel])
