"""Replays a recorded run with another policy, other slots or another disk. No model is needed.

The policy objects and the store's cache code are the same as in a real run. Reads transfer no bytes
and take virtual time (patches/native/moe-edge-transport.h). The computation of each layer takes a
given time, and waits if the store has to read. Residency changes when the simulated reads complete.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gguf_tools import interrupts
from gguf_tools.file.layout import COMPUTE_ORDER
from gguf_tools.units import format_least, format_size
from orchestrator.allocation.estimate import KlEstimate
from orchestrator.allocation.slots import ModelShape, Rules, SlotPlan
from orchestrator.cost.losses import load
from orchestrator.errors import BudgetError, ConfigError, NativeError
from orchestrator.events import ComputedStep, Phase
from orchestrator.lab.replay.trace import Step, Trace
from orchestrator.native import CStats, Library, StoreSpec
from orchestrator.native.store import Store, event_arrays
from orchestrator.plan.footprint import model_shape
from orchestrator.policy import Policy
from orchestrator.policy.base import History, place
from orchestrator.runtime.driver import Driver
from orchestrator.runtime.loss_meter import LossMeter
from orchestrator.runtime.store_layout import spec_for, store_layers
from orchestrator.settings import Settings

_INTS = ctypes.POINTER(ctypes.c_int32)


class Simulation:
    """Simulates how long a model's steps take with an expert store, a cache of expert weights.

    The disk is simulated, and the clock is virtual. Call Store.begin_step for each step. Then, for
    each layer, tell the store with `route` which experts are used, and call `compute` to advance
    the clock.

    Times are in nanoseconds. All calls must come from one thread. Raises NativeError if the store
    was not created with `simulated`.
    """

    def __init__(self, store: Store) -> None:
        if not store.spec.simulated:
            raise NativeError(
                "the expert store reads a real disk, which a simulation cannot use: create the "
                "store with simulated=True"
            )
        self._store = store
        self._library = store.library
        event = self._library.store_event(store.handle).contents
        arrays = event_arrays(event, store.spec)
        self._ids, self._weights, self._tokens = arrays[:3]
        self._ahead_ids, self._ahead, self._importance = arrays[3:6]
        self._phases, self._sequences = arrays[6:]

    def set_speed(self, bytes_per_s: int, latency_us: int) -> None:
        """Set the speed of the simulated disk for later reads.

        With bytes_per_s 0, a read takes only the latency.
        """
        self._library.sim_speed(self._store.handle, bytes_per_s, latency_us)

    def advance(self, ns: int) -> int:
        """Advance the virtual clock by the time of a computation. Returns the new time.

        Both times are in nanoseconds.
        """
        return int(self._library.sim_advance(self._store.handle, ns))

    @property
    def now_ns(self) -> int:
        return self.advance(0)

    def route(
        self,
        layer: int,
        ids: np.ndarray,
        weights: np.ndarray,
        tokens: np.ndarray,
        ahead_ids: np.ndarray,
        ahead: np.ndarray,
        importance: np.ndarray | None = None,
        sequences: np.ndarray | int = 0,
        phases: np.ndarray | None = None,
    ) -> None:
        """Simulate the router of one MoE layer, which chooses k experts for each of T tokens.

        The policy then chooses the precision of these experts. The store reads experts that are not
        in memory.

        - ids [T, k]: the experts of each token.
        - weights [T, k]: the gate weights of these experts.
        - tokens [T]: position of each token in the batch.
        - ahead_ids [A, T, k]: predicted experts of each token in the next A layers. ahead_ids[0] is
          for the next layer.
        - ahead [A, T, k]: scores of the predicted experts.
        - importance [T]: attention that each token receives; None if unknown.
        - sequences [T]: sequence of each token, or one for all.
        - phases [T]: phase of each token; None means the step's phase.

        Raises NativeError, and the exceptions of the policy.
        """
        n, n_ahead = len(ids), len(ahead_ids)
        spec = self._store.spec
        if n > spec.max_tokens or n_ahead > spec.n_ahead:
            raise NativeError(
                f"the expert store got {n} tokens and predictions for {n_ahead} layers, but was "
                f"created for at most {spec.max_tokens} tokens and predictions for {spec.n_ahead} "
                f"layers: create it with a larger max_tokens or n_ahead"
            )
        self._ids[:n] = ids
        self._weights[:n] = weights
        self._tokens[:n] = tokens
        self._sequences[:n] = sequences
        if phases is not None:
            self._phases[:n] = phases
        if n_ahead:
            self._ahead_ids[:n_ahead, :n] = ahead_ids
            self._ahead[:n_ahead, :n] = ahead
        scored = importance is not None
        if scored:
            self._importance[:n] = importance
        with interrupts.held():
            status = self._library.sim_route(self._store.handle, layer, n, n_ahead, scored)
        if status != 0:
            self._fail()

    def use(self, layer: int, kind: int, experts: np.ndarray, expert_ns: int) -> None:
        """Simulate that a layer computes one matrix, such as the gate matrix, of each given expert.

        The virtual clock advances by the waits for reads, and by expert_ns for each expert. An
        expert that the policy chose to skip in `route` takes no time. If the experts do not all fit
        in memory, they are read and computed in groups.

        - kind: the matrix, as an index (up, gate, gate_up or down).
        - experts: the numbers of the experts, each once, in a contiguous int32 array.

        Raises NativeError if the simulated step fails.
        """
        pointer = experts.ctypes.data_as(_INTS)
        library = self._library
        if library.sim_use(self._store.handle, layer, kind, pointer, len(experts), expert_ns) != 0:
            self._fail()

    def compute(
        self,
        layer: int,
        experts: np.ndarray,
        layer_ns: float,
        dense_share: float,
        n_computed: int,
    ) -> None:
        """Advance the virtual clock by the computation of a layer, including waits for reads.

        - experts: the experts that the tokens use, each once, int32 [n].
        - layer_ns: compute time of the whole layer in nanoseconds, without waits.
        - dense_share: fraction of layer_ns that is spent outside the experts.
        - n_computed: number of experts whose computation is part of layer_ns. It is n, or less if
          layer_ns was measured in a run that skipped some of the n experts.

        An expert takes the time that is spent inside the experts, divided by n_computed. It takes
        no time if the policy chose in `route` to skip it.
        """
        there = self._store.spec.layers[layer][1]
        kinds = [kind for kind in COMPUTE_ORDER if (kind, 0) in there]
        expert_ns = layer_ns * (1 - dense_share) / (len(kinds) * max(1, n_computed))
        for kind in kinds:
            self.use(layer, kind, experts, int(expert_ns))
        self.advance(int(layer_ns * dense_share if n_computed else layer_ns))

    def _fail(self) -> None:
        self._store.check_step()
        raise NativeError(
            "the simulation of a step of the model failed, and the expert store gives no reason: "
            "this is a bug in moe-edge"
        )


# Virtual time that passes between two checks of a pending read.
_PAUSE_NS = 50_000


@dataclass(frozen=True, slots=True)
class Transport:
    """The speed of a simulated disk.

    `threads` is the number of concurrent reads. With bytes_per_s 0, a read takes only latency_us.
    """

    bytes_per_s: int
    latency_us: int
    threads: int


@dataclass(frozen=True, slots=True)
class Compute:
    """The time that computing takes in a replay, without waits for reads.

    - prefill_us, decode_us: microseconds per token of a prompt and per decoded token. None uses the
      recorded times.
    - dense_share: fraction of the compute time that is spent outside the experts, for prefill and
      decode.
    """

    prefill_us: float | None
    decode_us: float | None
    dense_share: tuple[float, float] = (0.5, 0.5)

    def layers_ns(self, step: Step) -> list[float]:
        """Return the time to compute each layer of a step, in nanoseconds, in the layers' order.

        Waits for reads are not included.
        """
        token_us = self.prefill_us if step.phase is Phase.PREFILL else self.decode_us
        if token_us is None:
            return [float(event.compute_ns) for event in step.events]
        rows = [len(event.ids) for event in step.events]
        row_ns = 1000 * token_us * step.n_tokens / max(1, sum(rows))
        return [row_ns * n for n in rows]


@dataclass(frozen=True, slots=True)
class Setup:
    """A policy and its expert slots, ready for the replay of a trace.

    - tiers: the precisions in use, as indices into the trace's tiers.
    - estimate: an estimator of the quality loss in these precisions; None if it is unknown.
    """

    policy: Policy
    shape: ModelShape
    slots: SlotPlan
    spec: StoreSpec
    tiers: tuple[int, ...]
    estimate: KlEstimate | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a replay, which simulates the S steps of a recorded run.

    - stats: counters of the simulated store.
    - step_us [S]: simulated duration of each step, in microseconds.
    - losses: sums of the estimated quality loss over all steps, one for prompts and one for
      answers; None if unknown.
    """

    stats: CStats
    step_us: np.ndarray
    losses: LossMeter | None = None


