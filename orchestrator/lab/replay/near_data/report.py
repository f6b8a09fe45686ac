"""`moe-edge replay --near-data`: the strategies side by side, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from orchestrator.allocation.placement import PlacementSettings
from orchestrator.allocation.pools import shares
from orchestrator.errors import ConfigError
from orchestrator.lab.replay.near_data import strategies
from orchestrator.lab.replay.near_data.machine import (
    SHAPES,
    NearDataMachine,
    PaperModel,
    check,
    gpu_slots,
)
from orchestrator.lab.replay.near_data.routing import (
    Generated,
    Routing,
    cosine,
    from_trace,
    generated,
)
from orchestrator.lab.replay.near_data.strategies import Decoded, Plan
from orchestrator.lab.replay.trace import Trace
from orchestrator.lab.table import Column, Table, fixed, percent
from orchestrator.settings import Notation, Settings, setting

NEAR_ONLY, MONDE, STATIC, CONTEXT = "near-only", "monde", "static", "context"
GPU_LRU, HOBBIT = "gpu-lru", "hobbit"

_PERCENT = percent(1, " %")


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
class NearDataWorkload(Settings):
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


@dataclass(frozen=True)
class NearData:
    """Everything that is asked of a replay on near-data memory."""

    machine: NearDataMachine = field(default_factory=NearDataMachine)
    workload: NearDataWorkload = field(default_factory=NearDataWorkload)
    generated: Generated = field(default_factory=Generated)
    placement: PlacementSettings = field(default_factory=PlacementSettings)

    @property
    def shape(self) -> PaperModel:
        return SHAPES[self.workload.shape]

    @property
    def n_hot(self) -> int:
        return self.shape.n_hot if self.workload.hot is None else self.workload.hot


@dataclass(frozen=True, slots=True)
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
    shape = asked.shape
    check(shape, asked.n_hot)
    routing = generated(shape, asked.generated) if trace is None else from_trace(shape, trace)
    runs = _runs(asked, routing)
    rows, sequences = {}, routing.sequences
    for name, run in runs.items():
        step = run.mean("step_ms")
        rows[name] = {
            "step_ms": step,
            "over_monde": runs[MONDE].mean("step_ms") / step,
            "over_near_only": runs[NEAR_ONLY].mean("step_ms") / step,
            "near_ms": run.mean("near_ms"),
            "hot_mass": run.mean("hot_mass"),
            "lengths": _lengths(asked, run, runs[MONDE]),
        }
    return {
        "shape": shape.name,
        "routing": routing.source,
        "n_hot": asked.n_hot,
        "near_bits": asked.placement.near_bits,
        "migrations": shape.migrations,
        "prefill_decode_cosine": float(
            np.mean([cosine(each.counts, each.decode_counts()).mean() for each in sequences])
        ),
        "machine": asked.machine.as_dict(),
        "runs": rows,
    }


def _placed(asked: NearData, scores: np.ndarray) -> Plan:
    return strategies.placed(asked.shape, scores, asked.n_hot, asked.placement)


def _decoded(asked: NearData, routing: Routing, plans: list[Plan]) -> list[Decoded]:
    return [
        strategies.decode(asked.machine, asked.shape, plan, sequence)
        for plan, sequence in zip(plans, routing.sequences, strict=True)
    ]


def _runs(asked: NearData, routing: Routing) -> dict[str, _Run]:
    shape, machine = asked.shape, asked.machine
    everywhere = range(len(routing.sequences))

    def run(plans: list[Plan], there: list[Plan]) -> _Run:
        return _Run(_decoded(asked, routing, plans), *_before(asked, routing, plans, there))

    alone = [strategies.near_only(shape)] * len(everywhere)
    only = run(alone, alone)
    moved = shape.migrations * machine.link_ms(shape.expert_bytes())
    monde = [replace(each, step_ms=each.step_ms + moved) for each in only.decoded]
    static = [_placed(asked, routing.others(at)) for at in everywhere]
    placed = [
        _placed(
            asked,
            strategies.context_scores(routing, at, asked.placement, shape.n_expert_used),
        )
        for at in everywhere
    ]
    started = _placed(asked, shares(routing.usual))
    found = {
        NEAR_ONLY: only,
        MONDE: replace(only, decoded=monde),
        STATIC: run(static, static),
        CONTEXT: run(placed, [started, *placed[:-1]]),
    }
    # On a GPU alone, what its memory does not hold is copied once while a prompt is read.
    streamed, nothing = _streamed(asked)[None], np.zeros((1, len(asked.workload.lengths)))
    for name, bits in (
        (GPU_LRU, strategies.GPU_LRU_BITS),
        (HOBBIT, strategies.HOBBIT_BITS),
    ):
        decoded = strategies.on_demand(machine, shape, routing.sequences, bits, gpu_slots(shape))
        found[name] = _Run([decoded], streamed, nothing)
    return found


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
            # What the prompt has brought to the GPU stays there for nothing.
            moves[at, column] = (plan.hot & ~before.hot & ~brought).sum() * stream
    return prompts, moves


def _streamed(asked: NearData) -> np.ndarray:
    """What prompts take on a GPU alone, [n_lengths] in ms."""
    shape, machine = asked.shape, asked.machine
    n = shape.n_layers * shape.n_expert
    copied = max(0.0, n - gpu_slots(shape)) * machine.link_ms(shape.expert_bytes())
    times = []
    for n_prompt, _ in asked.workload.lengths:
        computed = n * machine.gpu_ms(shape, n_prompt * shape.n_expert_used / shape.n_expert)
        times.append(shape.n_layers * machine.dense_ms(shape, n_prompt) + max(copied, computed))
    return np.array(times)


def _lengths(asked: NearData, run: _Run, base: _Run) -> list[dict[str, float]]:
    """End to end for each pair of lengths."""

    def parts(of: _Run, column: int, answer: int) -> tuple[float, float, float]:
        """(prompt, migration, answer) in ms."""
        prompt_ms, move_ms = of.prompts[:, column].mean(), of.moves[:, column].mean()
        return float(prompt_ms), float(move_ms), answer * of.mean("step_ms")

    rows = []
    for column, (prompt, answer) in enumerate(asked.workload.lengths):
        prompt_ms, move_ms, _ = ours = parts(run, column, answer)
        theirs = parts(base, column, answer)
        rows.append(
            {
                "prompt": prompt,
                "answer": answer,
                "prompt_ms": prompt_ms,
                "migration_ms": move_ms,
                "total_ms": sum(ours),
                "over_monde": sum(theirs) / sum(ours),
            }
        )
    return rows


def render_near_data(result: dict[str, Any]) -> str:
    """The same as tables for a person."""
    machine = result["machine"]
    heading = [
        f"{result['shape']}, {result['n_hot']} hot experts a layer, the others at "
        f"{result['near_bits']:g} bits; one sequence decodes",
        f"routing: {result['routing']}; prompts and answers have a cosine of "
        f"{result['prefill_decode_cosine']:.2f}",
        f"near data {machine['near_gbps']:g} GB/s, HBM "
        f"{machine['hbm_gbps']:g} GB/s, link {machine['link_gbps']:g} GB/s; monde moves "
        f"{result['migrations']:g} experts a token",
    ]
    name, times = Column("", "name", left=True), fixed(2)
    step, on_gpu = Column("ms/token", "step_ms", times), Column("on the GPU", "hot_mass", _PERCENT)
    steps = [
        name,
        step,
        Column("x monde", "over_monde", times),
        Column("x near-only", "over_near_only", times),
        Column("near ms", "near_ms", times),
        on_gpu,
    ]
    whole = [
        name,
        Column("prompt:answer", lambda row: f"{row['prompt']}:{row['answer']}"),
        Column("prompt s", "prompt_ms", fixed(2, 1e3)),
        Column("moves s", "migration_ms", fixed(2, 1e3)),
        Column("all s", "total_ms", fixed(2, 1e3)),
        Column("x monde", "over_monde", times),
    ]
    runs = [{"name": each, **run} for each, run in result["runs"].items()]
    lengths = [{"name": run["name"], **row} for run in runs for row in run["lengths"]]
    tables = [Table("", steps, runs), Table("end to end:", whole, lengths)]
    return "\n\n".join(["\n".join(heading), *(table.text() for table in tables)])
