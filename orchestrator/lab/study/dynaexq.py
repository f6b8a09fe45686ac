"""Figure 3 and Table 4 of DynaExq: the loss of demoting experts, by the order in which they are
demoted; and how much of the loss a hot set wins back in the same memory, beside uniform types that
fit whole.

The paper's Table 4 has the accuracy of Qwen3 and Phi-3.5-MoE on five benchmarks; this study
measures KL divergence and perplexity on the given model instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from gguf_tools.units import format_size
from orchestrator.allocation.pools import nominal_bits
from orchestrator.errors import ConfigError
from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import Estimate, pair
from orchestrator.lab.eval.run import share_with_error
from orchestrator.lab.plotting import Line, Panel, exact
from orchestrator.lab.study.study import (
    LABEL,
    SIZE,
    UNIFORM,
    Case,
    Findings,
    Scored,
    ScoredStudy,
    Scores,
    above,
    four_digits,
    lines,
    quality,
    share,
    uniform_cases,
)
from orchestrator.lab.study.subject import Part, Score, Settings, Subject, Uses, halves, parts_of
from orchestrator.lab.table import Column, Row, Table, fixed, percent
from orchestrator.memory.footprint import model_shape
from orchestrator.policy.dynaexq import HIGH, LOW, DynaExqSettings, resident_plan

# Of hot sets that are chosen at random.
SEEDS = (1, 2, 3)
NEVER = {"update_steps": 0}


class Residency:
    """The high and the low tier of a subject, and what memory they take."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        with subject.model() as model:
            names = [tier.name for tier in model.tiers]
            tiers = (names.index(subject.high), names.index(subject.low))
            self.shape = model_shape(model, tiers)

    def budget_bytes(self, n_high: int) -> int:
        """The least budget that holds n_high experts of each layer high, and what swaps need."""
        plenty = 2 * (self.shape.all_slot_bytes(HIGH) + self.shape.all_slot_bytes(LOW))
        found = resident_plan(self.shape, plenty, n_high)
        if found is None:
            raise ConfigError("the model has no experts to hold in two precisions")
        return found[0].plan().total_bytes

    def counts(self, shares: tuple[float, ...]) -> list[int]:
        """So many experts of a layer as these shares are, one at least."""
        return sorted({max(1, round(share * self.shape.n_expert)) for share in shares})

    def settings(self, n_high: int, **more: Any) -> Settings:
        """Settings: the n_high hottest experts of each layer high, the first ones where nothing is
        known of their use."""
        return {
            "policy": "dynaexq",
            "high_tier": self.subject.high,
            "low_tier": self.subject.low,
            "ram": None,
            "expert_ram": self.budget_bytes(n_high),
            "hot_experts": n_high,
            **more,
        }

    def placed(self, n_high: int) -> Settings:
        """Settings: in the same bytes, with the policy that places experts by each prompt: as many
        of them high as fit, n_high at most."""
        bits = float(nominal_bits(self.subject.low))
        return self.settings(n_high, policy="context", hot_experts=None, near_bits=bits)


STEPS = 8  # points of a curve, besides its start
COLD, RANDOM, HOT_FIRST = ("cold first", "at random", "hot first")


class Demotion(ScoredStudy):
    """What demotion costs. Residency does not change while the text is read."""

    name = "demotion"
    halved = True

    def cases(self, on: Subject) -> list[Case]:
        residency, n = Residency(on), on.n_expert
        hotness = cache(partial(on.uses, halves(on.windows)[0], on.high))

        def coldness() -> np.ndarray:
            cold: np.ndarray = hotness().max() - hotness()
            return cold

        by_chance = [partial(on.random_uses, seed) for seed in SEEDS]
        levels = sorted({round(n * step / STEPS) for step in range(STEPS + 1)})
        listed = []
        ways: dict[str, list[Uses]] = {COLD: [hotness], RANDOM: [*by_chance], HOT_FIRST: [coldness]}
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
            for order in (COLD, RANDOM, HOT_FIRST)
            for case, score in (first, *found.of(order), last)
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
        table = found.table(title, columns, curves, base, f"all {scored.high}", note=note)
        for row in table.rows:
            row["routed_high"] = row["usage"]["high"]
        drawn = lines(table.rows, "demoted", "change")
        panel = Panel(
            f"experts of each layer in {scored.low}, of {n}",
            f"perplexity against all {scored.high}, %",
            drawn,
            scored.basis,
            percent=True,
        )
        return Findings([table], [panel])


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


