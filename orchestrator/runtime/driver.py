"""The loop between a policy and its store, live and in replay.

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
from orchestrator.memory.shared import CELL_STEP, SharedMemory
from orchestrator.native import FAILED, CRoom, Store
from orchestrator.policy import PLAIN, Policy
from orchestrator.policy.base import Learned
from orchestrator.runtime.idle import Idle, likely
from orchestrator.runtime.loss_meter import LossMeter

# Between two looks at reads that are waited for, in seconds.
_PAUSE_S = 0.0005


class PlainDriver:
    """What goes with the steps of a model whose experts nobody manages: nothing."""

    store: Store | None = None
    policy: Policy | None = None
    may_wait = False
    prompts = 0  # bytes of copies that give way, as far as that is known
    # Adds up what lower precisions are foreseen to cost, where that is known.
    meter: LossMeter | None = None

    def prepare(
        self, first: Sequence[Transition], progress: Callable[[float], None] | None
    ) -> None:
        """Once the model has loaded: reads what is wanted in memory before the first token, and
        begins to listen. progress gets the share that is done."""

    def set_prompts(self, n_bytes: int, keep: Callable[[int], int]) -> None:
        """Copies of prompts may take so many bytes. keep: keeps them within fewer, and returns
        what they take."""

    def begin(self, phase: Phase) -> None:
        """Before a decode whose tokens are all of this phase."""

    def check(self, status: int) -> None:
        """After a decode, with its status: raises what went wrong in a callback or in the
        store."""

    def between_steps(self) -> None:
        """After steps whose phase begin said: later ones have the phase that their batch shows."""

    def follow(self, phase: Phase) -> None:
        """Before a step of this phase whose tokens' own phases their batch shows: where an answer
        begins, wait for what its first token needs."""

    def stop_waiting(self) -> None:
        """Let no answer wait any more; from any thread."""

    def few_experts(self) -> AbstractContextManager[None]:
        """Limit steps in this block to one expert of each layer in each tier that the policy may
        request or that has experts in memory. The policy and all counters ignore these steps."""
        return nullcontext()

    def idle(self, used: np.ndarray | None, settle: Callable[[], None]) -> None:
        """Read experts that are likely to be used into free slots, in the background, until
        end_idle is called. used: how often tokens used each expert, float64 [n_layers, n_expert],
        None if that is not known. settle: returns once no step is computed any more."""

    def end_idle(self) -> None:
        """Before a step after idle, and before the store is freed; from any thread."""

    def tokens_done(self) -> float:
        """As Store.tokens_done; 0 where no store sees the steps."""
        return 0.0

    def used(self) -> np.ndarray | None:
        """How many tokens used each expert since the start, uint32 [n_layers, n_expert]; None where
        nobody counts. From any thread."""
        return None

    @property
    def keeps_sequences(self) -> bool:
        """Whether save_sequence may give something."""
        return False

    def save_sequence(self, sequence: int) -> bytes | None:
        """What goes with the tokens of a sequence that is kept for later; None where nothing
        does."""
        return None

    def restore_sequence(self, sequence: int, state: bytes) -> None:
        """A sequence goes on from kept tokens; state: what save_sequence gave for them. Raises
        PolicyError for a damaged one."""

    def cancel(self, on: bool) -> None:
        """Makes the running step stop early; stays so until called with False."""

    def sequence_end(self, sequence: int | None = None) -> None:
        """A sequence was dropped, or all that there are."""

    def change(self, name: str, value: Any) -> bool:
        """Change a live setting of the policy. False where the policy lacks it. Raises SettingError
        and PolicyError, and changes nothing then."""
        return False

    def report(self) -> dict[str, Any]:
        """What the policy knows about its own work."""
        return {}

    @property
    def policy_name(self) -> str:
        """The name of the policy."""
        return PLAIN

    def learned(self) -> Learned:
        """What the policy knows that the next run may use."""
        return Learned()


class Driver(PlainDriver):
    """One policy and the store that it decides for. Another policy with the same slots may take
    its place between two steps."""

    store: Store
    policy: Policy

    def __init__(
        self, policy: Policy, store: Store, pause: Callable[[], object] = lambda: sleep(_PAUSE_S)
    ) -> None:
        """pause: lets a little time pass, in which reads go on."""
        self.policy = policy
        self.store = store
        # Hears of sequences that go on from kept tokens: (sequence, state).
        self.on_restored: Callable[[int, bytes], None] | None = None
        # What slots give way to, where memory is given out as it is used.
        self.shared: SharedMemory | None = None
        # Copies of prompts share it as well, and give way to cells before slots do: the most bytes
        # of it that they take, what of that is set aside, what is theirs beside it, what they take
        # now, and who keeps them within so many.
        self.shared_prompts = self._set_aside = self.own_prompts = self.prompts = 0
        self.keep_prompts: Callable[[int], int] = lambda _n_bytes: 0
        self._limit: int | None = None
        self._idle = Idle(store)
        self._pause = pause
        self._prompt_read = False
        self._cancelled = False
        # Tokens since the routing was last judged, and what tokens had used until then.
        self._unjudged = 0
        self._judged: np.ndarray = np.zeros(1, np.uint32)
        # Counts of steps whose reports went without them.
        self._untold: np.ndarray | None = None
        # Steps that the policy was told of.
        self.steps = 0

    def on_route(self, event: RouteEvent) -> None:
        """Once per MoE layer: the policy decides, the store acts."""
        self.policy.decide(event, self.store.view, self.store.decision)
        self.store.apply(self.store.decision)
        if self.meter is not None:
            self.meter.decided(event, self.store.view, self.store.decision)

    def asks(self, phase: int) -> bool:
        """Whether the policy is asked in the steps of a phase."""
        return phase in self.policy.wants.asked_in

    @contextmanager
    def few_experts(self) -> Iterator[None]:
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
        """What the store does by itself where the policy is not asked: its default tier, or a
        better one that is in memory."""
        resident = self.store.view.resident_array[event.layer]
        self.store.decision.tier_array[:] = served(self.policy.wants.default_tier, resident)
        self.store.apply(self.store.decision)

    def step_done(self, step: ComputedStep) -> None:
        """Once per step: the policy learns, and may start transitions."""
        moves = self.learn(step)
        if moves:
            self.store.transition(moves)

    def learn(self, step: ComputedStep, unusual: bool | None = None) -> Sequence[Transition]:
        """Tell the policy of a step; return the transitions that it asks for. unusual: as of
        StepReport, for a policy whose meter is elsewhere."""
        policy = self.policy
        wants, told = policy.wants, step.phase in policy.wants.told_in
        counts = self.store.take_counts() if wants.counts else None
        resident = target = None
        if wants.states and told:
            resident, target = self.store.states()
        if self.meter is not None:
            if self.meter.costs and not self.asks(step.phase):
                if told or self.meter.needs_tiers:  # what moves counts where it was last seen
                    held = self.store.resident() if resident is None else resident
                    self.meter.holds(served(wants.default_tier, held))
                self.meter.counted(self.store.take_counts() if counts is None else counts)
            self.meter.step_done(step.phase, step.n_tokens)
            unusual = self.judge_routing(step.n_tokens)
        if counts is not None:
            counts = counts if self._untold is None else counts + self._untold
            counts, self._untold = (counts, None) if told else (None, counts)
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
        """Count n_tokens of a step. Once they are ROUTING_TOKENS, return whether these tokens used
        experts in another way than the texts of the loss table, for a policy that spends a loss;
        else None. Such a policy spends half of its limit then, which the meter notes."""
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
        """Lets the policy decide in the way it wants: in the steps in which it is asked, and by
        its default tier in the others. route: what is called instead, in every step."""
        if route is not None:
            self.store.set_route(route, self.policy.wants.default_tier)
            return
        wants = self.policy.wants
        asked = self.on_route if wants.asked_in else None
        self.store.set_route(asked, wants.default_tier, wants.asked_in)

    def load_first(
        self, first: Sequence[Transition], progress: Callable[[float], None] | None = None
    ) -> None:
        """Reads what the policy wants in memory before the first token, and sets how fast it may
        exchange that later."""
        self.store.set_transition_rate(self.policy.wants.transition_rate)
        if first:
            self.store.warm(first, progress)
            self.store.reset_stats()

    def begin(self, phase: Phase) -> None:
        self.follow(phase)
        self.store.set_phase(phase)

    def make_room(self, room: CRoom) -> None:
        """Before a batch is computed or a state brought back: copies of prompts give way to the
        cells that it takes, and slots to those, to its scratch, to the tokens behind it and to one
        more copy; or they come back."""
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
        if left < shared.least_slots:  # beside the scratch of a prompt that was given up
            room.drop_scratch = 1
            left = max(shared.least_slots, shared.slots(end, room.at_once, 0, width))
        if not room.n_bytes:  # else one of the copies may be what is brought back
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
        """Limits the slots to this many bytes, and waits for the reads into slots beyond them.

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
        """Whether whoever waits for the store has to give up."""
        return self._cancelled or interrupts.asked()

    def _pause_for(self, loading: int) -> None:
        """Lets a little time pass, in which the store reads.

        loading: Store.loading, as it was before the caller found out that it has to wait. Raises
        NativeError if it is 0: then no read is left that could end the wait.
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
        """Whether the first token of an answer may wait for the policy."""
        return self.policy.wants.waits

    def set_prompts(self, n_bytes: int, keep: Callable[[int], int]) -> None:
        self.shared_prompts = min(n_bytes, self.shared.prompts) if self.shared else 0
        self.own_prompts, self.keep_prompts = n_bytes - self.shared_prompts, keep

    def before_answer(self) -> None:
        """After a prompt, waits for the transitions that the policy requires before an answer.

        If the step is cancelled or an expert cannot be read, the other transitions go on in the
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
        resident, target = self.store.states()
        return bool((resident != target).any())

    @property
    def brought(self) -> int:
        """Experts that were read while nothing was asked for."""
        return self._idle.brought

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
