"""`moe-edge replay --near-data`: the strategies side by side, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from orchestrator.allocation.placement import PlacementSettings
from orchestrator.allocation.pools import shares
from orchestrator.errors import ConfigError
from orchestrator.lab.replay.near_data import strategies
from orchestrator.lab.replay.near_data.machine import SHAPES, Machine, Shape
from orchestrator.lab.replay.near_data.routing import (
    Generated,
    Routing,
    cosine,
    from_trace,
    generated,
)
from orchestrator.lab.replay.near_data.strategies import Decoded, Plan
from orchestrator.lab.replay.trace import Trace
from orchestrator.settings import Notation, Settings, setting

KEPT, CHANGED, UNCOUNTED = "kept", "changed", "none"
NEAR_ONLY, MONDE, STATIC, CONTEXT = "near-only", "monde", "static", "context"
GPU_LRU, HOBBIT = "gpu-lru", "hobbit"


def parse_lengths(text: str) -> tuple[tuple[int, int], ...]:
    """Pairs of a prompt's and an answer's tokens from "128:512,512:512". Raises ConfigError."""
    try:
        pairs = [tuple(int(part) for part in each.split(":")) for each in text.split(",")]
        if any(len(each) != 2 or min(each) < 1 for each in pairs):
            raise ValueError
    except ValueError:
        raise ConfigError(f"'{text}' is no list of lengths such as 128:512,512:512") from None
    return tuple((each[0], each[1]) for each in pairs)


_LENGTHS = Notation(
    parse_lengths, lambda pairs: ",".join(f"{prompt}:{answer}" for prompt, answer in pairs)
)


@dataclass(frozen=True)
class Workload(Settings):
    """What is run on the machine."""

    shape: str = setting(
        "mixtral-8x7b",
        f"The model's shape: {' or '.join(SHAPES)}.",
        choices=tuple(SHAPES),
    )
    hot: int | None = setting(
        None,
        "Hot experts of a layer, on the GPU.",
        within=(0, 65535),
        shown="as in the paper",
    )
    lengths: tuple[tuple[int, int], ...] = setting(
        ((128, 512), (512, 512), (512, 2048)),
        "Tokens of the prompt and of the answer that end-to-end times are for, as 128:512,512:512.",
        notation=_LENGTHS,
    )
    migrations: float | None = setting(
        None,
        "Experts that MoNDE moves to the GPU for a token, on average.",
        within=(0.0, 1e6),
        shown="what fits the paper's figures",
    )
    migration: str = setting(
        KEPT,
        "What a placement costs before the answer: kept (changed experts over the link, but those "
        "that the prompt has brought to the GPU stay for nothing), changed (all that change), or "
        "none (it is not counted).",
        choices=(KEPT, CHANGED, UNCOUNTED),
        hidden=True,
    )


@dataclass(frozen=True)
class NearData:
    """Everything that is asked of a replay on near-data memory."""

    machine: Machine = field(default_factory=Machine)
    workload: Workload = field(default_factory=Workload)
    generated: Generated = field(default_factory=Generated)
    placement: PlacementSettings = field(default_factory=PlacementSettings)

    @property
    def shape(self) -> Shape:
        return SHAPES[self.workload.shape]

    @property
    def n_hot(self) -> int:
        return self.shape.n_hot if self.workload.hot is None else self.workload.hot

    @property
    def migrations(self) -> float:
        """Of MoNDE, experts a token."""
        asked = self.workload.migrations
        return self.shape.migrations if asked is None else asked


@dataclass(slots=True)
class _Run:
    """A strategy over all sequences: each one's decoding, prompt and migration, in ms. prompts and
    moves are [n_sequences, n_lengths]."""

    decoded: list[Decoded]
    prompts: np.ndarray
    moves: np.ndarray

    def mean(self, name: str) -> float:
        return float(np.mean([getattr(each, name) for each in self.decoded]))


def replay_near_data(asked: NearData, trace: Trace | None) -> dict[str, Any]:
    """All strategies on one routing, of the trace or generated: plain types, fit for JSON. Raises
    ConfigError and TraceError."""
    shape, machine = asked.shape, asked.machine
    machine.check(shape, asked.n_hot)
    if trace is None:
        routing = generated(shape, asked.generated)
    else:
        routing = from_trace(shape, trace)
    runs = _runs(asked, routing)
    base = runs[MONDE].mean("step_ms")
    rows = {}
    for name, run in runs.items():
        step = run.mean("step_ms")
        near = run.mean("near_ms")
        rows[name] = {
            "step_ms": step,
            "tokens_per_s": 1e3 / step,
            "over_monde": base / step,
            "over_near_only": runs[NEAR_ONLY].mean("step_ms") / step,
            "near_ms": near,
            "near_gain": run.mean("full_ms") / near if near else None,
            "hot_mass": run.mean("hot_mass"),
            "lengths": _lengths(asked, run, runs[MONDE]),
        }
    return {
        "shape": shape.name,
        "routing": routing.source,
        "n_hot": asked.n_hot,
        "near_bits": asked.placement.near_bits,
        "migrations": asked.migrations,
        "prefill_decode_cosine": _alike(routing),
        "machine": asked.machine.as_dict(),
        "runs": rows,
        "placement": _worth(asked, routing),
    }


def _runs(asked: NearData, routing: Routing) -> dict[str, _Run]:
    shape, machine, n_hot = asked.shape, asked.machine, asked.n_hot
    near = strategies.near_only(shape)
    everywhere = range(len(routing.sequences))

    def run(plans: list[Plan], there: list[Plan]) -> _Run:
        decoded = [
            strategies.decode(machine, shape, plan, sequence)
            for plan, sequence in zip(plans, routing.sequences, strict=True)
        ]
        return _Run(decoded, *_before(asked, routing, plans, there))

    alone = [near for _ in everywhere]
    found = {NEAR_ONLY: run(alone, alone)}
    only = found[NEAR_ONLY]
    moved = asked.migrations * machine.link_ms(shape.expert_bytes())
    found[MONDE] = _Run(
        [replace(each, step_ms=each.step_ms + moved) for each in only.decoded],
        only.prompts,
        only.moves,
    )
    settings = asked.placement
    static = [
        strategies.placed(shape, strategies.static_scores(routing, at), n_hot, settings)
        for at in everywhere
    ]
    found[STATIC] = run(static, static)
    placed = [
        strategies.placed(shape, _scores(asked, routing, at), n_hot, settings) for at in everywhere
    ]
    started = strategies.placed(shape, shares(routing.usual), n_hot, settings)
    found[CONTEXT] = run(placed, [started, *placed[:-1]])
    for name, one in ((GPU_LRU, strategies.gpu_lru), (HOBBIT, strategies.hobbit)):
        nothing = np.zeros((1, len(asked.workload.lengths)))
        prompts = nothing + _streamed(asked, len(routing.sequences))
        found[name] = _Run([one(machine, shape, routing.sequences)], prompts, nothing)
    return found


def _scores(asked: NearData, routing: Routing, at: int) -> np.ndarray:
    return strategies.context_scores(routing, at, asked.placement, asked.shape.n_expert_used)


def _before(
    asked: NearData, routing: Routing, plans: list[Plan], there: list[Plan]
) -> tuple[np.ndarray, np.ndarray]:
    """What prompts take, and what their placements move before the answers, in ms: [n_sequences,
    n_lengths] both. plans: how each sequence is decoded; there: what its prompt finds on the GPU.
    """
    shape, machine, lengths = asked.shape, asked.machine, asked.workload.lengths
    prompts = np.zeros((len(plans), len(lengths)))
    moves = np.zeros_like(prompts)
    stream = machine.link_ms(shape.expert_bytes())
    for at, (plan, before, sequence) in enumerate(
        zip(plans, there, routing.sequences, strict=True)
    ):
        used = sequence.counts.sum(axis=1, keepdims=True)
        share = sequence.counts / np.where(used > 0, used, 1)
        for column, (n_prompt, _) in enumerate(lengths):
            brought = np.zeros_like(before.hot)
            for layer in range(shape.n_layers):
                tokens = share[layer] * n_prompt * shape.n_expert_used
                took, brought[layer] = machine.prefill_layer_ms(
                    shape, tokens, before.hot[layer], n_prompt
                )
                prompts[at, column] += took
            new = plan.hot & ~before.hot
            if asked.workload.migration == KEPT:
                new &= ~brought
            if asked.workload.migration != UNCOUNTED:
                moves[at, column] = new.sum() * stream
    return prompts, moves


def _streamed(asked: NearData, n_sequences: int) -> np.ndarray:
    """What prompts take on a GPU alone, [n_lengths] in ms: what its memory does not hold of the
    experts is copied once."""
    shape, machine = asked.shape, asked.machine
    n = shape.n_layers * shape.n_expert
    absent = max(0.0, n - machine.gpu_slots(shape))
    copied = absent * machine.link_ms(shape.expert_bytes())
    times = []
    for n_prompt, _ in asked.workload.lengths:
        each = n_prompt * shape.n_expert_used / shape.n_expert
        computed = n * machine.gpu_ms(shape, each)
        dense = shape.n_layers * machine.dense_ms(shape, n_prompt)
        times.append(dense + max(copied, computed))
    return np.array(times)


def _lengths(asked: NearData, run: _Run, base: _Run) -> list[dict[str, float]]:
    """End to end for each pair of lengths."""
    rows = []
    for column, (prompt, answer) in enumerate(asked.workload.lengths):
        prompt_ms, move_ms = run.prompts[:, column].mean(), run.moves[:, column].mean()
        total = prompt_ms + move_ms + answer * run.mean("step_ms")
        other = base.prompts[:, column].mean() + base.moves[:, column].mean()
        other += answer * base.mean("step_ms")
        rows.append(
            {
                "prompt": prompt,
                "answer": answer,
                "prompt_ms": float(prompt_ms),
                "migration_ms": float(move_ms),
                "total_ms": float(total),
                "over_monde": float(other / total),
                "without_prompt": float(
                    answer * base.mean("step_ms") / (move_ms + answer * run.mean("step_ms"))
                ),
            }
        )
    return rows


def _alike(routing: Routing) -> float:
    """Mean cosine between what prompts and their answers used."""
    return float(
        np.mean([cosine(each.counts, each.decode_counts()).mean() for each in routing.sequences])
    )


def _worth(asked: NearData, routing: Routing) -> dict[str, dict[str, float]]:
    """What a choice of the hot experts is worth at equal bits: of the first ones, of those that
    others use, by the prompt, and of those that the answer will use."""
    shape, everywhere = asked.shape, range(len(routing.sequences))
    alike = np.ones((shape.n_layers, shape.n_expert))
    by: dict[str, Callable[[int], np.ndarray]] = {
        "first": lambda at: alike,
        STATIC: lambda at: strategies.static_scores(routing, at),
        CONTEXT: lambda at: _scores(asked, routing, at),
        "oracle": lambda at: strategies.oracle_scores(routing, at),
    }
    found = {}
    for name, scores in by.items():
        done = [
            strategies.decode(
                asked.machine,
                shape,
                strategies.placed(shape, scores(at), asked.n_hot, asked.placement),
                routing.sequences[at],
            )
            for at in everywhere
        ]
        found[name] = {
            "step_ms": float(np.mean([each.step_ms for each in done])),
            "hot_mass": float(np.mean([each.hot_mass for each in done])),
        }
    return found


def render_near_data(result: dict[str, Any]) -> str:
    """The same as tables for a person."""
    machine = result["machine"]
    lines = [
        f"{result['shape']}, {result['n_hot']} hot experts a layer, the others at "
        f"{result['near_bits']:g} bits; one sequence decodes",
        f"routing: {result['routing']}; prompts and answers have a cosine of "
        f"{result['prefill_decode_cosine']:.2f}",
        f"near data {machine['near_gbps']:g} GB/s ({machine['near_compute']}), HBM "
        f"{machine['hbm_gbps']:g} GB/s, link {machine['link_gbps']:g} GB/s; monde moves "
        f"{result['migrations']:g} experts a token",
        "",
        f"{'':<12}{'ms/token':>10}{'tokens/s':>10}{'x monde':>10}{'x near-only':>13}"
        f"{'near ms':>10}{'x 16 bits':>11}{'on the GPU':>12}",
    ]
    for name, run in result["runs"].items():
        gain = f"{run['near_gain']:.2f}" if run["near_gain"] else ""
        lines.append(
            f"{name:<12}{run['step_ms']:>10.2f}{run['tokens_per_s']:>10.1f}"
            f"{run['over_monde']:>10.2f}{run['over_near_only']:>13.2f}{run['near_ms']:>10.2f}"
            f"{gain:>11}{100 * run['hot_mass']:>10.1f} %"
        )
    lines += [
        "",
        f"{'end to end':<12}{'prompt:answer':>15}{'prompt s':>10}{'moves s':>9}{'all s':>9}"
        f"{'x monde':>9}{'without prompt':>16}",
    ]
    for name, run in result["runs"].items():
        for row in run["lengths"]:
            pair = f"{row['prompt']}:{row['answer']}"
            lines.append(
                f"{name:<12}{pair:>15}{row['prompt_ms'] / 1e3:>10.2f}"
                f"{row['migration_ms'] / 1e3:>9.2f}{row['total_ms'] / 1e3:>9.2f}"
                f"{row['over_monde']:>9.2f}{row['without_prompt']:>16.2f}"
            )
    lines += ["", "what the choice of hot experts is worth, at the same bits:"]
    for name, row in result["placement"].items():
        lines.append(
            f"  {name:<10}{row['step_ms']:>8.2f} ms/token, {100 * row['hot_mass']:.1f} % of the "
            f"routed experts on the GPU"
        )
    return "\n".join(lines)