class HotMemory(ScoredStudy):
    """What a hot set wins back in the same memory."""

    name = "memory"
    halved = True
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
            ends = [
                (case, replace(score, text=score.text.part(part.places)))
                for case, score in found.of(UNIFORM)
            ]
            hot = found.of(HOT, part)
            high, low = (score for _, score in ends[1:3])
            every, rows = [*ends, *hot], []
            for number, (row, (_, score)) in enumerate(
                zip(found.rows(every, high), every, strict=True)
            ):
                # The share of the way from the KL of low to that of high.
                kl, way = low.text.kl - score.text.kl, low.text.kl - high.text.kl
                won = None if number < N_ENDS else arithmetic.share(kl, way)
                rows.append(_row(row, score, won, on, whole))
            shown.tables.append(
                Table(
                    f"The same memory, {part.name} (Table 4): {on.on(part.second).basis}",
                    columns,
                    rows,
                )
            )
            shown.panels.append(_panel(on, part, hot, rows[len(ends) :]))
        steps = DynaExqSettings.of(on.config.of_policies).update_steps
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


def _panel(on: Subject, part: Part, hot: list[Scored], rows: list[Row]) -> Panel:
    """What was won back of a text, over the share of high experts that each memory is for."""
    scored = on.on(part.second)
    meant = {case.row["slots"]: 100 * case.row["high"] for case, _ in hot}
    drawn = lines(
        rows,
        lambda row: meant[row["slots"]],
        "won_back",
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


IN_MEMORY = (0.0, 0.25, 0.5, 0.75)  # shares of the experts that a memory holds high, and one more
MIX = "dynaexq"


class EqualMemory(ScoredStudy):
    """The same memory for uniform types and for mixes."""

    name = "equal"
    halved = True
    rivals = True
    policies = ("dynaexq",)

    def cases(self, on: Subject) -> list[Case]:
        residency, listed = Residency(on), uniform_cases(on, on.tiers)
        hotness = cache(partial(on.uses, halves(on.windows)[0], on.high))
        n, whole = on.n_expert, residency.shape.all_slot_bytes(0)
        # Beside the shares, as many as fit in what all of them high would take, with the spare
        # slots of swaps.
        fit = (high for high in range(n) if residency.budget_bytes(high) <= whole)
        for n_high in sorted({*(round(held * n) for held in IN_MEMORY), max(fit, default=n)}):
            row = {"bytes": residency.budget_bytes(n_high)}
            label = f"dynaexq, {n_high} of {on.n_expert} high"
            listed.append(Case(label, residency.settings(n_high), MIX, row, used=hotness))
        return listed

    def show(self, found: Scores, on: Subject) -> Findings:
        scored, base = found.on, found.tier(on.high)
        alone = found.by_size()
        after = [Column("KL above dynaexq's", "above", four_digits)]
        tables = [found.table("All uniform types", (LABEL, *SIZE), alone, base, on.high)]
        for mix in found.of(MIX):
            n_bytes = mix[0].row["bytes"]
            several = [*_best_that_fit(alone, n_bytes), mix]
            title = f"Experts in {format_size(n_bytes)}"
            tables.append(found.table(title, (LABEL,), several, base, on.high, after))
            for row, (_, score) in zip(tables[-1].rows, several, strict=True):
                row["above"] = above(score, mix[1])
        tables[-1].footnotes.append(
            f"uniform: of the types of a method that fit whole, the one with the least KL. "
            f"dynaexq: every expert in memory, in {on.high} or {on.low}, started with what "
            f"{on.n_tokens - scored.n_tokens} other tokens of the same text were routed to. KL "
            f"above dynaexq's: paired; below 0 is better. A uniform type takes the bytes of its "
            f"file, and a mix takes slots, of whole pages."
        )
        drawn = lines(
            [*tables[0].rows, *found.rows(found.of(MIX), base)],
            lambda row: row["bytes"] / (1 << 20),
            "kl",
            lambda row: f"uniform, {row['method']}" if "method" in row else MIX,
        )
        x, y = "memory of the experts, MiB", f"KL from {on.best}, nats"
        return Findings(tables, [Panel(x, y, drawn, scored.basis, scale="log")])


def _best_that_fit(alone: list[Scored], n_bytes: int) -> list[Scored]:
    """The types of each method that fit whole, the one with the least KL."""
    fit = [each for each in alone if each[0].row["bytes"] <= n_bytes]
    by_method = (
        [each for each in fit if each[0].row["method"] == method]
        for method in dict.fromkeys(case.row["method"] for case, _ in fit)
    )
    best = (min(several, key=lambda each: float(each[1].text.kl.mean())) for several in by_method)
    return [(replace(case, label=f"uniform {case.label}"), score) for case, score in best]