def set_up(
    trace: Trace,
    policy: type[Policy],
    expert_bytes: int,
    settings: Settings,
    tiers: tuple[int, ...],
    rules: Rules,
    threads: int,
    estimate: KlEstimate | None = None,
    *,
    whole_experts: bool = False,
    rigid: bool = False,
) -> Setup:
    """Return a policy with its expert slots, ready for the replay of a trace.

    A slot is memory for one matrix of an expert.

    - expert_bytes: total memory of the slots.
    - tiers: the precisions to use, as indices into the trace's tiers, best first.
    - rules: limits on the policy's decisions, such as whether it may skip experts.
    - threads: number of concurrent reads.
    - estimate: an estimator of the quality loss in these precisions; None if it is unknown.
    - whole_experts: compute an expert only when all its matrices are in memory.
    - rigid: serve all reads in the order of the requests. With False, reads for which the
      computation waits overtake prefetches.

    Raises PolicyError for unsuitable tiers, and BudgetError for too little memory.
    """
    shape = model_shape(trace, tiers)
    history = RecordedHistory(trace, tiers, estimate)
    placement = place(policy, shape, settings, rules, expert_bytes, history)
    slots = placement.slots
    if slots.total_bytes > expert_bytes:
        raise BudgetError(
            f"--expert-ram {format_size(expert_bytes)} is too small: the smallest that works with "
            f"the policy {policy.name} is {format_least(slots.total_bytes)}",
            slots.total_bytes,
        )
    spec = spec_for(
        placement,
        store_layers(trace.header.layer_ids, trace.slices, tiers, slots),
        files=tuple(Path(name) for name in trace.header.files),
        budget_bytes=expert_bytes,
        max_tokens=trace.max_tokens,
        n_io_threads=threads,
        direct_io=False,
        simulated=True,
        whole_experts=whole_experts,
        rigid=rigid,
    )
    return Setup(placement.make(history), shape, slots, spec, tiers, estimate)


