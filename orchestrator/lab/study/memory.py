"""Table 4's form of DynaExq: uniform types, and DynaExq in several budgets, over the mixed text and
over each domain alone; the policy adapts while it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.experts import ExpertModel
from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import Estimate, pair
from orchestrator.lab.eval.compare import Reference, ReferencePart
from orchestrator.lab.eval.report import share_with_error
from orchestrator.lab.eval.text import Window
from orchestrator.lab.study import plot
from orchestrator.lab.study.figures import (
    LABEL,
    distances,
    quality,
    quality_of,
)
from orchestrator.lab.study.residency import (
    SEEDS,
    Residency,
    has_prompts,
    high_share,
    update_steps,
)
from orchestrator.lab.study.study import Study
from orchestrator.lab.study.subject import Score, Subject
from orchestrator.lab.study.uniform import UniformFile
from orchestrator.lab.table import Column, Row, Table, fixed, percent
from orchestrator.memory.footprint import model_shape
from orchestrator.policy.dynaexq import HIGH, LOW

HELD = (0.25, 0.5, 0.75)  # shares of the experts that a budget holds high
GOAL = 1.3
STARTS = EMPTY, STARTED, FIXED, NULL = (
    "cold start",
    "started with the first half's hotness",
    "the same, never adapting",
    "random hot set, never adapting",
)
PLACINGS = PLACED, PLACED_EMPTY = "context, with the first half's hotness", "context, cold start"
NEVER = {"update_steps": 0}
MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Workload:
    """A text to read in one go: places int [m], where its tokens stand among all that are scored;
    hotness: of its first half."""

    name: str
    subject: Subject
    places: np.ndarray
    hotness: np.ndarray


@dataclass(frozen=True, slots=True)
class Ends:
    """All experts in the best tier, in high and in low, over a workload's tokens; and in each of
    the uniform types to compare with."""

    best: Score
    high: Score
    low: Score
    others: list[tuple[UniformFile, Score]]

    def part(self, places: np.ndarray) -> Ends:
        def cut(score: Score) -> Score:
            return replace(score, text=score.text.part(places))

        others = [(file, cut(score)) for file, score in self.others]
        return Ends(cut(self.best), cut(self.high), cut(self.low), others)

    def won_back(self, row: Score) -> tuple[Estimate, Estimate]:
        """(mean log-likelihood, KL from the best tier): the share of the way from low to high."""
        scores = (self.low, row, self.high)
        low, mine, high = (each.text.nll for each in scores)
        found = arithmetic.share(low - mine, low - high)
        low, mine, high = (distances(each) for each in scores)
        return found, arithmetic.share(low - mine, low - high)


@dataclass(slots=True)
class Budgets:
    """What a workload came to. won: (log-likelihood, KL) of each budget, by how it started."""

    work: Workload
    rows: list[Row] = field(default_factory=list)
    won: dict[str, list[tuple[Estimate, Estimate]]] = field(default_factory=dict)


@dataclass(slots=True)
class SameMemory:
    """What came of all workloads. held: shares of the experts that each budget holds high."""

    subject: Subject
    n_hot_tokens: int
    held: list[float]
    budgets: list[Budgets]


class HotMemory(Study[SameMemory]):
    """What a hot set wins back in the same memory."""

    name = "memory"
    rivals = True
    policies = ("dynaexq", "context")

    def n_passes(self, on: Subject) -> int:
        """Those of a domain are shorter than those of all of the text."""
        residency, _ = Residency.of_second_half(on)
        n_domains = len({window.domain for window in residency.subject.windows})
        n_works = 1 + n_domains if n_domains > 1 else 1
        ways = len(STARTS) + len(PLACINGS) * has_prompts(residency.subject)
        started = n_works * ways * len(_high_counts(residency))
        return n_domains + 1 + 3 + on.uniform_types.n_files + started

    def measure(self, on: Subject) -> SameMemory:
        residency, first = Residency.of_second_half(on)
        scored = residency.subject
        works = _workloads(scored, residency, first)
        counts = _high_counts(residency)
        held = [n_high / residency.n_expert for n_high in counts]
        found = SameMemory(on, on.on(first).n_tokens, held, [])
        with scored.reference() as reference:
            best, high, low = (
                scored.score(tier, scored.uniform(tier), against=reference)
                for tier in (scored.tiers[0], scored.high, scored.low)
            )
            ends = Ends(best, high, low, list(scored.uniform_files(reference)))
            for work in works:
                found.budgets.append(_measure(residency, work, ends.part(work.places), reference))
        return found

    def tables(self, found: SameMemory) -> list[Table]:
        subject = found.subject
        columns = (
            LABEL,
            Column("memory", "memory", percent(1, " %")),
            Column("experts high", "high", percent(0, " %")),
            Column("routed to high", "routed_high", percent(1, " %")),
            *quality(subject.tiers[0], subject.high),
            *_won_columns(", KL", "won_back_kl", "ratio_kl"),
            *_won_columns("", "won_back", "ratio"),
            Column("promoted", "promoted"),
        )
        tables = [
            Table(
                f"The same memory, {each.work.name} (Table 4): {each.work.subject.basis}",
                columns,
                each.rows,
            )
            for each in found.budgets
        ]
        tables[-1].footnotes.append(
            f"Each text is read token by token in one go, the hot sets updated every "
            f"{update_steps(subject)} steps. {STARTED[0].upper()}{STARTED[1:]}: what "
            f"{found.n_hot_tokens} other tokens of the same text were routed to, those of the "
            f"domain where it is one. won back: share of the gap from all {subject.low} to all "
            f"{subject.high}, in mean log-likelihood (log perplexity) and in KL from "
            f"{subject.tiers[0]} (nats); ratio: won back / experts high. A uniform type takes the "
            f"bytes of its file, and two tiers take slots, of whole pages. Swaps take time, so "
            f"rows that adapt differ a little from run to run. Rows of context are there where "
            f"the text has prompts (--prompt-tokens): it places its experts behind each."
        )
        return tables

    def draw(self, found: SameMemory, folder: Path) -> list[Path]:
        n = len(found.budgets)
        with plot.figure(folder, self.name, 2 * n, rows=2) as axes:
            for number, each in enumerate(found.budgets):
                _draw_panels(found, each, (axes[number], axes[n + number]))
        return plot.files(folder, self.name)


def _won_columns(of: str, won: str, ratio: str) -> tuple[Column, Column]:
    """What was won back, and that by the share of experts that are high; "?" where nothing was
    there to be won."""

    def known(row: Row) -> Any:
        if row[won] is None:
            return None
        return "?" if row[ratio] is None else fixed(2)(row[ratio])

    return Column(f"won back{of}", won, share_with_error), Column(f"ratio{of}", known)


def _high_counts(residency: Residency) -> list[int]:
    """Experts of a layer that each budget holds high."""
    return sorted({max(1, round(share * residency.n_expert)) for share in HELD})


def _workloads(scored: Subject, residency: Residency, first: Sequence[Window]) -> list[Workload]:
    """The mixed text, and each domain where there are several."""
    names = list(dict.fromkeys(window.domain for window in scored.windows))
    domains = np.repeat(
        [names.index(window.domain) for window in scored.windows],
        [window.n_scored for window in scored.windows],
    )
    parts = [[window for window in first if window.domain == name] for name in names]
    found = [residency.hotness(part) for part in parts]
    sizes = [sum(len(window.tokens) for window in part) for part in parts]
    everything = np.average(found, axis=0, weights=sizes)
    works = [Workload(MIXED if names[1:] else "text", scored, np.arange(len(domains)), everything)]
    if names[1:]:
        for index, name in enumerate(names):
            windows = [window for window in scored.windows if window.domain == name]
            places = np.flatnonzero(domains == index)
            works.append(Workload(name or "no domain", scored.on(windows), places, found[index]))
    return works


def _starts(
    residency: Residency, work: Workload
) -> Iterator[tuple[str, np.ndarray | None, dict[str, Any]]]:
    """(name, hotness that the hot sets start with, settings)."""
    yield EMPTY, None, {}
    yield STARTED, work.hotness, {}
    yield FIXED, work.hotness, NEVER
    yield NULL, residency.random(SEEDS[0]), NEVER


def _measure(residency: Residency, work: Workload, ends: Ends, reference: Reference) -> Budgets:
    subject, whole = work.subject, residency.uniform_bytes(HIGH)
    found = Budgets(work)
    for label, n_bytes, held, score in (
        (subject.tiers[0], _best_bytes(subject), None, ends.best),
        (subject.high, whole, 1.0, ends.high),
        (subject.low, residency.uniform_bytes(LOW), 0.0, ends.low),
    ):
        found.rows.append(_row(label, n_bytes / whole, held, score, ends))
    for file, score in ends.others:
        found.rows.append(_row(f"all {file.label}", file.n_bytes / whole, None, score, ends))
    part = ReferencePart(reference, work.places)
    for start, hotness, settings in _starts(residency, work):
        won = found.won[start] = []
        for n_high in _high_counts(residency):
            label = f"dynaexq, {start}"
            with residency.open(n_high, hotness, **settings) as engine:
                score = subject.score_open(engine, f"{work.name}: {label}", against=part)
                promoted = engine.policy.report()["promotions"]
            share, held = residency.budget_bytes(n_high) / whole, n_high / residency.n_expert
            found.rows.append(_row(label, share, held, score, ends, promoted))
            won.append(ends.won_back(score))
    if has_prompts(subject):
        for label, hotness in zip(PLACINGS, (work.hotness, None), strict=True):
            won = found.won[label] = []
            for n_high in _high_counts(residency):
                with residency.placed(n_high, hotness) as engine:
                    score = subject.score_open(engine, f"{work.name}: {label}", against=part)
                    report = engine.policy.report()
                held = report["hot_per_layer"] / residency.n_expert
                share = residency.budget_bytes(n_high) / whole
                found.rows.append(_row(label, share, held, score, ends, report["moves"] // 2))
                won.append(ends.won_back(score))
    return found


def _best_bytes(subject: Subject) -> int:
    with ExpertModel.open(subject.config.model) as model:
        return model_shape(model, (0,)).all_slot_bytes()


def _row(
    label: str, memory: float, held: float | None, score: Score, ends: Ends, promoted: Any = None
) -> Row:
    """A configuration. memory: its bytes as a share of all experts in high; held: the share of
    experts that are high, None in another tier; promoted: experts, None where none ever is."""
    between = all(score is not each for each in (ends.best, ends.high, ends.low))
    won = [pair(each) for each in ends.won_back(score)] if between else [None, None]
    ratios = [
        None if each is None or each[0] is None or not held else each[0] / held for each in won
    ]
    return {
        "configuration": label,
        "memory": memory,
        "high": held,
        "routed_high": high_share(score) if promoted is not None else held,
        **quality_of(score, ends.high),
        "won_back": won[0],
        "won_back_kl": won[1],
        "ratio": ratios[0],
        "ratio_kl": ratios[1],
        "promoted": promoted,
    }


def _draw_panels(found: SameMemory, budgets: Budgets, panels: Sequence[Any]) -> None:
    """What was won back of a workload, in log perplexity and in KL."""
    subject, work = found.subject, budgets.work
    x = [100 * held for held in found.held]
    for number, (start, won) in enumerate(budgets.won.items()):
        for axis, estimates in zip(panels, zip(*won, strict=True), strict=True):
            plot.percent_line(axis, x, estimates, start, number, dashed=start in (FIXED, NULL))
    for axis, what in zip(panels, ("log perplexity", f"KL from {subject.tiers[0]}"), strict=True):
        axis.plot([0, 100], [0, 100], color="#666666", linestyle=":", label="as many as are high")
        end = 100 / GOAL
        axis.plot([0, end], [0, 100], color="#222222", linestyle=":", label=f"{GOAL:g} times that")
        axis.set_title(f"{work.name}, {work.subject.n_tokens} tokens: {what}", fontsize=9)
        axis.set_xlabel(f"experts in {subject.high}, %")
        axis.set_ylabel(f"won back from {subject.low} to {subject.high}, %")
        axis.legend(fontsize=7)
