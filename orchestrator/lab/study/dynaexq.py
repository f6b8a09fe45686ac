"""DynaExq's Figure 3 and Table 4: quality loss of demoted experts, benefit of a hot set.

Figure 3 varies the order of demotion. Table 4 compares a hot set with uniform types in the same
memory. The paper's Table 4 has the accuracy of Qwen3 and Phi-3.5-MoE on five benchmarks; this study
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
from orchestrator.plan.footprint import model_shape
from orchestrator.policy.dynaexq import HIGH, LOW, DynaExqSettings, resident_plan

# Seeds of random hot sets.
SEEDS = (1, 2, 3)
NEVER = {"update_steps": 0}


class Residency:
    """Computes the memory that keeps all experts of a model resident (loaded), in two precisions.

    A given number of experts of each layer has the high precision, and all other experts have the
    low precision. The class also creates settings that limit a policy to this amount of memory.

    - subject: names the model and the two precisions.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        with subject.model() as model:
            names = [tier.name for tier in model.tiers]
            tiers = (names.index(subject.high), names.index(subject.low))
            self.shape = model_shape(model, tiers)

    def budget_bytes(self, n_high: int) -> int:
        """Return the memory that experts need if n_high experts of each layer have the high tier.

        All other experts have the low tier. The size in bytes includes the spare slots with which
        experts change their tier.
        """
        plenty = 2 * (self.shape.all_slot_bytes(HIGH) + self.shape.all_slot_bytes(LOW))
        found = resident_plan(self.shape, plenty, n_high)
        if found is None:
            raise ConfigError(
                f"{self.subject.high} and {self.subject.low} cannot be mixed in this model: choose "
                f"other precisions with --high-tier and --low-tier"
            )
        return found[0].plan().total_bytes

    def counts(self, shares: tuple[float, ...]) -> list[int]:
        """Convert fractions of a layer's experts to numbers of experts, at least 1 each.

        Returns the distinct numbers in increasing order.
        """
        return sorted({max(1, round(share * self.shape.n_expert)) for share in shares})

    def settings(self, n_high: int, **more: Any) -> Settings:
        """Return settings for the policy `dynaexq` with n_high experts per layer in the high tier.

        These are the most used experts. If the usage is unknown, they are the experts with the
        lowest numbers. `more` are further settings.
        """
        return {
            "policy": "dynaexq",
            "high_tier": self.subject.high,
            "low_tier": self.subject.low,
            "ram": None,
            "expert_ram": self.budget_bytes(n_high),
            "hot_experts": n_high,
            **more,
        }

    def context_settings(self, n_high: int) -> Settings:
        """Return settings for the policy `context`, which chooses precisions after each prompt.

        The policy gets the memory that experts need if n_high experts of each layer have the high
        precision and all others the low precision.
        """
        bits = float(nominal_bits(self.subject.low))
        return self.settings(n_high, policy="context", hot_experts=None, near_bits=bits)


def _uses_in(high: str) -> str:
    """Return the footnote that explains the column "uses in HIGH"."""
    return f"Uses in {high}: how often an expert that a token uses is in {high}, in % of all uses."


STEPS = 8  # points of a curve after its start
COLD, RANDOM, HOT_FIRST = ("cold first", "at random", "hot first")


class Demotion(ScoredStudy):
    """Study for Figure 3 of DynaExq: the quality loss if some experts are in the low tier.

    The experts of each layer are demoted from the high tier in three orders: the least used first,
    the most used first, and at random.
    """

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
                # The order does not matter if no or all experts are demoted.
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
            Column(f"uses in {scored.high}", "routed_high", share),
        )
        orders = (
            f"{COLD.capitalize()}: the least used experts of each layer are demoted first. "
            f"{HOT_FIRST.capitalize()}: the most used experts of each layer are demoted first.",
            f"Expert usage is counted on {on.n_tokens - scored.n_tokens} tokens of the same text, "
            f"on which quality is not measured.",
            f"{RANDOM.capitalize()}: experts are demoted in random order. Each figure is the mean "
            f"of {len(SEEDS)} orders.",
        )
        title = (
            f"Quality by the number of experts per layer that are demoted from {scored.high} to "
            f"{scored.low} (Figure 3 of DynaExq)"
        )
        note = _uses_in(scored.high)
        table = found.table(title, columns, curves, base, f"all {scored.high}", note=note)
        table.footnotes += orders
        for row in table.rows:
            row["routed_high"] = row["usage"]["high"]
        drawn = lines(table.rows, "demoted", "change")
        panel = Panel(
            f"experts per layer, of {n}, that are in {scored.low} instead of {scored.high}",
            f"change of perplexity, relative to the model with all experts in {scored.high}, %",
            drawn,
            scored.basis,
            percent=True,
        )
        return Findings([table], [panel])