class RecordedHistory(History):
    """The knowledge about a model that a policy has at the start of a replay.

    The policy of the recorded run knew an expert usage and expert losses at its start. The trace
    contains both, and the policy of the replay begins with the same values.

    - tiers: the precisions of the replay, as indices into the trace's tiers.
    - estimate: an estimator of the quality loss in these precisions; None if it is unknown.
    """

    def __init__(
        self, trace: Trace, tiers: Sequence[int], estimate: KlEstimate | None = None
    ) -> None:
        self._hotness = trace.arrays["start_hotness"]
        self._losses = trace.arrays["losses"][..., list(tiers)]
        self._estimate = estimate

    def hotness(self) -> np.ndarray | None:
        return self._hotness if self._hotness.any() else None

    def losses(self, tiers: Sequence[str], per_use: bool = False) -> np.ndarray | None:
        return self._losses if self._losses.any() else None

    def estimate(self, tiers: Sequence[str]) -> KlEstimate | None:
        return self._estimate


def foreseen(trace: Trace, tiers: tuple[int, ...], path: Path | None) -> KlEstimate | None:
    """Return an estimator of the quality that a replay loses by lowering or skipping experts.

    Returns None if the losses are unknown.

    - trace: the recorded run. It may have a table of the loss of each expert in each precision.
    - tiers: the precisions of the replay, as indices into the trace's tiers, best first. The loss
      is relative to the first.
    - path: a file with a loss table, which replaces the trace's table. It may belong to another
      model: it is stretched to the trace's layers and experts.

    Raises ConfigError if the file lacks a precision of the trace.
    """
    names = trace.header.tiers
    costs = trace.arrays["costs"]
    if path is not None:
        found = load(path, None).costs(names)
        if found is None:
            raise ConfigError(f"--losses {path} has no losses for the tiers {', '.join(names)}")
        # Stretch the table of the other model over the layers, and repeat it over the experts.
        layers = np.linspace(0, len(found) - 1, trace.n_layers).round().astype(int)
        costs = found[np.ix_(layers, np.arange(trace.n_expert) % found.shape[1])]
    if not costs.any():
        return None
    columns = [*tiers, tiers[0], len(names)]
    usual = np.full(costs.shape[:2], 1 / trace.n_expert_used**2)
    in_use = [names[tier] for tier in tiers]
    return KlEstimate.of_costs(costs[..., columns], in_use, in_use[0], usual)


