"""Table 4's form of DynaExq: uniform types, and DynaExq in several budgets, over the mixed text and
over each domain alone; the policy adapts while it reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import Estimate, pair
from orchestrator.lab.eval.report import share_with_error
from orchestrator.lab.study.figures import LABEL, quality, share
from orchestrator.lab.study.plot import Line, Panel, exact
from orchestrator.lab.study.residency import NEVER, SEEDS, Residency
from orchestrator.lab.study.study import (
    UNIFORM,
    Case,
    Findings,
    HalvedStudy,
    Scored,
    Scores,
    lines,
    uniform_cases,
)
from orchestrator.lab.study.subject import (
    Part,
    Score,
    Settings,
    Subject,
    Uses,
    parts_of,
)
from orchestrator.lab.table import Column, Row, Table, fixed, percent
from orchestrator.policy.dynaexq import DynaExq

HELD = (0.25, 0.5, 0.75)  # shares of the experts that a budget holds high
GOAL = 1.3
EMPTY, STARTED, FIXED, NULL = (
    "dynaexq, cold start",
    "dynaexq, started with the first half's hotness",
    "dynaexq, the same, never adapting",
    "dynaexq, random hot set, never adapting",
)
PLACED, PLACED_EMPTY = "context, with the first half's hotness", "context, cold start"
HOT = "hot"
# The best tier, high and low: between the last two it is told what was won back.
N_ENDS = 3
Won = Callable[[Score], Estimate]


class HotMemory(HalvedStudy):
    """What a hot set wins back in the same memory."""

    name = "memory"
    rivals = True
    policies = ("dynaexq", "context")

    def n_before(self, on: Subject) -> int:
        """Uses of each text. Passes over a domain are shorter than those over all of the text."""
        return len(parts_of(on))

    def cases(self, on: Subject) -> list[Case]:
        residency, parts = Residency(on), parts_of(on)
        listed = uniform_cases(on, (on.best, on.high, on.low))
        by_chance = partial(on.random_uses, SEEDS[0])
        for part in parts:
            known = cache(partial(on.uses, part.first, on.high))
            ways: list[tuple[str, Uses | None, Callable[[int], Settings]]] = [
                (EMPTY, None, residency.settings),
                (STARTED, known, residency.settings),
                (FIXED, known, partial(residency.settings, **NEVER)),
                (NULL, by_chance, partial(residency.settings, **NEVER)),
            ]
            if any(window.prompt for window in on.windows):
                ways += [(PLACED, known, residency.placed), (PLACED_EMPTY, None, residency.placed)]
            listed += [
                Case(
                    label,
                    settings(n_high),
                    HOT,
                    {"slots": residency.budget_bytes(n_high), "high": n_high / on.n_expert},
                    part,
                    used,
                )
                for label, used, settings in ways
                for n_high in residency.counts(HELD)
            ]
        return listed

    def show(self, found: Scores, on: Subject) -> Findings:
        shown = Findings([], [])
        whole = found.of(UNIFORM)[1][0].row["slots"]
        columns = (
            LABEL,
            Column("memory", "memory", share),
            Column("experts high", "high", percent(0, " %")),
            Column("routed to high", "routed_high", share),
            *quality(on.best, on.high),
            Column("won back", "won_back", share_with_error),
            Column("ratio", "ratio", fixed(2)),
            Column("promoted", "promoted"),
        )
        for part in dict.fromkeys(case.part for case, _ in found.of(HOT)):
            assert part is not None
            ends = [(case, score.part(part.places)) for case, score in found.of(UNIFORM)]
            hot = found.of(HOT, part)
            high, low = (score for _, score in ends[1:3])
            won = partial(_won_back, high, low)
            rows = found.rows([*ends, *hot], high)
            rows = [
                _row(row, score, None if number < N_ENDS else won(score), on, whole)
                for number, (row, (_, score)) in enumerate(zip(rows, [*ends, *hot], strict=True))
            ]
            shown.tables.append(
                Table(
                    f"The same memory, {part.name} (Table 4): {on.on(part.second).basis}",
                    columns,
                    rows,
                )
            )
            shown.panels.append(_panel(on, part, hot, won))
        steps = DynaExq.Settings.of(on.config.of_policies).update_steps
        shown.tables[-1].footnotes.append(
            f"Each text is read token by token in one go, the hot sets updated every "
            f"{steps} steps. The first half's hotness: what "
            f"{on.n_tokens - found.on.n_tokens} other tokens of the same text were routed to, "
            f"those of the domain where it is one. won back: share of the KL from all {on.low} "
            f"to all {on.high}; ratio: won back / experts high. A uniform type takes the bytes of "
            f"its file, and tiers of the model take slots, of whole pages. Swaps take time, so "
            f"rows that adapt differ a little from run to run. Rows of context are there where the "
            f"text has prompts (--prompt-tokens): it places its experts behind each."
        )
        return shown


def _won_back(high: Score, low: Score, score: Score) -> Estimate:
    """The share of the way from the KL of low to that of high."""
    return arithmetic.share(low.kl - score.kl, low.kl - high.kl)


def _row(row: Row, score: Score, won: Estimate | None, on: Subject, whole: int) -> Row:
    """A configuration beside what it won back, None for the ends of the way. Experts that moved are
    half of them promoted; a policy that places as many as fit says how many these are. whole: slots
    of all experts in high."""
    report, held = score.report, row.get("high")
    if "hot_per_layer" in report:
        held = report["hot_per_layer"] / on.n_expert
    promoted = report["moves"] // 2 if "moves" in report else report.get("promotions")
    # A file of one type takes its bytes, and tiers of the model take slots.
    taken = row["slots"] if row.get("tier", HOT) else row["bytes"]
    return {
        **row,
        "memory": taken / whole,
        "high": held,
        "routed_high": None if promoted is None else score.high,
        "promoted": promoted,
        "won_back": None if won is None else pair(won),
        "ratio": won.value / held if won and held else None,
    }


def _panel(on: Subject, part: Part, hot: list[Scored], won: Won) -> Panel:
    """What was won back of a text."""
    scored = on.on(part.second)
    drawn = lines(
        hot,
        lambda case, _: 100 * case.row["high"],
        lambda _, score: won(score),
        dashed=lambda label: label in (FIXED, NULL),
    )
    drawn += [
        Line("as many as are high", [0, 100], exact([0, 1]), True),
        Line(f"{GOAL:g} times that", [0, 100 / GOAL], exact([0, 1]), True),
    ]
    return Panel(
        f"experts in {on.high}, %",
        f"KL won back from {on.low} to {on.high}, %",
        drawn,
        f"{part.name}, {scored.n_tokens} tokens",
        percent=True,
    )
