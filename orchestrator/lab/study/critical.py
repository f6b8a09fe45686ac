"""Figure 3 of DyMoE: which experts are critical, chosen by importance or at random, with the
cosine schedule and with the same ratio in every layer; for decode steps and for prompts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.lab.study import plot
from orchestrator.lab.study.figures import DONE, LABEL, quality, row_of
from orchestrator.lab.study.policies import RandomCritical
from orchestrator.lab.study.study import Configuration, ScoredStudy, Scores
from orchestrator.lab.study.subject import SKIP, Score, Subject
from orchestrator.lab.table import Table

SEEDS = (1, 2, 3)
RATIOS = (0.6, 0.75, 0.9)
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
    """What makes an expert critical."""

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
                    for ratio in RATIOS
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
