"""A recorded run again, with another policy, other slots or another disk: no model needed.

The policy objects and the store's cache code are those of a real run. The graph is played:
each layer computes for a given time, and waits where the store has to read. The versions of
dynaexq change when the simulated reads are done, or where they changed in the recorded run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gguf_tools.layout import DOWN, GATE, GATE_UP, UP
from orchestrator.choice import LRU, SKIP_TIER
from orchestrator.errors import TraceError
from orchestrator.events import Phase, RouteEvent, StepReport, expert_states
from orchestrator.footprint import model_shape
from orchestrator.native import CStats, Library, Simulation, Slices, Store, StoreSpec
from orchestrator.policy import Counting, Policy, PolicySettings, make_policy
from orchestrator.policy.base import ModelShape, SlotPlan
from orchestrator.replay.follow import RecordedVersions
from orchestrator.replay.trace import Step, Trace

# As the graph computes them: the activation's first operand first.
GRAPH_ORDER = (GATE_UP, GATE, UP, DOWN)


@dataclass(frozen=True, slots=True)
class Transport:
    """bytes_per_s 0: bytes take no time; latency_us a read; threads reads at once;
    transition_rate: bytes a second that changes of versions may read, 0 for no limit."""

    bytes_per_s: int
    latency_us: int
    threads: int
    transition_rate: int = 0


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
    library: Library,
    trace: Trace,
    plan: Plan,
    speed: Transport,
    time: Compute,
    as_recorded: bool = False,
) -> Outcome:
    """Plays the trace once, from an empty store, or for a policy that has everything in memory
    from that. as_recorded: versions change where they did in the recorded run, which was one of
    this policy with these settings and slots. Raises what the policy or the store does, and
    TraceError where the policy does something else than it did."""
    counting = plan.policy if isinstance(plan.policy, Counting) else None
    phases: list[Phase] = []
    step_us: list[float] = []
    with Store.create(library, plan.spec) as store:
        tier = counting.default_tier if counting is not None else 0
        store.set_route(_route(store, plan.policy) if plan.policy.needs_callback else None, tier)
        clock = Simulation(store)
        clock.set_speed(speed.bytes_per_s, speed.latency_us)
        follow = None
        if counting is not None:
            store.set_transition_rate(speed.transition_rate)
            store.warm(counting.start())
            store.reset_stats()
            if as_recorded:
                follow = RecordedVersions(
                    store, counting, clock, speed.bytes_per_s, speed.latency_us
                )
                follow.check_start(trace)
        for step in trace.steps():
            start_ns = clock.now_ns
            if follow is not None:
                follow.begin_step(step)
            store.begin_step(step.phase)
            _play(clock, plan, step, time)
            phases.append(step.phase)
            step_us.append((clock.now_ns - start_ns) / 1000)
            counts = states = None
            if counting is not None:
                counts = store.take_counts()
                states = expert_states((store if follow is None else follow).states())
            report = StepReport(step.phase, step.n_tokens, step_us[-1], counts, states)
            moves = list(plan.policy.step_done(report) or ())
            if follow is not None:
                follow.step_done(step, moves)
            elif moves:
                store.transition(moves)
        stats = store.stats()
    return Outcome(stats, tuple(phases), np.array(step_us))


def _route(store: Store, policy: Policy) -> Callable[[RouteEvent], None]:
    def route(event: RouteEvent) -> None:
        policy.decide(event, store.view, store.decision)
        store.apply(store.decision)

    return route


def _play(clock: Simulation, plan: Plan, step: Step, time: Compute) -> None:
    """One step, from its first route event to where the next one has its first."""
    n_ahead, dense = plan.spec.n_ahead, time.dense_share[step.phase]
    for event, event_ns in zip(step.events, time.events_ns(step), strict=True):
        layer, ids, weights, tokens, ahead_ids, ahead, importance, n_computed, _ = event
        seen = ahead_ids[:n_ahead], ahead[:n_ahead]
        clock.route(layer, ids, weights, tokens, *seen, importance)
        experts = np.unique(ids).astype(np.int32)
        kinds = [kind for kind in GRAPH_ORDER if kind in plan.shape.slots[layer][0]]
        expert_ns = event_ns * (1 - dense) / (len(kinds) * max(1, n_computed))
        for kind in kinds:
            clock.use(layer, kind, experts, int(expert_ns))
        clock.advance(int(event_ns * dense if n_computed else event_ns))
