"""Table 4's form of DynaExq: uniform types, and DynaExq in several budgets, over the mixed text and
over each domain alone; the policy adapts while it reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import Estimate, pair
from orchestrator.lab.eval.report import share_with_error
from orchestrator.lab.study.figures import LABEL, quality, share
from orchestrator.lab.study.plot import Line, Panel, exact
from orchestrator.lab.study.residency import NEVER, SEEDS, Residency, update_steps
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
    first_uses,
    has_prompts,
    parts_of,
)
from orchestrator.lab.table import Column, Row, Table, fixed, percent

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
Won = Callable[[Score], tuple[Estimate, Estimate]]


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
        uses = first_uses(on, parts, on.high)
        listed = uniform_cases(on, (on.best, on.high, on.low))
        by_chance = partial(on.random_uses, SEEDS[0])
        for part in parts:
            known = uses[part]
            ways: list[tuple[str, Uses | None, Callable[[int], Settings]]] = [
                (EMPTY, None, residency.settings),
                (STARTED, known, residency.settings),
                (FIXED, known, partial(residency.settings, **NEVER)),
                (NULL, by_chance, partial(residency.settings, **NEVER)),
            ]
            if has_prompts(on):
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
        shown = Findings([], [], rows=2)
        whole = found.of(UNIFORM)[1][0].row["slots"]
        columns = (
            LABEL,
            Column("memory", "memory", share),
            Column("experts high", "high", percent(0, " %")),
            Column("routed to high", "routed_high", share),
            *quality(on.best, on.high),
            *_won_columns(", KL", "_kl"),
            *_won_columns("", ""),
            Column("promoted", "promoted"),
        )
        below = []
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
            shown.panels.append(_panel(on, part, hot, won, 0, "log perplexity"))
            below.append(_panel(on, part, hot, won, 1, f"KL from {on.best}"))
        shown.panels += below
        shown.tables[-1].footnotes.append(
            f"Each text is read token by token in one go, the hot sets updated every "
            f"{update_steps(on)} steps. The first half's hotness: what "
            f"{on.n_tokens - found.on.n_tokens} other tokens of the same text were routed to, "
            f"those of the domain where it is one. won back: share of the gap from all {on.low} "
            f"to all {on.high}, in KL from {on.best} (nats) and in mean log-likelihood (log "
            f"perplexity); ratio: won back / experts high. A uniform type takes the bytes of its "
            f"file, and tiers of the model take slots, of whole pages. Swaps take time, so rows "
            f"that adapt differ a little from run to run. Rows of context are there where the text "
            f"has prompts (--prompt-tokens): it places its experts behind each."
        )
        return shown


def _won_back(high: Score, low: Score, score: Score) -> tuple[Estimate, Estimate]:
    """(mean log-likelihood, KL from the best tier): the share of the way from low to high."""
    by_likelihood = arithmetic.share(low.text.nll - score.text.nll, low.text.nll - high.text.nll)
    return by_likelihood, arithmetic.share(low.kl - score.kl, low.kl - high.kl)


def _won_columns(of: str, suffix: str) -> tuple[Column, Column]:
    """What was won back, and that by the share of experts that are high; "?" where nothing was
    there to be won."""

    def known(row: Row) -> Any:
        if row[f"won_back{suffix}"] is None:
            return None
        ratio = row[f"ratio{suffix}"]
        return "?" if ratio is None else fixed(2)(ratio)

    return (
        Column(f"won back{of}", f"won_back{suffix}", share_with_error),
        Column(f"ratio{of}", known),
    )


def _row(
    row: Row, score: Score, won: tuple[Estimate, Estimate] | None, on: Subject, whole: int
) -> Row:
    """A configuration beside what it won back, None for the ends of the way. Experts that moved are
    half of them promoted; a policy that places as many as fit says how many these are. whole: slots
    of all experts in high."""
    report, held = score.report, row.get("high")
    if "hot_per_layer" in report:
        held = report["hot_per_layer"] / on.n_expert
    promoted = report["moves"] // 2 if "moves" in report else report.get("promotions")
    # A file of one type takes its bytes, and tiers of the model take slots.
    taken = row["slots"] if row.get("tier", HOT) else row["bytes"]
    found = {
        **row,
        "memory": taken / whole,
        "high": held,
        "routed_high": held if promoted is None else score.high,
        "promoted": promoted,
    }
    for suffix, each in zip(("", "_kl"), won or (None, None), strict=True):
        back = None if each is None else pair(each)
        found[f"won_back{suffix}"] = back
        found[f"ratio{suffix}"] = back[0] / held if back and back[0] and held else None
    return found


def _panel(on: Subject, part: Part, hot: list[Scored], won: Won, of: int, what: str) -> Panel:
    """What was won back of a text, in log perplexity or in KL."""
    scored = on.on(part.second)
    drawn = lines(
        hot,
        lambda case, _: 100 * case.row["high"],
        lambda _, score: won(score)[of],
        dashed=lambda label: label in (FIXED, NULL),
    )
    drawn += [
        Line("as many as are high", [0, 100], exact([0, 1]), True),
        Line(f"{GOAL:g} times that", [0, 100 / GOAL], exact([0, 1]), True),
    ]
    return Panel(
        f"experts in {on.high}, %",
        f"won back from {on.low} to {on.high}, %",
        drawn,
        f"{part.name}, {scored.n_tokens} tokens: {what}",
        percent=True,
    )
