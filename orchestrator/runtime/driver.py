"""Connects a policy with the expert store, in live runs and in replay.

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

# Pause between two checks of awaited reads, in seconds.
_PAUSE_S = 0.0005


class BaseDriver:
    """The driver of a model without an expert store (`--policy plain`). Its methods do nothing.

    A driver connects the expert store, which reads experts into memory, with the policy, which
    decides about them. The subclass Driver does this, and overrides the methods.
    """

    store: Store | None = None
    policy: Policy | None = None
    may_wait = False
    prompts = 0  # bytes that copies of earlier conversations use
    # Adds up the estimated quality loss. None without a loss table.
    meter: LossMeter | None = None

    def prepare(
        self, first: Sequence[Transition], progress: Callable[[float], None] | None
    ) -> None:
        """Read the first experts of a loaded model, and register callbacks with the expert store.

        The store, which holds the experts in memory, calls the callbacks in each step. Call this
        once.

        first: the experts that the policy needs before the first token, as (layer, expert, tier).
        progress: gets the share that is read, 0 to 1.
        """

    def set_prompts(self, n_bytes: int, keep: Callable[[int], int]) -> None:
        """Set the memory limit of the prompt cache, which holds copies of earlier conversations.

        - n_bytes: the limit in bytes.
        - keep: a function that shrinks the cache to a number of bytes, and returns the new size in
          bytes.

        The driver calls `keep` before steps. The number is at most n_bytes, and smaller if the KV
        cache or the expert slots need a part of this memory.
        """

    def begin(self, phase: Phase) -> None:
        """Set the phase (prefill or decode) of the next call of llama_decode.

        All tokens of the call have this phase. Before the first token of an answer, this waits for
        the experts that the policy requires.
        """

    def check(self, status: int) -> None:
        """Raise the error that made the last llama_decode fail.

        The error comes from a Python callback or from the expert store. Without such an error, this
        does nothing. status: the result of llama_decode.
        """

    def clear_phase(self) -> None:
        """Clear the phase (prefill or decode) that `begin` set.

        Each later step is prefill or decode according to its own tokens. Call this after the last
        step that was announced with `begin`.
        """

    def follow(self, phase: Phase) -> None:
        """Prepare for the next step of llama.cpp's server, which computes prompts and answers.

        Call this before each step. phase: whether the step computes a prompt (prefill) or answers
        (decode). At the first decode step after a prompt, the call waits until the experts that the
        policy requires are in memory.
        """

    def stop_waiting(self) -> None:
        """End all waits for reads of experts, because the program ends. Safe on any thread.

        A step that was waiting then continues without these experts, or fails.
        """

    def warmup_mode(self) -> AbstractContextManager[None]:
        """Return a context manager for warm-up steps, which use only a few experts.

        It affects the steps that the caller computes in the `with` block. In each layer, such a
        step uses one expert in the default precision, and at most one in each other precision. So
        few experts must be read. The policy and all counters ignore the steps.
        """
        return nullcontext()

    def idle(self, used: np.ndarray | None, settle: Callable[[], None]) -> None:
        """Start to read likely experts into free slots in the background, while no request runs.

        The reads continue until end_idle is called. used: how often tokens of earlier runs used
        each expert, float64 [n_layers, n_expert], or None if not known. settle: blocks until no
        step is being computed. The reads begin after that.
        """

    def end_idle(self) -> None:
        """End the background reads that `idle` started. Safe on any thread.

        Call this before a step and before the expert store is freed.
        """

    def tokens_done(self) -> float:
        """Return the progress of the running batch as a number of tokens.

        The number grows with each computed layer, so it may be fractional. It is 0 without an
        expert store.
        """
        return 0.0

    def used(self) -> np.ndarray | None:
        """Return how many tokens used each expert since the start, uint32 [n_layers, n_expert].

        Return None without an expert store. Safe on any thread.
        """
        return None

    @property
    def keeps_sequences(self) -> bool:
        """Whether the policy stores a state of its own for each sequence."""
        return False

    def save_sequence(self, sequence: int) -> bytes | None:
        """Return the policy's own state of one sequence as bytes, or None if it has no such state.

        The caller saves these bytes together with the tokens of the sequence.
        """
        return None

    def restore_sequence(self, sequence: int, state: bytes) -> None:
        """Give the policy the state of a sequence that save_sequence returned.

        Call this when the sequence holds the same tokens again. Raises PolicyError for a damaged
        state.
        """

    def cancel(self, on: bool) -> None:
        """Cancel the running step and all later steps, or let steps run again if `on` is false."""

    def sequence_end(self, sequence: int | None = None) -> None:
        """Report to the expert store that all tokens of a sequence were dropped.

        None stands for all sequences.
        """

    def change(self, name: str, value: Any) -> bool:
        """Change a setting of the policy while the model stays loaded.

        Returns False if the policy has no such setting, or if it can only be set at load time.
        Raises SettingError or PolicyError for a wrong value, and then changes nothing.
        """
        return False

    def report(self) -> dict[str, Any]:
        """Return figures that the policy reports about its own work, JSON-ready.

        The result is empty without a policy.
        """
        return {}

    @property
    def policy_name(self) -> str:
        """The name of the policy that manages the experts; "plain" without a policy."""
        return PLAIN

    def learned(self) -> Learned:
        """Return the expert usage and the tuned settings that the policy learned in this run.

        The next run starts with them. The result is empty without a policy.
        """
        return Learned()


class Driver(BaseDriver):
    """Connects a policy with the expert store.

    The driver passes the routing of each layer to the policy, and the policy's decisions to the
    store. Between two steps, the caller may replace `policy`. The new policy must be made for the
    memory slots that the store has. steps: number of steps that were reported to the policy.
    """

    store: Store
    policy: Policy

    def __init__(
        self, policy: Policy, store: Store, pause: Callable[[], object] = lambda: sleep(_PAUSE_S)
    ) -> None:
        """Connect the policy with the store. pause: sleeps briefly; called to wait for reads."""
        self.policy = policy
        self.store = store
        # Called after restore_sequence: (sequence, state).
        self.on_restored: Callable[[int, bytes], None] | None = None
        # Divides memory between slots, KV cells, scratch and copies of prompts. None if the slots
        # have a fixed size.
        self.shared: SharedMemory | None = None
        # Memory for copies of earlier conversations, in bytes: the limit in the shared memory, the
        # part that is reserved there now, the limit outside of it, and the total use.
        self.shared_prompts = self._set_aside = self.own_prompts = self.prompts = 0
        # Limits these copies to a number of bytes, and returns how many bytes they use.
        self.keep_prompts: Callable[[int], int] = lambda _n_bytes: 0
        self._limit: int | None = None
        self._idle = Idle(store)
        self._pause = pause
        self._prompt_read = False
        self._cancelled = False
        # Tokens since judge_routing last compared the routing, and the expert counts at that time.
        self._unjudged = 0
        self._judged: np.ndarray = np.zeros(1, np.uint32)
        # Expert counts since the last report that included counts.
        self._unreported: np.ndarray | None = None
        self.steps = 0

    def on_route(self, event: RouteEvent) -> None:
        """Let the policy decide about one MoE layer of a step, and pass its decision to the store.

        The policy chooses the precision (tier) of each expert that the router chose.
        """
        self.policy.decide(event, self.store.view, self.store.decision)
        self.store.apply(self.store.decision)
        if self.meter is not None:
            self.meter.decided(event, self.store.view, self.store.decision)

    def asks(self, phase: int) -> bool:
        """Return whether the policy chooses precisions in steps of this phase (prefill or decode).

        In other steps, the store uses the policy's default precision (tier).
        """
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

        self.used()  # keep the counts of earlier steps, which reset_counts would drop
        self.set_route(on_route)
        self.store.set_step_done(None)
        self.store.set_phase(Phase.PREFILL)
        try:
            yield
        finally:
            self.set_route()
            self.store.set_step_done(self.step_done)
            self.store.set_phase(None)
            self.store.reset_counts()
            self.store.reset_stats()
            self._prompt_read = False

    def on_route_unasked(self, event: RouteEvent) -> None:
        """Choose the precision of the experts of one MoE layer, without asking the policy.

        This is for steps in whose phase (prefill or decode) the policy makes no choices. Each
        expert gets the policy's default precision (tier), or a better precision that is in memory.
        """
        resident = self.store.view.resident_array[event.layer]
        self.store.decision.tier_array[:] = served(self.policy.wants.default_tier, resident)
        self.store.apply(self.store.decision)

    def step_done(self, step: ComputedStep) -> None:
        """Report a computed step to the policy, and start the transitions that the policy wants.

        A transition reads an expert in another precision in the background.
        """
        moves = self.learn(step)
        if moves:
            self.store.transition(moves)

    def learn(self, step: ComputedStep, unusual: bool | None = None) -> Sequence[Transition]:
        """Report a computed step to the policy, and return the transitions that the policy wants.

        The policy learns from the report. A transition (layer, expert, tier) asks the store to read
        an expert in another tier (precision).

        unusual: whether recent tokens use experts unusually, so that estimates of the quality loss
        may be wrong. None if not known. The value becomes a field of the report. If the driver has
        a loss meter (`meter`), it ignores the argument and uses the result of judge_routing.
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
                    self.meter.set_tiers(served(wants.default_tier, held))
                self.meter.add_counts(self.store.take_counts() if counts is None else counts)
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
        """Return whether estimates of the quality loss may be wrong for recent tokens.

        The quality loss of each expert in lower precision was measured with some texts. The
        measured values may be wrong for a text that uses other experts than these texts.

        The check takes place once every ROUTING_TOKENS tokens, and only if the policy has a loss
        budget. The result is None if there was no check. n_tokens: number of tokens of the step
        that has ended.
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
        """Set the function that chooses the precision (tier) of routed experts in each layer.

        route: a function that is called in every step. With None, the policy is called instead, but
        only in the phases (prefill, decode) in which it wants to choose. In other phases, experts
        get the policy's default tier.
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
        """Read experts into memory before the first token, and wait for the reads.

        first: the experts as (layer, expert, tier), where tier is the precision. progress: called
        with the share that is read, 0 to 1. The method also sets how fast the store may later
        replace experts by copies in another precision. The policy determines this rate.
        """
        self.store.set_transition_rate(self.policy.wants.transition_rate)
        if first:
            self.store.warm(first, progress)
            self.store.reset_stats()

    def begin(self, phase: Phase) -> None:
        self.follow(phase)
        self.store.set_phase(phase)

    def make_room(self, room: CRoom) -> None:
        """Divide the memory for a step between KV cache, scratch, prompt cache and expert slots.

        Called before a step is computed or a saved sequence is restored. The KV cache and scratch
        (temporary buffers) get the memory that they need. The expert slots and the prompt cache,
        which holds copies of earlier conversations, share the rest.

        room: describes the memory in use and the tokens of the step. The method sets its field
        at_once to the micro-batch size in tokens. It sets drop_scratch to 1 if scratch of earlier
        steps must be freed.
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
        """Limit the memory of expert slots, and wait for running reads into slots above the limit.

        limit: in bytes. Raises NativeError if the step is cancelled or interrupted during the wait.
        """
        self._limit = None  # until all of it is done
        while True:
            loading = self.store.loading
            if not self.store.limit(limit):
                break
            if self._is_stopped():
                raise NativeError("the step was cancelled while it waited for expert reads")
            self._pause_for(loading)
        self._limit = limit

    def _is_stopped(self) -> bool:
        """Return whether waits should end, because of a cancel or a pending interrupt."""
        return self._cancelled or interrupts.asked()

    def _pause_for(self, loading: int) -> None:
        """Sleep briefly while the store reads experts.

        loading: number of reads that were running when the caller began to wait. Raises NativeError
        if it is 0, because the caller would then wait forever.
        """
        if not loading:
            raise NativeError(
                "the expert store waits for reads of experts, but none is running (an internal "
                "error): restart the program"
            )
        self._pause()

    def clear_phase(self) -> None:
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
        """Whether the first token of an answer may have to wait for reads of experts.

        This is True for a policy that requires certain experts in memory before an answer begins.
        The token waits only if some of these experts must still be read.
        """
        return self.policy.wants.waits

    def set_prompts(self, n_bytes: int, keep: Callable[[int], int]) -> None:
        self.shared_prompts = min(n_bytes, self.shared.prompts) if self.shared else 0
        self.own_prompts, self.keep_prompts = n_bytes - self.shared_prompts, keep

    def before_answer(self) -> None:
        """Read the experts that the policy requires before an answer, and wait for the reads.

        The wait also ends if the step is cancelled or an expert cannot be read. The other reads
        then continue in the background.
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
        """Return whether any expert is being changed to another precision (tier)."""
        resident, target = self.store.states()
        return bool((resident != target).any())

    @property
    def prefetched(self) -> int:
        """Number of experts that were read into free slots while no request ran."""
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