HELD = (0.25, 0.5, 0.75)  # fractions of the experts in the high tier
GOAL = 1.3
EMPTY, STARTED, FIXED, NULL = (
    "--policy dynaexq, cold start",
    "--policy dynaexq, started with usage counts of the text's first half",
    "--policy dynaexq, fixed hot experts: the most used in the text's first half",
    "--policy dynaexq, fixed hot experts: chosen at random",
)
PLACED, PLACED_EMPTY = (
    "--policy context, started with usage counts of the text's first half",
    "--policy context, cold start",
)
HOT = "hot"
# Number of reference cases: the best, the high and the low tier. The recovered KL is relative to
# the difference between high and low.
N_ENDS = 3


class HotMemory(ScoredStudy):
    """Study for Table 4 of DynaExq: quality if only the hot (most used) experts have the high tier.

    All other experts have the low tier. The study measures KL divergences from the model's best
    tier. Its main result is a number that is 0 for the quality with all experts in the low tier,
    and 1 for the quality with all experts in the high tier:

        recovered = (KL(all low) - KL(hot high)) / (KL(all low) - KL(all high))
    """

    halved = True
    rivals = True

    def n_usage_passes(self, on: Subject) -> int:
        """Return how often the study reads text to measure which experts are used most.

        Usage is measured once for the whole text. If the text has several domains (kinds of text),
        usage is also measured once for each domain.
        """
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
                ways += [
                    (PLACED, known, residency.context_settings),
                    (PLACED_EMPTY, None, residency.context_settings),
                ]
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
            Column(f"experts in {on.high}", "high", percent(0, " %")),
            Column(f"uses in {on.high}", "routed_high", share),
            *quality(on.best, on.high),
            Column("recovered", "won_back", share_with_error),
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
                # The fraction of the KL difference between low and high that is recovered.
                kl, way = low.text.kl - score.text.kl, low.text.kl - high.text.kl
                won = None if number < N_ENDS else arithmetic.share(kl, way)
                rows.append(_row(row, score, won, on, whole))
            shown.tables.append(
                Table(
                    f"Quality with only the hot (most used) experts in {on.high} (Table 4 of "
                    f"DynaExq), text '{part.name}': {on.on(part.second).basis}",
                    columns,
                    rows,
                )
            )
            shown.panels.append(_panel(on, part, hot, rows[len(ends) :]))
        steps = DynaExqSettings.of(on.config.of_policies).update_steps
        shown.tables[-1].footnotes += [
            f"Expert usage is counted on the first half of each text, in total "
            f"{on.n_tokens - found.on.n_tokens} tokens.",
            "Quality is measured on the second half of each text, token by token.",
            "Cold start: the policy starts without usage counts.",
            f"Hot experts are in {on.high}, all other experts in {on.low}.",
            f"--policy dynaexq chooses the hot experts again every {steps} steps, except in rows "
            f"with 'fixed'. Quality then varies slightly between runs, because precisions change "
            f"in the background.",
            f"Promoted: number of experts whose precision changed from {on.low} to {on.high}.",
            f"Memory: memory that the experts take, divided by the memory of all experts in "
            f"{on.high}. Expert slots include padding. Files with one quantization type have no "
            f"padding.",
            _uses_in(on.high),
            f"Recovered: position of the row's KL between the KL of all experts in {on.low} (0 %) "
            f"and the KL of all experts in {on.high} (100 %).",
            f"Ratio: the value of Recovered, divided by the share of experts in {on.high}.",
            "--policy context is measured only if the text has prompts, for example with the "
            "option --prompt-tokens.",
        ]
        return shown


