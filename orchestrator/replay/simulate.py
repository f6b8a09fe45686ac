"""A recorded run again, with another policy, other slots or another disk: no model needed.

The policy objects and the store's cache code are those of a real run. The graph is played:
each layer computes for a given time, and waits where the store has to read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from gguf_tools.layout import DOWN, GATE, GATE_UP, UP
from orchestrator.choice import LRU, SKIP_TIER
from orchestrator.config import TRANSITION_RATE
from orchestrator.errors import TraceError
from orchestrator.events import Phase, RouteEvent, StepReport
from orchestrator.footprint import model_shape
from orchestrator.native import CStats, Library, Simulation, Slices, Store, StoreSpec
from orchestrator.policy import Counting, Policy, PolicySettings, make_policy
from orchestrator.policy.base import ModelShape, SlotPlan
from orchestrator.replay.trace import Step, Trace

# As the graph computes them: the activation's first operand first.
GRAPH_ORDER = (GATE_UP, GATE, UP, DOWN)

# Share of a layer's time before its route event (attention, norms, router), an assumption;
# the rest is spread evenly over its matrix kinds and their experts.
DENSE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Transport:
    """bytes_per_s 0: bytes take no time; latency_us a read; threads reads at once."""

    bytes_per_s: int
    latency_us: int
    threads: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Microseconds of computing for each token, by phase, without any wait."""

    prefill_us: float
    decode_us: float

    def of(self, phase: Phase) -> float:
        return self.prefill_us if phase is Phase.PREFILL else self.decode_us


@dataclass(frozen=True, slots=True)
class Plan:
    """A policy over a trace, and its slots; high: the trace's tier that is tier 0."""

    name: str
    policy: Policy
    shape: ModelShape
    slots: SlotPlan
    spec: StoreSpec
    high: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay came to. step_us [S]: virtual time of each step."""

    stats: CStats
    phases: tuple[Phase, ...]
    step_us: np.ndarray


def measured(trace: Trace) -> Compute:
    """The median compute time a token of the recorded steps, of the other phase where one is
    not there."""
    by_phase: dict[Phase, list[float]] = {phase: [] for phase in Phase}
    for step in trace.steps():
        by_phase[step.phase].append(step.compute_us / step.n_tokens)
    prefill, decode = (by_phase[phase] for phase in (Phase.PREFILL, Phase.DECODE))
    return Compute(median(prefill or decode), median(decode or prefill))


def plan(
    trace: Trace,
    policy: str,
    expert_bytes: int,
    settings: PolicySettings,
    high: str,
    low: str | None,
    n_ahead: int,
    threads: int,
) -> Plan:
    """The policy for a trace, and how it divides the slots.

    low: a tier, "skip" or None. Raises PolicyError, BudgetError and TraceError.
    """
    best = trace.tier_index(high)
    tiers: tuple[int, ...] = (best,)
    if policy != LRU and low is not None and low != SKIP_TIER:
        tiers = (best, trace.tier_index(low))
        if tiers[1] <= best:
            raise TraceError(f"the low tier {low} is not below the high tier {high}")
    shape = model_shape(trace, tiers)
    skip = policy != LRU and low == SKIP_TIER
    made = make_policy(
        policy,
        shape,
        replace(settings, skip_low=skip, prefetch=settings.prefetch if n_ahead else "off"),
    )
    slots = made.plan(expert_bytes)
    layers = []
    for layer, (il, kinds) in enumerate(zip(trace.header.layer_ids, trace.slices, strict=True)):
        slices = {
            (kind, tier): Slices(
                each.file_index,
                each.offset,
                each.expert_bytes,
                each.type,
                slots.group_of[layer, kind, tier],
            )
            for kind, by_tier in enumerate(kinds)
            for tier, file_tier in enumerate(tiers)
            if (each := by_tier[file_tier]) is not None
        }
        layers.append((il, slices))
    spec = StoreSpec(
        files=tuple(Path(name) for name in trace.header.files),
        layers=tuple(layers),
        groups=tuple((group.slot_bytes, group.n_slots) for group in slots.groups),
        budget_bytes=expert_bytes,
        n_tiers=len(tiers),
        n_expert=trace.n_expert,
        n_expert_used=trace.n_expert_used,
        max_tokens=trace.max_tokens,
        n_ahead=n_ahead if made.needs_callback and settings.prefetch != "off" else 0,
        n_io_threads=threads,
        direct_io=False,
        n_passing=tuple(group.n_passing for group in slots.groups),
        exact_tiers=trace.header.exact_tiers and made.needs_callback,
        simulated=True,
    )
    return Plan(policy, made, shape, slots, spec, best)


def simulate(
    library: Library, trace: Trace, plan: Plan, speed: Transport, time: Compute
) -> Outcome:
    """Plays the trace once, from an empty store, or for a policy that has everything in memory
    from that. Raises what the policy or the store does."""
    counting = plan.policy if isinstance(plan.policy, Counting) else None
    phases: list[Phase] = []
    step_us: list[float] = []
    with Store.create(library, plan.spec) as store:
        tier = counting.default_tier if counting is not None else 0
        store.set_route(_route(store, plan.policy) if plan.policy.needs_callback else None, tier)
        clock = Simulation(store)
        clock.set_speed(speed.bytes_per_s, speed.latency_us)
        if counting is not None:
            store.set_transition_rate(TRANSITION_RATE)
            store.warm(counting.start())
            store.reset_stats()
        for step in trace.steps():
            start_ns = clock.now_ns
            store.begin_step(step.phase)
            _play(clock, plan, step, 1000 * time.of(step.phase) * step.n_tokens)
            phases.append(step.phase)
            step_us.append((clock.now_ns - start_ns) / 1000)
            counts = states = None
            if counting is not None:
                counts, states = store.take_counts(), store.states()
            report = StepReport(step.phase, step.n_tokens, step_us[-1], counts, states)
            moves = plan.policy.step_done(report)
            if moves:
                store.transition(moves)
        stats = store.stats()
    return Outcome(stats, tuple(phases), np.array(step_us))


def _route(store: Store, policy: Policy) -> Callable[[RouteEvent], None]:
    def route(event: RouteEvent) -> None:
        policy.decide(event, store.view, store.decision)
        store.apply(store.decision)

    return route


def _play(clock: Simulation, plan: Plan, step: Step, step_ns: float) -> None:
    """One step that computes for step_ns, each layer in proportion to its tokens."""
    n_ahead = plan.spec.n_ahead
    token_ns = step_ns / max(1, sum(len(event.ids) for event in step.events))
    for layer, ids, weights, tokens, ahead_ids, ahead, importance in step.events:
        layer_ns = token_ns * len(ids)
        clock.advance(int(layer_ns * DENSE_SHARE))
        seen = ahead_ids[:n_ahead], ahead[:n_ahead]
        clock.route(layer, ids, weights, tokens, *seen, importance)
        experts = np.unique(ids).astype(np.int32)
        kinds = [kind for kind in GRAPH_ORDER if kind in plan.shape.slots[layer][0]]
        expert_ns = layer_ns * (1 - DENSE_SHARE) / (len(kinds) * max(1, len(experts)))
        for kind in kinds:
            clock.use(layer, kind, experts, int(expert_ns))
