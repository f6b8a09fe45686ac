"""A recorded run again, with another policy, other slots or another disk: no model needed.

The policy objects and the store's cache code are those of a real run, line by line; reads move no
bytes and take virtual time, as patches/native/moe-edge-transport.h says. The graph is played: each
layer computes for a given time, and waits where the store has to read. The versions of experts
change when the simulated reads are done.
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
from orchestrator.memory.footprint import model_shape
from orchestrator.native import CStats, Library, StoreSpec
from orchestrator.native.store import Store, event_arrays
from orchestrator.policy import Policy
from orchestrator.policy.base import History, place
from orchestrator.runtime.driver import Driver
from orchestrator.runtime.loss_meter import LossMeter
from orchestrator.runtime.store_layout import spec_for, store_layers
from orchestrator.settings import Settings

_INTS = ctypes.POINTER(ctypes.c_int32)


class Simulation:
    """The clock and the route events of one store that was made with `simulated`.

    Times in nanoseconds of virtual time. One thread drives it: Store.begin_step for each
    step, then for each layer route and, in graph order, use of every matrix kind.
    """

    def __init__(self, store: Store) -> None:
        if not store.spec.simulated:
            raise NativeError("the store reads real files: it has no virtual clock")
        self._store = store
        self._library = store.library
        event = self._library.store_event(store.handle).contents
        arrays = event_arrays(event, store.spec)
        self._ids, self._weights, self._tokens = arrays[:3]
        self._ahead_ids, self._ahead, self._importance = arrays[3:6]
        self._phases, self._sequences = arrays[6:]

    def set_speed(self, bytes_per_s: int, latency_us: int) -> None:
        """What reads take from now on; bytes_per_s 0: their bytes take no time."""
        self._library.sim_speed(self._store.handle, bytes_per_s, latency_us)

    def advance(self, ns: int) -> int:
        """Lets time pass in which something is computed; returns the clock."""
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
        """One route event: the store calls back as it does in a graph, and acts.

        ids, weights [T, k]; tokens [T]; ahead_ids, ahead [A, T, k] with A <= n_ahead;
        importance [T] or None; sequences [T], or one for all tokens; phases [T], None for that of
        the step. Raises what the callback raised, or NativeError.
        """
        n, n_ahead = len(ids), len(ahead_ids)
        if n > self._store.spec.max_tokens or n_ahead > self._store.spec.n_ahead:
            raise NativeError(
                f"a route event of {n} tokens and look-ahead {n_ahead} is more than the store "
                f"was made for"
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
        """One matrix product over distinct experts (int32, contiguous): waits for them in
        waves, and computes expert_ns for each that is not skipped. Raises NativeError."""
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
        """The computing of a layer, which waits where the simulated disk has not read: its experts,
        int32 [n], of which so many are computed, kind by kind, and what is outside of them."""
        there = self._store.spec.layers[layer][1]
        kinds = [kind for kind in COMPUTE_ORDER if (kind, 0) in there]
        expert_ns = layer_ns * (1 - dense_share) / (len(kinds) * max(1, n_computed))
        for kind in kinds:
            self.use(layer, kind, experts, int(expert_ns))
        self.advance(int(layer_ns * dense_share if n_computed else layer_ns))

    def _fail(self) -> None:
        self._store.check_step()
        raise NativeError("the simulated step failed without a reason")


# How far virtual time goes on before a read that is waited for is looked at again.
_PAUSE_NS = 50_000


@dataclass(frozen=True, slots=True)
class Transport:
    """bytes_per_s 0: bytes take no time; latency_us a read; threads reads at once."""

    bytes_per_s: int
    latency_us: int
    threads: int


@dataclass(frozen=True, slots=True)
class Compute:
    """What computing takes without any wait: microseconds for each token, by phase, shared by
    the layers in proportion to their tokens; None: from each event to the next as recorded.
    dense_share: by phase, the part of it after the experts; the rest is spread evenly over a
    layer's matrix kinds and the experts that were computed in the recorded run."""

    prefill_us: float | None
    decode_us: float | None
    dense_share: tuple[float, float] = (0.5, 0.5)

    def events_ns(self, step: Step) -> list[float]:
        """Nanoseconds of each event of a step."""
        token_us = self.prefill_us if step.phase is Phase.PREFILL else self.decode_us
        if token_us is None:
            return [float(event.compute_ns) for event in step.events]
        rows = [len(event.ids) for event in step.events]
        row_ns = 1000 * token_us * step.n_tokens / max(1, sum(rows))
        return [row_ns * n for n in rows]


@dataclass(frozen=True, slots=True)
class Setup:
    """A policy over a trace, and its slots. tiers: of the trace's model, those in use. estimate:
    what these cost, None where the trace does not say."""

    policy: Policy
    shape: ModelShape
    slots: SlotPlan
    spec: StoreSpec
    tiers: tuple[int, ...]
    estimate: KlEstimate | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay came to. step_us [S]: virtual time of each step. losses: what was foreseen to
    be lost, None where the trace does not say."""

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
    """The policy for a trace, and how it divides the slots. tiers: of the trace's model, best
    first. estimate: what they cost. whole_experts, rigid: as of StoreSpec. Raises PolicyError, and
    BudgetError for slots that are too few."""
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
    """What earlier runs had learned of the model when a trace of it was recorded. estimate: what
    its tiers in use cost; None where the trace does not say."""

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
    """What tiers of the trace's model cost against the best of them, by the trace or by the table
    of another model. Raises ConfigError for a table that does not say it."""
    names = trace.header.tiers
    costs = trace.arrays["costs"]
    if path is not None:
        found = load(path, None).costs(names)
        if found is None:
            raise ConfigError(f"--losses {path} does not say what {', '.join(names)} lose")
        # Stretched over the depth, and repeated over the experts.
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
    """Plays the trace once, from an empty store, or for a policy that has everything in memory
    from that. The policy is told the virtual times of steps. Raises what the policy or the store
    does."""
    policy = setup.policy
    # Parts of prompts behind which an answer begins.
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
        # Of another policy nobody knows what it would have known.
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
            told = ComputedStep(
                number=number,
                phase=step.phase,
                n_tokens=step.n_tokens,
                us=us,
                starts=step.starts,
                prompt_ends=step.prompt_ends,
                ends=step.ends,
            )
            moves = driver.learn(told)
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
    """One step, from its first route event to where the next one has its first."""
    n_ahead, dense = setup.spec.n_ahead, time.dense_share[step.phase]
    for event, event_ns in zip(step.events, time.events_ns(step), strict=True):
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
