"""DyMoE's Tables 1 and 2 and Figures 3, 5, 6 and 11: quality loss, and prediction of experts.

The paper measures accuracy (MMLU, CMMLU, GSM8K and C-Eval on Mixtral-8x7B and Qwen3-30B-A3B). These
studies measure KL divergence, perplexity and, with questions, multiple choice on the given model.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import cosine, pair
from orchestrator.lab.eval.run import share_with_error, with_error
from orchestrator.lab.plotting import Line, Panel
from orchestrator.lab.study.activations import (
    FFN_INPUT,
    OUTPUT,
    ROUTER_INPUT,
    ROUTER_LOGITS,
    read_windows,
    recall,
    routers_of,
    top,
)
from orchestrator.lab.study.study import (
    ANSWERS,
    DONE,
    LABEL,
    SIZE,
    UNIFORM,
    Case,
    Findings,
    ScoredStudy,
    Scores,
    Study,
    lines,
    uniform_cases,
)
from orchestrator.lab.study.subject import SKIP, Subject, one_layer, random_critical
from orchestrator.lab.table import Column, Row, Table

MIXED, HIGH, LOW = "mixed", "high", "low"


def _mixes(on: Subject, ratios: tuple[float, ...], ask: bool = False) -> list[Case]:
    """Return the cases high/skip and high/low at these retention ratios."""
    return [
        Case(f"{on.high} / {low}", on.mixed(low, r), MIXED, {"retention": r}, ask=ask)
        for low, r in product((SKIP, on.low), ratios)
    ]


class Accuracy(ScoredStudy):
    """Study for Tables 1 and 2 of DyMoE: quality with one precision, and with two.

    With two precisions, the most important experts (critical experts) have the high one. All other
    experts have the low precision, or are skipped. Three fractions of critical experts are
    measured.
    """

    def cases(self, on: Subject) -> list[Case]:
        alone = uniform_cases(on, on.tiers[::-1], ask=True)
        return [*alone, *_mixes(on, (0.75, 0.9, 1.0), ask=True)]

    def show(self, found: Scores, on: Subject) -> Findings:
        alone, mixed, base = found.by_size(), found.of(MIXED), found.tier(on.high)
        answers = ANSWERS if on.questions else ()
        notes = [
            f"KL from {on.best}: KL divergence from the model with all experts in {on.best}, in "
            f"nats per token.",
            f"Same top token: share of tokens with the same most likely next token as the model "
            f"with all experts in {on.best}.",
            "The text is read token by token, as in an answer. Each expert is computed in the "
            "precision that the policy chose.",
        ]
        one = "Quality with all experts in one precision (Table 1 of DyMoE)"
        two = "Quality with less important experts in low precision or skipped (Table 2 of DyMoE)"
        tables = [
            found.table(title, (LABEL, *columns), several, base, on.high, answers)
            for title, columns, several in ((one, SIZE, alone), (two, DONE, mixed))
        ]
        tables[-1].footnotes += notes
        labels = [case.label for case, _ in alone]
        labels += [f"{case.label}\nr = {case.row['retention']:g}" for case, _ in mixed]
        kl = [row["kl"] for table in tables for row in table.rows]
        n, every = len(alone), range(len(kl))
        bars = [Line(UNIFORM, every[:n], kl[:n]), Line(MIXED, every[n:], kl[n:])]
        panel = Panel("", f"KL from {on.best}, nats", bars, on.basis, bars=True, ticks=labels)
        return Findings(tables, [panel])


class Retention(ScoredStudy):
    """Study for Figure 11 of DyMoE: how the retention ratio affects quality.

    The retention ratio is the fraction of a token's experts that have the high precision. These are
    the experts with the highest gate weights. The other experts have the low precision, or are
    skipped. Quality is measured as KL divergence and perplexity.
    """

    def cases(self, on: Subject) -> list[Case]:
        ends = [Case(tier, on.uniform(tier), tier, ask=True) for tier in (on.high, on.low)]
        return [*ends, *_mixes(on, (0.6, 0.7, 0.75, 0.8, 0.9, 1.0), ask=True)]

    def show(self, found: Scores, on: Subject) -> Findings:
        answers = ANSWERS if on.questions else ()
        title = (
            "Quality by retention ratio r, the share of experts in high precision (Figure 11 of "
            "DyMoE)"
        )
        table = found.table(
            title, (LABEL, *DONE), found.scored, found.one(on.high), on.high, answers
        )
        mixed = [row for row in table.rows if row["retention"] is not None]
        alone = {row["configuration"]: row for row in table.rows}

        def panel(y: str, figure: str) -> Panel:
            drawn = lines(mixed, "realised", figure)
            levels = {f"all {tier}": alone[tier][figure][0] for tier in (on.high, on.low)}
            x = "realised (actual) share of a token's experts in high precision"
            return Panel(x, y, drawn, on.basis, levels, percent=True)

        change = f"change of perplexity, relative to the model with all experts in {on.high}, %"
        panels = [panel(change, "change")]
        if on.questions:
            panels.append(panel("multiple choice, acc, %", "acc"))
        return Findings([table], panels)


SEEDS = (1, 2, 3)
FORMS = {False: "decode steps", True: "prompts"}
# For each form: (label, setting `importance`, whether critical experts are random)
KINDS = {
    False: (("gate score", "window", False), ("random", "load", True)),
    True: (
        ("heavy hitters", "window", False),
        ("heavy hitters, exact", "exact", False),
        ("total load", "load", False),
        ("random", "load", True),
    ),
}
# For each form: footnotes with the rules by which experts get the high precision.
RULES = {
    False: (
        "Gate score: the token's experts with the highest routing weights have high precision.",
    ),
    True: (
        "Heavy hitters: the experts that the heavy hitters use most have high precision. Heavy "
        "hitters are the prompt tokens that receive the most attention.",
        "Attention to a token is counted from the last tokens of the prompt. In rows with 'exact', "
        "attention is counted from all tokens of the prompt.",
        "Total load: the experts that all prompt tokens together use most have high precision.",
    ),
}
SPREADS = {"cosine": "depth-based", "flat": "equal"}


class Critical(ScoredStudy):
    """Study for Figure 3 of DyMoE: compares the quality of several ways to choose critical experts.

    Critical experts keep the high precision. All others have the low precision or are skipped. The
    critical experts are the most important ones, or random ones for comparison. Their number is the
    same in all layers, or decreases with depth (cosine schedule). Quality is measured twice: with a
    text that is read token by token, and with a text that is read as prompts.
    """

    def cases(self, on: Subject) -> list[Case]:
        high = on.uniform(on.high)
        listed = [Case(on.high, high, form, prefill=prefill) for prefill, form in FORMS.items()]
        by_chance = [partial(random_critical, seed=seed) for seed in SEEDS]
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
        for (prefill, form), low in product(FORMS.items(), (SKIP, on.low)):
            group, base = f"{form}, {on.high} / {low}", found.one(form)
            notes = (
                f"A row's name says which experts are in {on.high}, and how their number differs "
                f"between layers.",
                *RULES[prefill],
                f"Random: random experts are in {on.high}. Each figure is the mean of "
                f"{len(SEEDS)} random choices.",
                f"Depth-based: early layers have more experts in {on.high} than late layers. "
                f"Equal: each layer has the same number of experts in {on.high}.",
            )
            title = (
                f"Quality by the method that chooses the experts in high precision, {group} "
                f"(Figure 3 of DyMoE)"
            )
            table = found.table(title, (LABEL, *DONE), found.of(group), base, on.high)
            table.footnotes += notes
            shown.tables.append(table)
            drawn = lines(
                table.rows,
                lambda row: row["usage"]["high"],
                "change",
                dashed=lambda label: label.endswith(SPREADS["flat"]),
                share=len(SPREADS),
            )
            shown.panels.append(
                Panel(
                    "share of the used experts that are in high precision",
                    f"change of perplexity, relative to the model with all experts in {on.high}, %",
                    drawn,
                    group,
                    {"": 0.0},
                    percent=True,
                    scale="symlog" if low == SKIP else "linear",
                )
            )
        return shown


class Depth(ScoredStudy):
    """Study for Figure 5 of DyMoE: quality if the experts of a single layer have low precision.

    The study measures each layer separately. All other layers have the model's best precision.
    Quality is measured as KL divergence and perplexity.
    """

    def cases(self, on: Subject) -> list[Case]:
        settings = on.mixed(on.low, 0.5, high_tier=on.best)
        best = Case(on.best, on.uniform(on.best), HIGH)
        return [best] + [
            Case(
                f"layer {il}",
                settings,
                LOW,
                {"layer": il},
                decider=partial(one_layer, layer=layer, tier=1),
            )
            for layer, il in enumerate(on.layer_ids)
        ]

    def show(self, found: Scores, on: Subject) -> Findings:
        title = (
            f"Quality with one layer's experts in {on.low} and all others in {on.best} (Figure 5 "
            f"of DyMoE)"
        )
        layer = Column("layer", "layer")
        table = found.table(title, (layer,), found.of(LOW), found.one(HIGH), on.best)
        changes = [row["change"] for row in table.rows]
        panel = Panel(
            f"layer whose experts are in {on.low}",
            f"change of perplexity, relative to the model with all experts in {on.best}, %",
            [Line("", range(len(changes)), changes)],
            on.basis,
            percent=True,
            bars=True,
            ticks=on.layer_ids,
        )
        return Findings([table], [panel])


AHEAD, OFTEN = "next layer's router", "most used"
# The metrics of each layer except the first, with their labels. The cosines come first.
WAYS = {
    OUTPUT: "hidden states after the layers",
    FFN_INPUT: "hidden states before the experts",
    AHEAD: "prediction: the layer's router, applied to the router input of the layer before",
    OFTEN: "prediction: the layer's most used experts, for every token",
}


class Similarity(Study):
    """Study for Figure 6 of DyMoE: similarity of the hidden states of neighboring layers.

    It also measures how well the experts of a layer are predicted from the layer before (eq. 6).
    """

    def measure(self, on: Subject) -> Findings:
        """Measure how similar the hidden states of neighboring layers are.

        Also measures how well a layer's experts can be predicted: the layer's router is applied to
        the hidden state of the layer before. The result is the fraction of the used experts that
        are predicted.

        `on` is the model and the text, which is read once. Returns tables and plots.
        """
        found, chance = _measured(on), on.n_expert_used / on.n_expert
        pairs = list(zip(on.layer_ids, on.layer_ids[1:], strict=False))

        def known(at: int, *names: str) -> Row:
            return {name: found[name][at] for name in names if name in found}

        similar: list[Row] = [
            {"layers": f"{before}-{il}", **known(at, OUTPUT, FFN_INPUT)}
            for at, (before, il) in enumerate(pairs)
        ]
        ahead: list[Row] = [
            {"layer": il, "random": chance, **known(at, AHEAD, OFTEN)}
            for at, (_, il) in enumerate(pairs)
        ]
        overall = {
            name: [float(np.mean([value for value, _ in found[name]])), None]
            for name in (AHEAD, OFTEN)
            if name in found
        }
        tables = [
            Table(
                f"Similarity of the hidden states of neighbouring layers (Figure 6 of DyMoE): "
                f"{on.basis}",
                (
                    Column("layers", "layers"),
                    Column("cosine after the layer (l_out)", OUTPUT, with_error),
                    Column("cosine before the experts (ffn_inp)", FFN_INPUT, with_error),
                ),
                similar,
            ),
            Table(
                f"How well a layer's experts are predicted from the layer before (eq. 6 of DyMoE): "
                f"{on.basis}",
                (
                    Column("layer", "layer"),
                    Column("recall by the router", AHEAD, share_with_error),
                    Column("recall, most used", OFTEN, share_with_error),
                    Column("recall, random", lambda row: [row["random"], None], share_with_error),
                ),
                ahead,
                [
                    "Recall: share of the used experts that are predicted.",
                    "Recall by the router: a layer's experts are predicted with the layer's own "
                    "router, applied to the router input of the layer before.",
                    "Recall, most used: for every token, the experts that the text uses most in "
                    "the layer are predicted.",
                    "Recall, random: random experts are predicted.",
                ],
                [{"layer": "mean", "random": chance, **overall}],
            ),
        ]
        left, right = (
            [Line(WAYS[name], on.layer_ids[1:], found[name]) for name in names if name in found]
            for names in ((OUTPUT, FFN_INPUT), (AHEAD, OFTEN))
        )
        return Findings(
            tables,
            [
                Panel(
                    "layer",
                    "cosine similarity of a layer's hidden states to those of the layer before",
                    left,
                    on.basis,
                    ends=(0, 1.02),
                ),
                Panel(
                    "layer",
                    "share of the used experts that are predicted, %",
                    right,
                    levels={"random": chance},
                    percent=True,
                    ends=(0, 102),
                ),
            ],
        )


def _measured(on: Subject) -> dict[str, list[list[float | None]]]:
    """Return the mean of each metric, for each layer except the first.

    Metrics whose tensors the model lacks are left out.
    """
    layer_ids, k = on.layer_ids, on.n_expert_used
    routers = routers_of(on)
    values: dict[tuple[str, int], list[np.ndarray]] = defaultdict(list)
    actual: dict[int, list[np.ndarray]] = defaultdict(list)
    for _, found in read_windows(on, on.windows):
        for layer, il in enumerate(layer_ids[1:], 1):
            before, router = layer_ids[layer - 1], routers[layer]
            actual[layer].append(top(found[ROUTER_LOGITS, il], k))
            for name in (OUTPUT, FFN_INPUT):
                if (name, before) in found and (name, il) in found:
                    values[name, layer].append(cosine(found[name, before], found[name, il]))
            if router is not None:
                # A model's selection biases and expert groups are ignored.
                predicted = top(found[ROUTER_INPUT, before] @ router.T, k)
                values[AHEAD, layer].append(recall(predicted, actual[layer][-1]))
    for layer, used in actual.items():
        every = np.concatenate(used)
        often = top(np.bincount(every.ravel(), minlength=on.n_expert)[None].astype(float), k)
        values[OFTEN, layer].append(recall(np.repeat(often, len(every), 0), every))
    return {
        name: [
            pair(arithmetic.mean(np.concatenate(values[name, layer]))) for layer in sorted(actual)
        ]
        for name in WAYS
        if all((name, layer) in values for layer in actual)
    }
