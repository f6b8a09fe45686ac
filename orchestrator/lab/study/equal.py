"""What the same memory buys: uniform types that fit whole, and two tiers that fit whole. This
answers why not to take a smaller quantization that fits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from gguf_tools.units import format_size
from orchestrator.lab.plotting import Panel
from orchestrator.lab.study.dynaexq import Residency
from orchestrator.lab.study.study import (
    LABEL,
    SIZE,
    Case,
    Findings,
    HalvedStudy,
    Scored,
    Scores,
    above,
    four_digits,
    lines,
    uniform_cases,
)
from orchestrator.lab.study.subject import Subject, halves
from orchestrator.lab.table import Column

HELD = (0.0, 0.25, 0.5, 0.75)  # shares of the experts that a memory holds high, and one more
MIX = "dynaexq"


class EqualMemory(HalvedStudy):
    """The same memory for uniform types and for mixes."""

    name = "equal"
    rivals = True
    policies = ("dynaexq",)

    def cases(self, on: Subject) -> list[Case]:
        residency, listed = Residency(on), uniform_cases(on, on.tiers)
        hotness = cache(partial(on.uses, halves(on.windows)[0], on.high))
        for n_high in _high_counts(residency):
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


def _high_counts(residency: Residency) -> list[int]:
    """Experts of a layer that each memory holds high; at last as many as fit in what all of them
    high would take, beside the spare slots of swaps."""
    n, whole = residency.shape.n_expert, residency.uniform_bytes(0)
    most = max((high for high in range(n) if residency.budget_bytes(high) <= whole), default=n)
    return sorted({*(round(share * n) for share in HELD), most})


def _best_that_fit(alone: list[Scored], n_bytes: int) -> list[Scored]:
    """The types of each method that fit whole, the one with the least KL."""
    by_method: dict[str, Scored] = {}
    for case, score in alone:
        method = case.row["method"]
        if case.row["bytes"] <= n_bytes and (
            method not in by_method or score.mean_kl.value < by_method[method][1].mean_kl.value
        ):
            by_method[method] = (replace(case, label=f"uniform {case.label}"), score)
    return list(by_method.values())
