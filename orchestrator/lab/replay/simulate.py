"""A recorded run again, with another policy, other slots or another disk: no model needed.

The policy objects and the store's cache code are those of a real run. The graph is played:
each layer computes for a given time, and waits where the store has to read. The versions of
experts change when the simulated reads are done, or where they changed in the recorded run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gguf_tools.file.layout import COMPUTE_ORDER
from orchestrator.allocation.estimate import KlEstimate
from orchestrator.allocation.slots import ModelShape, Rules, SlotPlan, Transition
from orchestrator.cost.losses import load
from orchestrator.engine.driver import Driver
from orchestrator.engine.loss_meter import LossMeter
from orchestrator.engine.store_layout import spec_for, store_layers
from orchestrator.errors import ConfigError, TraceError
from orchestrator.events import ComputedStep, Phase, RouteEvent, StoreView
from orchestrator.lab.replay.clock import Simulation
from orchestrator.lab.replay.trace import Event, Step, Trace
from orchestrator.memory.footprint import model_shape
from orchestrator.native import CStats, Library, Store, StoreSpec
from orchestrator.policy import Policy
from orchestrator.policy.base import Learns, Tunes, WaitsBeforeAnswer, WeighsLosses
from orchestrator.settings import Settings

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
    phases: tuple[Phase, ...]
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
    *,
    whole_experts: bool = False,
    rigid: bool = False,
) -> Setup:
    """The policy for a trace, and how it divides the slots. tiers: of the trace's model, best
    first. whole_experts, rigid: as of StoreSpec. Raises PolicyError and BudgetError."""
    shape = model_shape(trace, tiers)
    made = policy(shape, settings, rules)
    _teach(made, trace, tiers)
    slots = made.plan(expert_bytes)
    spec = spec_for(
        made,
        slots,
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
    return Setup(made, shape, slots, spec, tiers)


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


def _teach(policy: Policy, trace: Trace, tiers: tuple[int, ...]) -> None:
    """What earlier runs had learned of the model when the trace was recorded."""
    hotness = trace.arrays["start_hotness"]
    if isinstance(policy, Learns) and hotness.any():
        policy.set_hotness(hotness)
    losses = trace.arrays["losses"][..., list(tiers)]
    if isinstance(policy, WeighsLosses) and policy.losses_matter and losses.any():
        policy.set_losses(losses)


def simulate(
    library: Library,
    trace: Trace,
    setup: Setup,
    speed: Transport,
    time: Compute,
    as_recorded: bool = False,
    recorded_us: bool = False,
) -> Outcome:
    """Plays the trace once, from an empty store, or for a policy that has everything in memory
    from that. as_recorded: versions change where they did in the recorded run, which was one of
    this policy with these settings and slots. recorded_us: the policy is told the times of the
    recorded steps, as it is with as_recorded, in the place of the virtual ones. Raises what the
    policy or the store does, and TraceError where the policy does something else than it did."""
    policy = setup.policy
    told_recorded = as_recorded or recorded_us
    # Parts of prompts behind which an answer begins.
    answered = np.diff(trace.arrays["step_phase"].astype(int), append=Phase.PREFILL) > 0
    phases: list[Phase] = []
    step_us: list[float] = []
    with Store.create(library, setup.spec) as store:
        clock = Simulation(store)
        driver = Driver(policy, store, lambda: _pass(clock))
        driver.set_route()
        if setup.estimate is not None:
            driver.meter = LossMeter(setup.estimate, policy.rules.exact)
        by_residency = policy.wants.by_residency or isinstance(policy, Tunes)
        held = Held(driver) if recorded_us and by_residency else None
        clock.set_speed(speed.bytes_per_s, speed.latency_us)
        driver.load_first(policy.start())
        follow = None
        if as_recorded:
            follow = RecordedVersions(store, policy, clock, speed)
            follow.check_start(trace)
        # Of another policy nobody knows what it would have known.
        kept = trace.restored() if policy.name == trace.header.policy else {}

        def restore(step: int) -> None:
            for sequence, state in kept.get(step, ()):
                driver.restore_sequence(sequence, state)

        restore(0)
        for number, step in enumerate(trace.steps(), 1):
            start_ns = clock.now_ns
            if follow is not None:
                follow.begin_step(step)
            store.begin_step(step.phase)
            _play(clock, setup, step, time, held)
            us = (clock.now_ns - start_ns) / 1000
            told = ComputedStep(
                number=number,
                phase=step.phase,
                n_tokens=step.n_tokens,
                us=step.us if told_recorded else us,
                starts=step.starts,
                prompt_ends=step.prompt_ends,
                ends=step.ends,
            )
            moves = driver.learn(told, None if follow is None else follow.states())
            restore(number)
            if follow is not None:
                follow.step_done(step, moves, driver if answered[number - 1] else None)
            else:
                if moves:
                    store.transition(moves)
                if answered[number - 1]:
                    driver.before_answer()
                    us = (clock.now_ns - start_ns) / 1000
            phases.append(step.phase)
            step_us.append(us)
        stats = store.stats()
    return Outcome(stats, tuple(phases), np.array(step_us), driver.meter)


class RecordedVersions:
    """Keeps what a policy asks for until the step before which the run published it.

    So the policy sees its experts under way as long as it did. Only then the store gets the
    transition, and reads it in no time: fewer slots are taken meanwhile than were, so there is
    always one. speed is that of all other reads.
    """

    def __init__(self, store: Store, policy: Policy, clock: Simulation, speed: Transport) -> None:
        self._store, self._policy, self._clock, self._speed = store, policy, clock, speed
        self._under_way: set[Transition] = set()
        # What changed behind a prompt while its answer waited.
        self._waited_for: set[Transition] = set()
        self._updates = 0
        self._steps = 0
        store.set_transition_rate(0)

    def check_start(self, trace: Trace) -> None:
        """Raises TraceError where the policy starts with other versions than it did."""
        if not np.array_equal(self._store.resident(), trace.arrays["start_tier"]):
            raise self._astray("starts with other experts in memory")

    def begin_step(self, step: Step) -> None:
        """Before the store's own begin_step. Raises TraceError for a version that was not on its
        way."""
        published = [each for each in step.published if each not in self._waited_for]
        if len(step.published) - len(published) < len(self._waited_for):
            raise self._astray("waits for other versions")
        self._waited_for.clear()
        if not published:
            return
        if not self._under_way.issuperset(published):
            raise self._astray("asks for other versions")
        self._under_way.difference_update(published)
        with self._at_once():
            admitted = self._store.transition(published)
            self._clock.advance(0)
        if admitted < len(published):
            raise self._astray("has other slots")

    @contextmanager
    def _at_once(self) -> Iterator[None]:
        """Reads take no time."""
        self._clock.set_speed(0, 0)
        try:
            yield
        finally:
            self._clock.set_speed(self._speed.bytes_per_s, self._speed.latency_us)

    def _before_answer(self, driver: Driver) -> None:
        """What the run waited for behind a prompt is in place."""
        if not isinstance(self._policy, WaitsBeforeAnswer):
            return
        moves = self._policy.before_answer(*self.states())
        if moves is None:
            return
        before = self._store.resident()
        with self._at_once():
            self._store.transition([*self._under_way, *moves])
            self._under_way.clear()
            driver.before_answer()
        after = self._store.resident()
        self._waited_for = {
            (layer, expert, int(after[layer, expert]))
            for layer, expert in np.argwhere(before != after).tolist()
        }

    def states(self) -> tuple[np.ndarray, np.ndarray]:
        """Store.states(), with what is under way."""
        resident, target = self._store.states()
        for layer, expert, tier in self._under_way:
            target[layer, expert] = tier
        return resident, target

    def step_done(self, step: Step, moves: Sequence[Transition], driver: Driver | None) -> None:
        """After all of a step, of which the policy's step_done returned moves. driver: given where
        an answer begins behind it. Raises TraceError where the policy renewed its hot sets after
        another step than it did."""
        self._under_way.update(moves)
        if driver is not None:
            self._before_answer(driver)
        updates = self._policy.updates if isinstance(self._policy, Learns) else 0
        if step.ticks != (updates > self._updates):
            raise self._astray("renews its hot sets after other steps")
        self._updates = updates
        self._steps += 1

    def _astray(self, what: str) -> TraceError:
        return TraceError(
            f"the policy {what} than the recorded run (step {self._steps}): it was recorded with "
            f"another version of moe-edge, record it again or give --clock simulated"
        )


class Held:
    """Lets a policy that decides by what is in memory, or tunes itself by that, see what was there
    in the recorded run: when a read ends is the disk's choice, which no other run repeats."""

    def __init__(self, driver: Driver) -> None:
        shape = driver.store.view.resident_array.shape
        self._resident: np.ndarray = np.zeros(shape, np.uint8)
        self._missing: np.ndarray = np.zeros(shape, np.uint8)
        self._view = StoreView(self._resident, self._missing)
        self._driver = driver
        driver.set_route(self._on_route)

    def show(self, event: Event) -> None:
        """Before the event is played."""
        view, layer = self._driver.store.view, event.layer
        for now, simulated, here, ahead in (
            (self._resident, view.resident_array, event.held, event.ahead_held),
            (self._missing, view.missing_array, event.missing, event.ahead_missing),
        ):
            now[:] = simulated
            now[layer, event.ids] = here
            for distance, (ids, there) in enumerate(zip(event.ahead_ids, ahead, strict=True), 1):
                now[layer + distance, ids] = there

    def _on_route(self, event: RouteEvent) -> None:
        driver = self._driver
        driver.policy.decide(event, self._view, driver.store.decision)
        driver.store.apply(driver.store.decision)
        if driver.meter is not None:
            driver.meter.decided(event, self._view, driver.store.decision)


