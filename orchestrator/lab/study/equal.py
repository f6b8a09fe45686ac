"""What the same memory buys: uniform types that fit whole, two tiers that fit whole, and tiers that
are read while decoding. This answers why not to take a smaller quantization that fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.units import format_size
from orchestrator.allocation.slots import ModelShape
from orchestrator.engine.engine import Engine
from orchestrator.errors import BudgetError
from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import pair
from orchestrator.lab.eval.compare import Reference
from orchestrator.lab.eval.report import with_error
from orchestrator.lab.study import plot
from orchestrator.lab.study.figures import (
    COMPUTED_LOW,
    LABEL,
    SIZE,
    distances,
    quality,
    quality_of,
    size_of,
)
from orchestrator.lab.study.residency import Residency, has_prompts
from orchestrator.lab.study.study import Study
from orchestrator.lab.study.subject import SKIP, Score, Subject
from orchestrator.lab.study.uniform import UniformFile, tiers_of
from orchestrator.lab.table import Column, Row, Table
from orchestrator.memory.footprint import model_shape
from orchestrator.policy.base import TierOffer
from orchestrator.policy.mixed import Mixed

HELD = (0.0, 0.25, 0.5, 0.75)  # shares of the experts that a memory holds high, and one more
RETENTION = 0.75


@dataclass(frozen=True, slots=True)
class Memory:
    """One size of memory. n_bytes: of all slots; mix: two tiers that fit whole; fits: uniform types
    that do; placed: by name, mixed, and context where the text has prompts; streamed: by name, what
    reads the rest while it decodes."""

    n_bytes: int
    n_high: int
    mix: Score
    fits: list[tuple[UniformFile, Score]]
    placed: dict[str, Score]
    streamed: dict[str, Score]


@dataclass(slots=True)
class Compared:
    """What came of all. uniform: every type, the smallest first."""

    scored: Subject
    n_expert: int
    n_hot_tokens: int
    base: Score
    uniform: list[tuple[UniformFile, Score]]
    memories: list[Memory]


class EqualMemory(Study[Compared]):
    """The same memory for uniform types and for mixes."""

    name = "equal"
    rivals = True
    policies = ("dynaexq", "context", "mixed")

    def n_passes(self, on: Subject) -> int:
        residency, _ = Residency.of_second_half(on)
        streamed = len(_streaming(residency.subject))
        placed = 2 * has_prompts(residency.subject)
        counts = _high_counts(residency)
        mixes = len(counts) * (1 + placed + streamed)
        mixes += sum(_fits_mixed(residency, n_high) for n_high in counts)
        return 2 + len(on.tiers) + on.uniform_types.n_files + mixes

    def measure(self, on: Subject) -> Compared:
        residency, first = Residency.of_second_half(on)
        scored, hotness = residency.subject, residency.hotness(first)
        sizes = tiers_of(on.config)
        with scored.reference() as reference:
            uniform = [
                (sizes[tier], scored.score(tier, scored.uniform(tier), against=reference))
                for tier in scored.tiers
            ]
            base = uniform[scored.tiers.index(scored.high)][1]
            uniform += scored.uniform_files(reference)
            uniform.sort(key=lambda each: (each[0].n_bytes, each[0].label))
            found = Compared(scored, residency.n_expert, on.on(first).n_tokens, base, uniform, [])
            for n_high in _high_counts(residency):
                n_bytes = residency.budget_bytes(n_high)
                with residency.open(n_high, hotness) as engine:
                    label = f"dynaexq, {format_size(n_bytes)}"
                    mix = scored.score_open(engine, label, against=reference)
                fits = [each for each in uniform if each[0].n_bytes <= n_bytes]
                placed = dict(_place(residency, n_high, hotness, reference))
                streamed = dict(_stream(scored, n_bytes, reference))
                found.memories.append(Memory(n_bytes, n_high, mix, fits, placed, streamed))
        return found

    def tables(self, found: Compared) -> list[Table]:
        scored = found.scored
        best = scored.tiers[0]
        figures = quality(best, scored.high)
        columns = (
            LABEL,
            COMPUTED_LOW,
            *figures,
            Column("KL above dynaexq's", "above", lambda each: with_error(each, digits=4)),
            Column("read", "read", format_size, "a token"),
        )
        tables = [
            Table(
                f"All uniform types: {scored.basis}",
                (LABEL, *SIZE, *figures),
                [
                    {"configuration": file.label, **size_of(file), **quality_of(score, found.base)}
                    for file, score in found.uniform
                ],
            )
        ]
        tables += [
            Table(
                f"Experts in {format_size(each.n_bytes)}: {scored.basis}",
                columns,
                list(_rows(found, each)),
            )
            for each in found.memories
        ]
        tables[-1].footnotes.append(
            f"uniform: of the types of a method that fit whole, the one with the least KL. "
            f"dynaexq: every expert in memory, in {scored.high} or {scored.low}, started with "
            f"what {found.n_hot_tokens} other tokens of the same text were routed to. context, "
            f"where the text has prompts: the same, placed behind each prompt. mixed: every "
            f"expert in memory in one of all tiers, by the same hotness and by losses. dymoe and "
            f"lru keep in this memory what fits and read the rest; where a high copy is in "
            f"memory, it is used. low or skipped: of the experts, as computed. KL above "
            f"dynaexq's: paired; below 0 is better. read: bytes for each token, what filled the "
            f"memory at first included. A uniform type takes the bytes of its file, and a mix "
            f"takes slots, of whole pages."
        )
        return tables

    def draw(self, found: Compared, folder: Path) -> list[Path]:
        best, mib = found.scored.tiers[0], 1 << 20
        lines: dict[str, list[tuple[int, Score]]] = {}
        for file, score in found.uniform:
            lines.setdefault(f"uniform, {file.method}", []).append((file.n_bytes, score))
        lines["dynaexq"] = [(each.n_bytes, each.mix) for each in found.memories]
        for each in found.memories:
            for name, score in each.placed.items():
                lines.setdefault(name, []).append((each.n_bytes, score))
        for name in found.memories[0].streamed:
            lines[f"{name}, reads"] = [
                (each.n_bytes, each.streamed[name]) for each in found.memories
            ]
        with plot.figure(folder, self.name) as (axis,):
            for number, (label, points) in enumerate(lines.items()):
                estimates = [arithmetic.mean(distances(score)) for _, score in points]
                plot.line(
                    axis,
                    [n_bytes / mib for n_bytes, _ in points],
                    [each.value for each in estimates],
                    label,
                    number,
                    [each.error for each in estimates],
                    dashed=label.endswith("reads"),
                )
            axis.set_xlabel("memory of the experts, MiB")
            axis.set_ylabel(f"KL from {best}, nats")
            axis.set_yscale("log")
            axis.set_title(found.scored.basis, fontsize=9)
            axis.legend(fontsize=7)
        return plot.files(folder, self.name)


def _high_counts(residency: Residency) -> list[int]:
    """Experts of a layer that each memory holds high; at last as many as fit in what all of them
    high would take, beside the spare slots of swaps."""
    n = residency.n_expert
    whole = residency.uniform_bytes(0)
    most = max((high for high in range(n) if residency.budget_bytes(high) <= whole), default=n)
    return sorted({*(round(share * n) for share in HELD), most})


def _fits_mixed(residency: Residency, n_high: int) -> bool:
    """Whether mixed has room in the memory of n_high high experts."""
    config, budget = residency.subject.config, residency.budget_bytes(n_high)
    with ExpertModel.open(config.model, config.low) as model:
        names = [tier.name for tier in model.tiers]

        def shape(tiers: tuple[int, ...]) -> ModelShape:
            return model_shape(model, tiers)

        high = Mixed.precisions.high(TierOffer(names, shape, budget))
        try:
            Mixed(shape(tuple(range(high, len(names))))).plan(budget)
        except BudgetError:
            return False
    return True


def _place(
    residency: Residency, n_high: int, hotness: np.ndarray, reference: Reference
) -> Iterator[tuple[str, Score]]:
    """(name, score) of what has every expert in memory, in that of n_high high experts: mixed, by
    the same hotness; context in the same two tiers, and in all tiers of the file, as many experts
    in the best one as fit beside the others' near_bits."""
    subject = residency.subject
    n_bytes = format_size(residency.budget_bytes(n_high))
    every = {"high_tier": subject.tiers[0], "low_tier": None, "hot_experts": None}
    ways: dict[str, AbstractContextManager[Engine]] = {
        "mixed, all tiers": residency.open(
            n_high, hotness, **{**every, "high_tier": None}, policy="mixed"
        ),
    }
    if has_prompts(subject):
        pair_of_tiers = f"context, {subject.high} / {subject.low}"
        ways[pair_of_tiers] = residency.placed(n_high, hotness)
        ways["context, all tiers"] = residency.open(n_high, hotness, **every, policy="context")
    for name, way in ways.items():
        try:
            with way as engine:
                score = subject.score_open(engine, f"{name}, {n_bytes}", against=reference)
        except BudgetError:
            continue  # not even the least of it
        yield name, score