def _row(row: Row, score: Score, won: Estimate | None, on: Subject, whole: int) -> Row:
    """Return a configuration's row with the fraction of KL that it recovered.

    `won` is None for the reference cases. `whole` is the slot memory of all experts in the high
    tier. Half of the moved experts are promoted. If the policy decides the number of high experts
    itself, its report gives that number.
    """
    report, held = score.report, row.get("high")
    if "hot_per_layer" in report:
        held = report["hot_per_layer"] / on.n_expert
    promoted = report["moves"] // 2 if "moves" in report else report.get("promotions")
    # A uniform file needs the bytes of its experts; tiers of the model need slots.
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
    """Return the panel of the recovered KL of a text by the fraction of high experts."""
    scored = on.on(part.second)
    meant = {case.row["slots"]: 100 * case.row["high"] for case, _ in hot}
    drawn = lines(
        rows,
        lambda row: meant[row["slots"]],
        "won_back",
        dashed=lambda label: label in (FIXED, NULL),
    )
    drawn += [
        Line(
            f"for comparison: {on.high} for x % of the experts recovers x % of the quality loss",
            [0, 100],
            exact([0, 1]),
            True,
        ),
        Line(
            f"goal: {on.high} for x % of the experts recovers {GOAL:g} * x % of the quality loss",
            [0, 100 / GOAL],
            exact([0, 1]),
            True,
        ),
    ]
    return Panel(
        f"experts in {on.high}, %",
        f"recovered share of the quality loss, %\n"
        f"(0: all experts in {on.low}, 100: all experts in {on.high})",
        drawn,
        f"{part.name}, {scored.n_tokens} tokens",
        percent=True,
    )


IN_MEMORY = (0.0, 0.25, 0.5, 0.75)  # fractions of the experts in high
MIX = "dynaexq"


class EqualMemory(ScoredStudy):
    """Study that compares the quality of models of the same size.

    In one kind of model, all experts have the same type. In the other kind, two precisions are
    mixed.
    """

    halved = True
    rivals = True

    def cases(self, on: Subject) -> list[Case]:
        residency, listed = Residency(on), uniform_cases(on, on.tiers)
        hotness = cache(partial(on.uses, halves(on.windows)[0], on.high))
        n, whole = on.n_expert, residency.shape.all_slot_bytes(0)
        # One more case has the largest number of high experts that, with the spare slots of swaps,
        # fits in the memory of all experts in high.
        fit = (high for high in range(n) if residency.budget_bytes(high) <= whole)
        for n_high in sorted({*(round(held * n) for held in IN_MEMORY), max(fit, default=n)}):
            row = {"bytes": residency.budget_bytes(n_high)}
            label = f"dynaexq, {n_high} of {on.n_expert} experts in {on.high}"
            listed.append(Case(label, residency.settings(n_high), MIX, row, used=hotness))
        return listed

    def show(self, found: Scores, on: Subject) -> Findings:
        scored, base = found.on, found.tier(on.high)
        alone = found.by_size()
        after = [Column("KL minus dynaexq's KL", "above", four_digits)]
        title = "Quality with one quantization type for all experts"
        tables = [found.table(title, (LABEL, *SIZE), alone, base, on.high)]
        for mix in found.of(MIX):
            n_bytes = mix[0].row["bytes"]
            several = [*_best_that_fit(alone, n_bytes), mix]
            title = f"Quality with at most {format_size(n_bytes)} for all experts"
            tables.append(found.table(title, (LABEL,), several, base, on.high, after))
            for row, (_, score) in zip(tables[-1].rows, several, strict=True):
                row["above"] = above(score, mix[1])
        tables[-1].footnotes += [
            "Uniform: all experts have one quantization type. For each quantization method, the "
            "table has the type with the smallest KL that fits the memory.",
            f"Dynaexq: at the start, the most used experts are in {on.high}, all other experts in "
            f"{on.low}.",
            f"Expert usage is counted on {on.n_tokens - scored.n_tokens} tokens of the same text, "
            f"on which quality is not measured.",
            "KL minus dynaexq's KL: the row's KL divergence minus the KL divergence of --policy "
            "dynaexq on the same tokens. A value below 0 means that the row is better.",
            "The memory of dynaexq includes the padding of expert slots. A model with one "
            "quantization type for all experts has no padding.",
        ]
        drawn = lines(
            [*tables[0].rows, *found.rows(found.of(MIX), base)],
            lambda row: row["bytes"] / (1 << 20),
            "kl",
            lambda row: f"uniform, {row['method']}" if "method" in row else MIX,
        )
        x, y = "memory of the experts, MiB", f"KL from {on.best}, nats"
        return Findings(tables, [Panel(x, y, drawn, scored.basis, scale="log")])


def _best_that_fit(alone: list[Scored], n_bytes: int) -> list[Scored]:
    """Return, for each method, the type with the smallest KL that fits whole."""
    fit = [each for each in alone if each[0].row["bytes"] <= n_bytes]
    by_method = (
        [each for each in fit if each[0].row["method"] == method]
        for method in dict.fromkeys(case.row["method"] for case, _ in fit)
    )
    best = (min(several, key=lambda each: float(each[1].text.kl.mean())) for several in by_method)
    return [(replace(case, label=f"uniform {case.label}"), score) for case, score in best]