def simulate(
    library: Library, trace: Trace, setup: Setup, speed: Transport, time: Compute
) -> Outcome:
    """Replay a trace (a recorded run) once, and return how long each step takes.

    The result also has counters, such as cache hits and bytes read. The replay starts with an empty
    cache, or with all experts loaded if the policy requires that.

    - setup: the policy and its memory for experts.
    - speed: the speed of the simulated disk.
    - time: the time that computing takes, without waits for reads.

    Raises the exceptions of the policy and of the expert store.
    """
    policy = setup.policy
    # Whether an answer begins after the step: a prefill step that a decode step follows.
    answered = np.diff(trace.arrays["step_phase"].astype(int), append=Phase.PREFILL) > 0
    step_us: list[float] = []
    with Store.create(library, setup.spec) as store:
        clock = Simulation(store)
        driver = Driver(policy, store, lambda: clock.advance(_PAUSE_NS))
        driver.set_route()
        if setup.estimate is not None:
            driver.meter = LossMeter(setup.estimate, policy.rules.exact)
        clock.set_speed(speed.bytes_per_s, speed.latency_us)
        driver.load_first(policy.warm() or ())
        # Restore a policy's saved states only if the same policy was recorded.
        kept = trace.restored() if policy.name == trace.header.policy else {}

        def restore(step: int) -> None:
            for sequence, state in kept.get(step, ()):
                driver.restore_sequence(sequence, state)

        restore(0)
        for number, step in enumerate(trace.steps(), 1):
            start_ns = clock.now_ns
            store.begin_step(step.phase)
            _play(clock, setup, step, time)
            us = (clock.now_ns - start_ns) / 1000
            report = ComputedStep(
                number=number,
                phase=step.phase,
                n_tokens=step.n_tokens,
                us=us,
                starts=step.starts,
                prompt_ends=step.prompt_ends,
                ends=step.ends,
            )
            moves = driver.learn(report)
            restore(number)
            if moves:
                store.transition(moves)
            if answered[number - 1]:
                driver.before_answer()
                us = (clock.now_ns - start_ns) / 1000
            step_us.append(us)
        stats = store.stats()
    return Outcome(stats, np.array(step_us), driver.meter)


def _play(clock: Simulation, setup: Setup, step: Step, time: Compute) -> None:
    """Simulate one step of a trace: the routing and the computation of each layer."""
    n_ahead, dense = setup.spec.n_ahead, time.dense_share[step.phase]
    for event, event_ns in zip(step.events, time.layers_ns(step), strict=True):
        layer, n_computed = event.layer, event.n_computed
        clock.route(
            layer,
            event.ids,
            event.weights,
            event.tokens,
            event.ahead_ids[:n_ahead],
            event.ahead_scores[:n_ahead],
            event.importance,
            event.sequences,
            event.phases,
        )
        experts = np.unique(event.ids).astype(np.int32)
        clock.compute(layer, experts, event_ns, dense, n_computed)
