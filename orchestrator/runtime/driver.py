"""The loop between a policy and its store, in live runs and in replay.

router -> on_route: the policy decides -> the store acts -> experts compute
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from time import sleep
from typing import Any

import numpy as np

from gguf_tools import interrupts
from orchestrator.allocation.estimate import ROUTING_TOKENS
from orchestrator.allocation.slots import Transition
from orchestrator.errors import NativeError
from orchestrator.events import SKIP, ComputedStep, Phase, RouteEvent, StepReport, served
from orchestrator.native import FAILED, CRoom, Store
from orchestrator.plan.records import CELL_STEP, SharedMemory
from orchestrator.policy import PLAIN, Policy
from orchestrator.policy.base import Learned
from orchestrator.runtime.idle import Idle, likely
from orchestrator.runtime.loss_meter import LossMeter

# Between two looks at reads that are waited for, in seconds.
_PAUSE_S = 0.0005


class NoopDriver:
    """A driver that does nothing, for models that run on llama.cpp's own path."""

    store: Store | None = None
    policy: Policy | None = None
    may_wait = False
    prompts = 0  # bytes of the copies of prompts that give way to slots
    # Adds up the estimated quality loss. None without a loss table.
    meter: LossMeter | None = None

    def prepare(
        self, first: Sequence[Transition], progress: Callable[[float], None] | None
    ) -> None:
        """Prepare the first token after the model has loaded.

        Reads the experts that the policy wants before the first token, and installs the callbacks.
        Called once. progress: gets the share that is done.
        """

    def set_prompts(self, n_bytes: int, keep: Callable[[int], int]) -> None:
        """Set the memory for copies of prompts, in bytes.

        keep: limits the copies to a number of bytes, and returns how many they take.
        """

    def begin(self, phase: Phase) -> None:
        """Called before a decode whose tokens all have this phase."""

    def check(self, status: int) -> None:
        """Called after a decode with its status: raises the error of a callback or of the store."""

    def between_steps(self) -> None:
        """Called after steps whose phase `begin` set: the batch shows the phase of later steps."""

    def follow(self, phase: Phase) -> None:
        """Called before a step of the server core.

        At the start of an answer it waits for the transitions that the policy requires.
        """

    def stop_waiting(self) -> None:
        """Make every wait of an answer end soon; any thread may call it."""

    def warmup_mode(self) -> AbstractContextManager[None]:
        """Limit the experts that steps use during the block.

        In each layer and each tier they use at most one expert. This applies to tiers that the
        policy may request or that have experts in memory. The policy and all counters ignore these
        steps.
        """
        return nullcontext()

    def idle(self, used: np.ndarray | None, settle: Callable[[], None]) -> None:
        """Read experts that are likely to be used into free slots, in the background.

        This continues until end_idle is called. used: how often tokens used each expert, float64
        [n_layers, n_expert], None if not known. settle: blocks until no step is computed.
        """

    def end_idle(self) -> None:
        """End idle reads, before a step and before the store is freed; any thread may call it."""

    def tokens_done(self) -> float:
        """Return Store.tokens_done; 0 without a store."""
        return 0.0

    def used(self) -> np.ndarray | None:
        """Return how many tokens used each expert since the start, uint32 [n_layers, n_expert].

        Return None without a store. Any thread may call it.
        """
        return None

    @property
    def keeps_sequences(self) -> bool:
        """Whether the policy has a state for each sequence."""
        return False

    def save_sequence(self, sequence: int) -> bytes | None:
        """Return the policy's state of a sequence, to keep with its tokens, or None."""
        return None

    def restore_sequence(self, sequence: int, state: bytes) -> None:
        """Give the policy the state that save_sequence returned for a sequence.

        The sequence holds the same tokens again. Raises PolicyError for a damaged state.
        """

    def cancel(self, on: bool) -> None:
        """Make steps end early, until called with False."""

    def sequence_end(self, sequence: int | None = None) -> None:
        """Called after the tokens of a sequence, or of all sequences, were dropped."""

    def change(self, name: str, value: Any) -> bool:
        """Change a live setting of the policy; False if it has no such setting.

        Raises SettingError and PolicyError, and changes nothing then.
        """
        return False

    def report(self) -> dict[str, Any]:
        """Return the policy's report on its own work."""
        return {}

    @property
    def policy_name(self) -> str:
        """The name of the policy."""
        return PLAIN

    def learned(self) -> Learned:
        """Return what the policy has learned, for the next run."""
        return Learned()