def _pass(clock: Simulation) -> None:
    clock.advance(_PAUSE_NS)


def _play(
    clock: Simulation, setup: Setup, step: Step, time: Compute, held: Held | None = None
) -> None:
    """One step, from its first route event to where the next one has its first."""
    n_ahead, dense = setup.spec.n_ahead, time.dense_share[step.phase]
    for event, event_ns in zip(step.events, time.events_ns(step), strict=True):
        layer, n_computed = event.layer, event.n_computed
        if held is not None:
            held.show(event)
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
        kinds = [kind for kind in COMPUTE_ORDER if kind in setup.shape.slots[layer][0]]
        compute_layer(clock, layer, kinds, experts, event_ns, dense, n_computed)


def compute_layer(
    clock: Simulation,
    layer: int,
    kinds: Sequence[int],
    experts: np.ndarray,
    layer_ns: float,
    dense_share: float,
    n_computed: int,
) -> None:
    """The computing of a layer, which waits where the simulated disk has not read: its experts,
    int32 [n], of which so many are computed, kind by kind, and what is outside of them."""
    expert_ns = layer_ns * (1 - dense_share) / (len(kinds) * max(1, n_computed))
    for kind in kinds:
        clock.use(layer, kind, experts, int(expert_ns))
    clock.advance(int(layer_ns * dense_share if n_computed else layer_ns))
