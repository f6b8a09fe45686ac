"""What decides where experts are computed, and what a decoded token then takes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from orchestrator.allocation.placement import PlacementSettings, importance, place
from orchestrator.allocation.pools import nominal_losses
from orchestrator.lab.replay.near_data.machine import (
    FULL_BITS,
    LINK_US,
    NearDataMachine,
    PaperModel,
)
from orchestrator.lab.replay.near_data.routing import Routing, Sequence, layers_of

# Widths of the near-data memory's replicas (section 4.2).
NEAR_BITS = (4, 3, 2, 1)

# Bits of a token's experts on demand, by the rank of their gate, the last one for all behind it.
# HOBBIT has the first expert of a token in full and the others at 4 bits.
GPU_LRU_BITS, HOBBIT_BITS = (FULL_BITS,), (FULL_BITS, 4)


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the experts of one sequence are: hot bool [n_layers, n_expert], on the GPU at 16 bits;
    bits float64 [n_layers, n_expert], of the others in the near-data memory."""

    hot: np.ndarray
    bits: np.ndarray


@dataclass(frozen=True, slots=True)
class Decoded:
    """Means over tokens, in milliseconds: a decode step, and what the near-data memory computes in
    it. hot_mass: the share of routed experts that were on the GPU."""

    step_ms: float
    near_ms: float
    hot_mass: float


def near_only(shape: PaperModel) -> Plan:
    """Every expert in the near-data memory, at 16 bits."""
    size = shape.n_layers, shape.n_expert
    return Plan(np.zeros(size, bool), np.full(size, float(FULL_BITS)))


def placed(shape: PaperModel, scores: np.ndarray, n_hot: int, settings: PlacementSettings) -> Plan:
    """The n_hot experts of each layer with the largest scores on the GPU, the others at near_bits
    on average."""
    losses = nominal_losses(NEAR_BITS, shape.n_layers, shape.n_expert)
    tiers = place(scores, n_hot, losses, NEAR_BITS, settings)
    widths = np.array([FULL_BITS, *NEAR_BITS], np.float64)
    return Plan(tiers == 0, widths[tiers])


def context_scores(routing: Routing, index: int, settings: PlacementSettings, k: int) -> np.ndarray:
    """What the policy `context` makes of the sequence's prompt, with the usual use as its
    profile."""
    sequence = routing.sequences[index]
    return importance(sequence.counts, sequence.gates, routing.others(index), settings, k)


def decode(machine: NearDataMachine, shape: PaperModel, plan: Plan, sequence: Sequence) -> Decoded:
    """The answer of a sequence under a plan."""
    ids = sequence.ids
    there = ids >= 0
    layers = layers_of(ids)
    hot = plan.hot[layers, ids] & there
    times = np.vectorize(lambda bits: machine.near_ms(shape, bits), otypes=[float])(plan.bits)
    gpu_ms = machine.gpu_ms(shape)
    on_gpu = (hot * gpu_ms).sum(axis=2)
    cold = there & ~hot
    near = np.where(cold, times[layers, ids], 0.0).sum(axis=2)
    steps = machine.layers_ms(shape, on_gpu, near).sum(axis=1)
    return Decoded(
        float(steps.mean()),
        float(near.sum(axis=1).mean()),
        float(hot.sum() / max(1, there.sum())),
    )


class _Cache:
    """Experts in the GPU's memory, least recently used first. It holds so many bytes."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._held = 0.0
        self._experts: OrderedDict[tuple[int, int], float] = OrderedDict()

    def use(self, expert: tuple[int, int], n_bytes: float) -> float:
        """Bytes to copy for an expert of this size: 0 where it is there, in this precision or a
        better one."""
        there = self._experts.get(expert, 0.0)
        if there >= n_bytes:
            self._experts.move_to_end(expert)
            return 0.0
        self._held += n_bytes - there
        self._experts[expert] = n_bytes
        self._experts.move_to_end(expert)
        while self._held > self._capacity:
            _, size = self._experts.popitem(last=False)
            self._held -= size
        return n_bytes


def on_demand(
    machine: NearDataMachine,
    shape: PaperModel,
    sequences: list[Sequence],
    bits: tuple[int, ...],
    n_slots: float,
) -> Decoded:
    """A GPU alone, with a cache of so many experts at 16 bits: what is missing is copied over the
    link when it is needed, and nothing is fetched ahead. bits: as HOBBIT_BITS. The first sequence
    is run twice, so that the cache is warm."""
    cache = _Cache(n_slots * shape.expert_bytes())
    ranks = [bits[min(at, len(bits) - 1)] for at in range(shape.n_expert_used)]
    sizes = [shape.expert_bytes(each) for each in ranks]
    computing = [machine.gpu_ms(shape, bits=each) for each in ranks]
    dense = shape.n_layers * machine.dense_ms(shape)
    steps: list[float] = []
    hits = asked = 0
    for number, sequence in enumerate([sequences[0], *sequences]):
        for token in sequence.ids.tolist():
            took = dense
            for layer, experts in enumerate(token):
                for rank, expert in enumerate(experts):
                    if expert < 0:
                        continue
                    missing = cache.use((layer, expert), sizes[rank])
                    took += computing[rank]
                    if missing:
                        took += LINK_US / 1e3 + machine.link_ms(missing)
                    if number:
                        asked, hits = asked + 1, hits + (missing == 0)
            if number:
                steps.append(took)
    return Decoded(float(np.mean(steps)), 0.0, hits / max(1, asked))