class Driver(NoopDriver):
    """The loop between one policy and its store.

    Between two steps another policy with the same slots may replace the policy. steps: the number
    of steps that were reported to the policy.
    """

    store: Store
    policy: Policy

    def __init__(
        self, policy: Policy, store: Store, pause: Callable[[], object] = lambda: sleep(_PAUSE_S)
    ) -> None:
        """pause: waits a moment while reads go on."""
        self.policy = policy
        self.store = store
        # Called after restore_sequence: (sequence, state).
        self.on_restored: Callable[[int, bytes], None] | None = None
        # Divides memory between slots, KV cells, scratch and copies of prompts. None if the slots
        # have a fixed size.
        self.shared: SharedMemory | None = None
        # Bytes of copies of prompts: at most from the shared memory, now reserved there, at most
        # from memory of their own, and in use.
        self.shared_prompts = self._set_aside = self.own_prompts = self.prompts = 0
        # Limits the copies to a number of bytes; returns how many they take.
        self.keep_prompts: Callable[[int], int] = lambda _n_bytes: 0
        self._limit: int | None = None
        self._idle = Idle(store)
        self._pause = pause
        self._prompt_read = False
        self._cancelled = False
        # Tokens since the routing was last judged, and the uses of experts until then.
        self._unjudged = 0
        self._judged: np.ndarray = np.zeros(1, np.uint32)
        # Expert counts since the last report that included counts.
        self._unreported: np.ndarray | None = None
        self.steps = 0

    def on_route(self, event: RouteEvent) -> None:
        """Called once per MoE layer of a step: the policy decides, and the store acts on it."""
        self.policy.decide(event, self.store.view, self.store.decision)
        self.store.apply(self.store.decision)
        if self.meter is not None:
            self.meter.decided(event, self.store.view, self.store.decision)

    def asks(self, phase: int) -> bool:
        """Return whether the policy is asked in steps of a phase."""
        return phase in self.policy.wants.asked_in

    @contextmanager
    def warmup_mode(self) -> Iterator[None]:
        policy, decision = self.policy, self.store.decision
        others = [t for t in range(len(policy.shape.tiers)) if t != policy.wants.default_tier]
        # If the policy is not asked in decode steps, only transitions may change residency.
        may_ask = Phase.DECODE in policy.wants.asked_in

        def on_route(event: RouteEvent) -> None:
            first, *more = event.ids_array[0].tolist()
            decision.tier_array[:] = SKIP
            decision.tier_array[first] = policy.wants.default_tier
            resident = self.store.view.resident_array[event.layer]
            there = [(expert, resident[expert]) for expert in more if resident[expert] in others]
            for expert, tier in zip(more, others, strict=False) if may_ask else there:
                decision.tier_array[expert] = tier
            self.store.apply(decision)

        self.used()  # keep the counts of earlier steps, which forget_counts would drop
        self.set_route(on_route)
        self.store.set_step_done(None)
        self.store.set_phase(Phase.PREFILL)
        try:
            yield
        finally:
            self.set_route()
            self.store.set_step_done(self.step_done)
            self.store.set_phase(None)
            self.store.forget_counts()
            self.store.reset_stats()
            self._prompt_read = False

    def on_route_unasked(self, event: RouteEvent) -> None:
        """Do what the store does in steps in which the policy is not asked.

        Take the default tier, or a better one that is in memory.
        """
        resident = self.store.view.resident_array[event.layer]
        self.store.decision.tier_array[:] = served(self.policy.wants.default_tier, resident)
        self.store.apply(self.store.decision)

    def step_done(self, step: ComputedStep) -> None:
        """Called once per step: reports it to the policy, and starts the transitions it returns."""
        moves = self.learn(step)
        if moves:
            self.store.transition(moves)

    def learn(self, step: ComputedStep, unusual: bool | None = None) -> Sequence[Transition]:
        """Report a step to the policy, and return the transitions that it asks for.

        unusual: as StepReport.unusual, if another driver has the loss meter.
        """
        policy = self.policy
        wants, is_reported = policy.wants, step.phase in policy.wants.told_in
        counts = self.store.take_counts() if wants.counts else None
        resident = target = None
        if wants.states and is_reported:
            resident, target = self.store.states()
        if self.meter is not None:
            if self.meter.costs and not self.asks(step.phase):
                if (
                    is_reported or self.meter.needs_tiers
                ):  # experts in transition count in the old tier
                    held = self.store.resident() if resident is None else resident
                    self.meter.holds(served(wants.default_tier, held))
                self.meter.counted(self.store.take_counts() if counts is None else counts)
            self.meter.step_done(step.phase, step.n_tokens)
            unusual = self.judge_routing(step.n_tokens)
        if counts is not None:
            counts = counts if self._unreported is None else counts + self._unreported
            counts, self._unreported = (counts, None) if is_reported else (None, counts)
        self.steps += 1
        return policy.on_step(
            StepReport(
                phase=step.phase,
                n_tokens=step.n_tokens,
                us=step.us,
                counts=counts,
                resident=resident,
                target=target,
                starts=step.starts,
                prompt_ends=step.prompt_ends,
                ends=step.ends,
                unusual=unusual,
            )
        )

    def judge_routing(self, n_tokens: int) -> bool | None:
        """Compare the routing of the last ROUTING_TOKENS tokens with the texts of the loss table.

        n_tokens: of the step that ended. Returns whether they used experts in another way: then a
        policy with a loss budget spends half of its limit. None if fewer tokens have passed since
        the last comparison, or if the policy has no loss budget.
        """
        policy, meter = self.policy, self.meter
        routing = meter.estimate.routing if meter is not None else None
        if meter is None or routing is None or policy.placement.spends is None:
            return None
        self._unjudged += n_tokens
        used = self.used() if self._unjudged >= ROUTING_TOKENS else None
        if used is None:
            return None
        meter.halved = not routing.holds(used - self._judged)
        self._unjudged, self._judged = 0, used
        return meter.halved

    def prepare(
        self, first: Sequence[Transition], progress: Callable[[float], None] | None
    ) -> None:
        self.set_route()
        self.store.set_step_done(self.step_done)
        if self.shared is not None:
            self.store.set_room(self.make_room)
        self.load_first(first, progress)

    def set_route(self, route: Callable[[RouteEvent], None] | None = None) -> None:
        """Install the routing callback.

        The policy decides in the steps in which it is asked, and its default tier is taken in the
        others. route: a function that is called instead, in every step.
        """
        if route is not None:
            self.store.set_route(route, self.policy.wants.default_tier)
            return
        wants = self.policy.wants
        asked = self.on_route if wants.asked_in else None
        self.store.set_route(asked, wants.default_tier, wants.asked_in)

    def load_first(
        self, first: Sequence[Transition], progress: Callable[[float], None] | None = None
    ) -> None:
        """Read the experts that the policy wants before the first token.

        Then set the rate of later transitions.
        """
        self.store.set_transition_rate(self.policy.wants.transition_rate)
        if first:
            self.store.warm(first, progress)
            self.store.reset_stats()

    def begin(self, phase: Phase) -> None:
        self.follow(phase)
        self.store.set_phase(phase)

    def make_room(self, room: CRoom) -> None:
        """Called before a batch is computed or a sequence's state is restored: divide the memory.

        Copies of prompts give way to the KV cells that the batch needs. Slots give way to the
        cells, to the scratch of the batch, to the tokens after it and to one more copy, or they
        come back.
        """
        shared = self.shared
        assert shared is not None
        touched, n_tokens = room.touched, room.n_tokens
        held = touched.scratch[1] + touched.work[1]
        cells = shared.cells(touched.cache[1] + room.n_bytes) + CELL_STEP
        end = cells + n_tokens
        n_new = n_tokens + shared.cells(room.n_bytes) + CELL_STEP
        width = max(end, shared.width(touched.cells_end, n_new))
        room.at_once = shared.micro_batch(cells, n_tokens, width=width)
        left = shared.slots(end, room.at_once, held, width)
        if left < shared.least_slots:  # scratch of a cancelled prompt is in the way
            room.drop_scratch = 1
            left = max(shared.least_slots, shared.slots(end, room.at_once, 0, width))
        if not room.n_bytes:  # otherwise one of the copies may be about to be restored
            planned = sum(size * n for size, n in self.store.spec.groups)
            most = self.shared_prompts - max(0, planned - shared.slots(end, 1))
            most = max(0, min(most, left - shared.least_slots))
            others = self.keep_prompts(self.own_prompts + most) - self.own_prompts
            self._set_aside = min(most, max(0, others) + shared.cache_bytes(end))
            self.prompts = self.keep_prompts(self.own_prompts + self._set_aside)
        limit = max(shared.least_slots, left - self._set_aside)
        if limit != self._limit:
            self._set_limit(limit)

    def _set_limit(self, limit: int) -> None:
        """Limit the slots to a number of bytes, and wait for reads into slots beyond the limit.

        Raises NativeError if the step is cancelled meanwhile, or if an interrupt is pending.
        """
        self._limit = None  # until all of it is done
        while True:
            loading = self.store.loading
            if not self.store.limit(limit):
                break
            if self._is_stopped():
                raise NativeError("the step was cancelled while it waited for reads")
            self._pause_for(loading)
        self._limit = limit

    def _is_stopped(self) -> bool:
        """Return whether a wait for the store has to end."""
        return self._cancelled or interrupts.asked()

    def _pause_for(self, loading: int) -> None:
        """Wait a moment for reads of the store.

        loading: the number of reads when the caller found that it has to wait. Raises NativeError
        if it is 0, because then no read can end the wait.
        """
        if not loading:
            raise NativeError("the store waits for experts that it does not read: start again")
        self._pause()

    def between_steps(self) -> None:
        self.store.set_phase(None)
        self._prompt_read = False

    def follow(self, phase: Phase) -> None:
        if phase is Phase.PREFILL:
            self._prompt_read = True
        elif self._prompt_read:
            self._prompt_read = False
            self.before_answer()

    @property
    def may_wait(self) -> bool:  # type: ignore[override]
        """Whether the first token of an answer may have to wait for the policy."""
        return self.policy.wants.waits

    def set_prompts(self, n_bytes: int, keep: Callable[[int], int]) -> None:
        self.shared_prompts = min(n_bytes, self.shared.prompts) if self.shared else 0
        self.own_prompts, self.keep_prompts = n_bytes - self.shared_prompts, keep

    def before_answer(self) -> None:
        """At the start of an answer, wait for the transitions that the policy requires.

        If the step is cancelled or an expert cannot be read, the transitions go on in the
        background.
        """
        policy, store = self.policy, self.store
        failed = store.stats().transitions_failed
        while policy.wants.waits:
            moves = policy.warm(*store.states())
            if moves is None or not (moves or self._under_way()):
                break
            admitted = store.transition(moves)
            loading = 1
            while not self._is_stopped() and self._under_way():
                self._pause_for(loading)
                loading = store.loading
                store.begin_step(Phase.DECODE)
            if (
                self._is_stopped()
                or admitted < len(moves)
                or store.stats().transitions_failed > failed
            ):
                break

    def _under_way(self) -> bool:
        """Return whether an expert is in transition."""
        resident, target = self.store.states()
        return bool((resident != target).any())

    @property
    def prefetched(self) -> int:
        """The number of experts that idle reads have brought into memory."""
        return self._idle.prefetched

    def idle(self, used: np.ndarray | None, settle: Callable[[], None]) -> None:
        self.end_idle()
        store = self.store
        store.cancel(False)
        wanted: Sequence[Transition] = ()
        if not store.full:
            counts = [each for each in (self.used(), used) if each is not None]
            wanted = likely(self.policy.wants, store.resident(), np.sum(counts, axis=0))
        self._idle.start(wanted, settle)

    def end_idle(self) -> None:
        self._idle.stop()
        if self._cancelled:  # while the thread ended
            self.store.cancel(True)

    def tokens_done(self) -> float:
        return self.store.tokens_done

    def used(self) -> np.ndarray | None:
        if self.store.closed:
            return None
        if not self.policy.wants.counts:  # else the policy takes them
            self.store.take_counts()
        return self.store.taken_counts()

    @property
    def keeps_sequences(self) -> bool:
        return type(self.policy).save_sequence is not Policy.save_sequence

    def save_sequence(self, sequence: int) -> bytes | None:
        return self.policy.save_sequence(sequence)

    def restore_sequence(self, sequence: int, state: bytes) -> None:
        self.policy.restore_sequence(sequence, state)
        if self.on_restored is not None:
            self.on_restored(sequence, state)

    def check(self, status: int) -> None:
        if status == FAILED:
            self.store.check_step()

    def cancel(self, on: bool) -> None:
        self._cancelled = on
        self.store.cancel(on)

    def stop_waiting(self) -> None:
        self._cancelled = True

    def sequence_end(self, sequence: int | None = None) -> None:
        self.store.sequence_end(sequence)

    def change(self, name: str, value: Any) -> bool:
        policy = self.policy
        declared = policy.Settings.declared().get(name)
        if declared is None or not declared.live:
            return False
        policy.update_settings(replace(policy.settings, **{name: value}))
        return True

    def report(self) -> dict[str, Any]:
        return dict(self.policy.report())

    @property
    def policy_name(self) -> str:
        return self.policy.name

    def learned(self) -> Learned:
        return self.policy.learned()
