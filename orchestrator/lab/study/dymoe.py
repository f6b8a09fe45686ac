"""Tables 1 and 2 and Figures 3, 5 and 11 of DyMoE: what its choices lose."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.lab.eval.arithmetic import Estimate
from orchestrator.lab.eval.compare import Reference
from orchestrator.lab.plotting import COLOURS
from orchestrator.lab.study import plot
from orchestrator.lab.study.figures import (
    ANSWERS,
    DONE,
    LABEL,
    SIZE,
    answers_of,
    quality,
    quality_of,
    row_of,
    size_of,
)
from orchestrator.lab.study.policies import OneLayer, RandomCritical
from orchestrator.lab.study.study import Configuration, ScoredStudy, Scores
from orchestrator.lab.study.subject import SKIP, Score, Subject
from orchestrator.lab.study.uniform import tiers_of
from orchestrator.lab.table import Column, Row, Table

UNIFORM, MIXED = "uniform", "mixed"
RATIOS = (0.75, 0.9, 1.0)


class Accuracy(ScoredStudy):
    """Tables 1 and 2: each tier and uniform type alone, then high/skip and high/low at three
    ratios."""

    name = "accuracy"
    asks = True
    rivals = True

    def cases(self, subject: Subject) -> list[Configuration]:
        return [
            *(
                Configuration(tier, subject.uniform(tier), group=UNIFORM)
                for tier in reversed(subject.tiers)
            ),
            *(
                Configuration(f"{subject.high} / {low}", subject.mixed(low, r), r, MIXED)
                for low in (SKIP, subject.low)
                for r in RATIOS
            ),
        ]

    def others(self, on: Subject, reference: Reference) -> Iterator[tuple[Configuration, Score]]:
        for each, score in on.uniform_files(reference, ask=True):
            yield Configuration(each.label, {}, group=UNIFORM, file=each), score

    def tables(self, found: Scores) -> list[Table]:
        subject = found.subject
        figures = (
            *quality(subject.tiers[0], subject.high),
            *(ANSWERS if subject.questions else ()),
        )
        note = (
            f"KL (nats) and same top token: against {subject.tiers[0]}. Every token is decided on "
            f"its own, every expert computed in the tier that was decided."
        )
        return [
            Table(
                f"Uniform precision (Table 1): {subject.basis}",
                (LABEL, *SIZE, *figures),
                _uniform(found),
            ),
            Table(
                f"High / low and skip (Table 2): {subject.basis}",
                (LABEL, *DONE, *figures),
                _rows(found, MIXED),
                [note],
            ),
        ]

    def draw(self, found: Scores, folder: Path) -> list[Path]:
        subject = found.subject
        uniform, mixed = _uniform(found), _rows(found, MIXED)
        rows = [*uniform, *mixed]
        labels = [
            row["configuration"] + (f"\nr = {row['retention']:g}" if row["retention"] else "")
            for row in rows
        ]
        with plot.figure(folder, self.name) as (axis,):
            places = range(len(rows))
            axis.bar(
                places,
                [row["kl"][0] for row in rows],
                yerr=[row["kl"][1] for row in rows],
                capsize=3,
                color=[COLOURS[0]] * len(uniform) + [COLOURS[1]] * len(mixed),
            )
            axis.set_xticks(places, labels, rotation=60, ha="right", fontsize=8)
            axis.set_ylabel(f"KL from {subject.tiers[0]}, nats")
            axis.set_title(subject.basis, fontsize=9)
        return plot.files(folder, self.name)


def _uniform(found: Scores) -> list[Row]:
    """The types that stand alone, with their size, the smallest first."""
    sizes = tiers_of(found.subject.config)
    files = [each.file or sizes[each.label] for each, _ in found.of(UNIFORM)]
    rows = [row | size_of(file) for row, file in zip(_rows(found, UNIFORM), files, strict=True)]
    return sorted(rows, key=lambda row: (row["bytes"], row["configuration"]))


def _rows(found: Scores, group: str) -> list[Row]:
    high = found.subject.high
    base = next(score for each, score in found.of(UNIFORM) if each.label == high)
    return [row_of(each, score, base, **answers_of(score)) for each, score in found.of(group)]


HIGH, LOW, MIXED = "high", "low", "mixed"
SWEEP = (0.6, 0.7, 0.75, 0.8, 0.9, 1.0)


class Retention(ScoredStudy):
    """Figure 11: quality over the retention ratio, from few critical experts to all of them."""

    name = "retention"
    asks = True

    def cases(self, subject: Subject) -> list[Configuration]:
        return [
            Configuration(subject.high, subject.uniform(subject.high), group=HIGH),
            Configuration(subject.low, subject.uniform(subject.low), group=LOW),
            *(
                Configuration(f"{subject.high} / {low}", subject.mixed(low, r), r, MIXED)
                for low in (SKIP, subject.low)
                for r in SWEEP
            ),
        ]

    def tables(self, found: Scores) -> list[Table]:
        subject, base = found.subject, found.one(HIGH)
        columns = (
            LABEL,
            *DONE,
            *quality(subject.tiers[0], subject.high),
            *(ANSWERS if subject.questions else ()),
        )
        rows = [row_of(each, score, base, **answers_of(score)) for each, score in found.scored]
        title = f"Quality over the retention ratio (Figure 11): {subject.basis}"
        return [Table(title, columns, rows)]

    def draw(self, found: Scores, folder: Path) -> list[Path]:
        subject, base, least = found.subject, found.one(HIGH), found.one(LOW)
        with plot.figure(folder, self.name, 2 if subject.questions else 1) as axes:
            for number, (label, pairs) in enumerate(found.lines(MIXED)):
                x = [score.realised or 0.0 for _, score in pairs]
                changes = [score.against(base) for _, score in pairs]
                plot.percent_line(axes[0], x, changes, label, number)
                if subject.questions:
                    plot.percent_line(axes[1], x, [_acc(s) for _, s in pairs], label, number)
            plot.level(axes[0], 0.0, f"all {subject.high}")
            plot.level(axes[0], 100 * least.against(base).value, f"all {subject.low}")
            axes[0].set_ylabel(f"perplexity against {subject.high}, %")
            if subject.questions:
                plot.level(axes[1], 100 * _acc(base).value, f"all {subject.high}")
                plot.level(axes[1], 100 * _acc(least).value, f"all {subject.low}")
                axes[1].set_ylabel("multiple choice, acc, %")
            for axis in axes:
                axis.set_xlabel("realised share of critical experts")
                axis.legend()
            axes[0].set_title(subject.basis, fontsize=9)
        return plot.files(folder, self.name)


def _acc(score: Score) -> Estimate:
    return score.choices.acc if score.choices is not None else Estimate(0.0, 0.0)


SEEDS = (1, 2, 3)
CRITICAL_SHARES = (0.6, 0.75, 0.9)
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


def _panels(subject: Subject) -> list[tuple[str, bool]]:
    """(low tier, prefill) of each table and panel."""
    return [(low, prefill) for prefill in FORMS for low in (SKIP, subject.low)]


def _group(low: str, prefill: bool) -> str:
    return f"{FORMS[prefill]}, {low}"


def _base(prefill: bool) -> str:
    return f"{FORMS[prefill]}, all high"


class Critical(ScoredStudy):
    """Figure 3: which experts are critical, chosen by importance or at random, with the cosine
    schedule and with the same ratio in every layer; for decode steps and for prompts."""

    name = "critical"

    def cases(self, subject: Subject) -> list[Configuration]:
        high = subject.uniform(subject.high)
        listed = [
            Configuration(subject.high, high, group=_base(prefill), prefill=prefill)
            for prefill in FORMS
        ]
        for low, prefill in _panels(subject):
            for kind, importance, at_random in KINDS[prefill]:
                deciders = tuple(partial(RandomCritical, seed=seed) for seed in SEEDS)
                listed += [
                    Configuration(
                        f"{kind}, {name}",
                        subject.mixed(low, ratio, schedule=schedule, importance=importance),
                        ratio,
                        _group(low, prefill),
                        prefill,
                        deciders if at_random else (),
                    )
                    for schedule, name in SPREADS.items()
                    for ratio in CRITICAL_SHARES
                ]
        return listed

    def tables(self, found: Scores) -> list[Table]:
        subject, tables = found.subject, []
        for low, prefill in _panels(subject):
            base = found.one(_base(prefill))
            tables.append(
                Table(
                    f"Critical experts of {FORMS[prefill]}, {subject.high} / {low} (Figure 3): "
                    f"{subject.basis}",
                    (LABEL, *DONE, *quality(subject.tiers[0], subject.high)),
                    [row_of(each, score, base) for each, score in found.of(_group(low, prefill))],
                    [f"random: each token's figures are means of {len(SEEDS)} seeds."],
                )
            )
        return tables

    def draw(self, found: Scores, folder: Path) -> list[Path]:
        panels = _panels(found.subject)
        with plot.figure(folder, self.name, len(panels), rows=2) as axes:
            for axis, (low, prefill) in zip(axes, panels, strict=True):
                _draw_panel(found, low, prefill, axis)
        return plot.files(folder, self.name)


def _draw_panel(found: Scores, low: str, prefill: bool, axis: Any) -> None:
    subject, base = found.subject, found.one(_base(prefill))
    for number, (label, pairs) in enumerate(found.lines(_group(low, prefill))):
        x = [_high(score) for _, score in pairs]
        changes = [score.against(base) for _, score in pairs]
        dashed = label.endswith(SPREADS["flat"])
        plot.percent_line(axis, x, changes, label, number // len(SPREADS), dashed=dashed)
    axis.axhline(0.0, color="#666666", linestyle=":", linewidth=1.2)
    axis.set_title(f"{FORMS[prefill]}, {subject.high} / {low}", fontsize=9)
    axis.set_xlabel("share of routed experts in high")
    axis.set_ylabel(f"perplexity against {subject.high}, %")
    if low == SKIP:
        axis.set_yscale("symlog", linthresh=10)
        axis.set_ylim(bottom=-3)
    axis.legend(fontsize=7, loc="upper right")


def _high(score: Score) -> float:
    return (score.usage.high or 0.0) if score.usage else 0.0


BEST, LOWERED = "best", "lowered"


class Depth(ScoredStudy):
    """Figure 5: one layer at a time in the low tier, all others in the best one."""

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