def _stream(subject: Subject, n_bytes: int, reference: Reference) -> Iterator[tuple[str, Score]]:
    """(name, score) of what reads while it decodes. It computes as in a chat: a low request may
    use a high copy in memory."""
    for name, each in _streaming(subject).items():
        own = {**each, "ram": None, "expert_ram": n_bytes, "exact_tiers": False}
        yield name, subject.score(f"{name}, {format_size(n_bytes)}", own, against=reference)


def _streaming(subject: Subject) -> dict[str, dict[str, Any]]:
    """Settings of what reads while it decodes, by name."""
    return {
        f"lru, {subject.high}": subject.uniform(subject.high),
        **{
            f"dymoe, {subject.high} / {low}, r = {RETENTION:g}": subject.mixed(low, RETENTION)
            for low in (subject.low, SKIP)
        },
    }


def _rows(found: Compared, memory: Memory) -> Iterator[Row]:
    """The figures of one memory."""
    by_method: dict[str, list[tuple[UniformFile, Score]]] = {}
    for file, score in memory.fits:
        by_method.setdefault(file.method, []).append((file, score))
    for several in by_method.values():
        file, score = min(several, key=lambda each: float(distances(each[1]).mean()))
        yield _row(found, memory, f"uniform {file.label}", score)
    high = f"{memory.n_high} of {found.n_expert} high"
    yield _row(found, memory, f"dynaexq, {high}", memory.mix, mixed=True)
    for name, score in memory.placed.items():
        yield _row(found, memory, name, score, mixed=True)
    for name, score in memory.streamed.items():
        yield _row(found, memory, name, score, mixed=True, reads=True)


def _row(
    found: Compared,
    memory: Memory,
    label: str,
    score: Score,
    mixed: bool = False,
    reads: bool = False,
) -> Row:
    above: np.ndarray = distances(score) - distances(memory.mix)
    usage = score.usage.as_dict() if score.usage is not None else {}
    return {
        "configuration": label,
        "usage": usage if mixed else None,
        **quality_of(score, found.base),
        "above": None if score is memory.mix else pair(arithmetic.mean(above)),
        "read": usage["bytes_read"] / found.scored.n_tokens if reads else None,
    }
