"""The native store, seen from Python: one Store owns its memory views and callbacks."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np

from gguf_tools import interrupts
from gguf_tools.closing import Closing
from orchestrator.errors import NativeError
from orchestrator.events import (
    MAX_PREFETCH,
    ComputedStep,
    DecisionBuffer,
    Phase,
    RouteEvent,
    StoreView,
    percentile,
)
from orchestrator.native.abi import (
    PROGRESS_CB,
    ROOM_CB,
    ROUTE_CB,
    STEP_CB,
    CEvent,
    CPrefetch,
    CRoom,
    CStats,
    CStep,
)
from orchestrator.native.library import Library
from orchestrator.native.spec import Misses, StoreSpec, c_config


def ints(struct: ctypes.Structure) -> memoryview:
    """The struct's memory as 32-bit integers."""
    integers = (ctypes.c_int32 * (ctypes.sizeof(struct) // 4)).from_buffer(struct)
    return memoryview(integers).cast("B").cast("i")


def array_at(address: int | None, ctype: Any, shape: tuple[int, ...]) -> np.ndarray:
    count = int(np.prod(shape))
    if count == 0:
        return np.zeros(shape, np.dtype(ctype))
    if not address:
        raise NativeError("the native store handed out a null array")
    return np.ctypeslib.as_array((ctype * count).from_address(address)).reshape(shape)


def event_arrays(event: CEvent, spec: StoreSpec) -> tuple[np.ndarray, ...]:
    """The store's own arrays behind a route event, writable: ids, weights [max_tokens, k],
    tokens [max_tokens], ahead_ids, ahead [n_ahead, max_tokens, k], importance, phases and
    sequences [max_tokens]."""
    rows = (spec.max_tokens, spec.n_expert_used)
    ahead = (spec.n_ahead, *rows)
    return (
        array_at(event.ids, ctypes.c_int32, rows),
        array_at(event.weights, ctypes.c_float, rows),
        array_at(event.tokens, ctypes.c_int32, (spec.max_tokens,)),
        array_at(event.ahead_ids, ctypes.c_int32, ahead),
        array_at(event.ahead, ctypes.c_float, ahead),
        array_at(event.importance, ctypes.c_float, (spec.max_tokens,)),
        array_at(event.phases, ctypes.c_uint8, (spec.max_tokens,)),
        array_at(event.sequences, ctypes.c_int32, (spec.max_tokens,)),
    )


_BYTE = ctypes.c_uint8
_DTYPES: dict[Any, Any] = {
    ctypes.c_uint8: np.dtype(np.uint8),
    ctypes.c_uint32: np.dtype(np.uint32),
    ctypes.c_uint64: np.dtype(np.uint64),
    ctypes.c_double: np.dtype(np.float64),
}
_ERROR_BYTES = 512
_RING = 4096

_BY_THE_BATCH = -1
_EVERY_SEQUENCE = -1

RouteCallback = Callable[[RouteEvent], None]
StepCallback = Callable[[ComputedStep], None]
RoomCallback = Callable[[CRoom], None]


class Store(Closing):
    """One native store. Make it with Store.create; free it with close or `with`.

    event, view and decision are this store's buffers, alive as long as the store;
    their contents are valid while a route callback runs.
    """

    def __init__(self, library: Library, handle: int, spec: StoreSpec) -> None:
        self.library = library
        self.spec = spec
        self._handle: int | None = handle
        self._error: BaseException | None = None
        self._route: RouteCallback | None = None
        self._trampoline: Any = None
        self._step_done: StepCallback | None = None
        self._step_trampoline: Any = None
        self._room: RoomCallback | None = None
        self._room_trampoline: Any = None
        self._ring = deque[int](maxlen=_RING)
        self._calls = 0
        self._taken = np.zeros((len(spec.layers), spec.n_expert), np.uint32)
        event = library.store_event(handle).contents
        decision = library.store_decision(handle).contents
        self.event = RouteEvent(*event_arrays(event, spec))
        resident, missing = (
            array_at(each, ctypes.c_uint8, self._taken.shape)
            for each in (event.resident, event.missing)
        )
        self.view = StoreView(resident, missing)
        self._event_header = ints(event)[:7]
        tier = array_at(decision.tier, ctypes.c_uint8, (spec.n_expert,))
        passing = array_at(decision.passing, ctypes.c_uint8, (spec.n_expert,))
        prefetch = array_at(decision.prefetch, ctypes.c_int64, (MAX_PREFETCH,))
        self.decision = DecisionBuffer(tier, passing, prefetch)
        self._decision_header = ints(decision)

    @classmethod
    def create(cls, library: Library, spec: StoreSpec) -> Store:
        """Allocates pools and starts I/O threads. The next model that loads with managed tensors
        takes the store. Raises NativeError with the store's reason."""
        config, keep_alive = c_config(spec)
        message = ctypes.create_string_buffer(_ERROR_BYTES)
        if spec.device is not None:
            config.device = library.device_find(spec.device.encode(), message, _ERROR_BYTES)
            if not config.device:
                raise NativeError(_text(message.value))
        handle = library.store_create(ctypes.byref(config), message, _ERROR_BYTES)
        del keep_alive
        if not handle:
            raise NativeError(_text(message.value) or "the native store could not be created")
        return cls(library, handle, spec)

    @property
    def handle(self) -> int:
        if self._handle is None:
            raise NativeError("the native store is closed")
        return self._handle

    @property
    def closed(self) -> bool:
        """Whether the native store is gone."""
        return self._handle is None

    def set_route(
        self,
        route: RouteCallback | None,
        default_tier: int = 0,
        phases: Collection[Phase] = tuple(Phase),
    ) -> None:
        """Calls route for every MoE layer of the steps in these phases. The other steps, and all
        of them where it is None, ask for default_tier without Python."""
        self._route = route
        self._trampoline = ROUTE_CB(self._on_route) if route is not None else None
        mask = sum(1 << phase for phase in set(phases))
        self.library.set_callback(self.handle, self._trampoline, None, default_tier, mask)

    def set_step_done(self, done: StepCallback | None) -> None:
        """Calls done at the end of every step of a model that was computed without an error."""
        self._step_done = done
        self._step_trampoline = STEP_CB(self._on_step) if done is not None else None
        self.library.set_step_callback(self.handle, self._step_trampoline, None)

    def set_room(self, room: RoomCallback) -> None:
        """Calls room before a batch is computed on the CPU, and before a state is brought back,
        where it takes memory that was not given: slots may give way in it (limit)."""
        self._room, self._room_trampoline = room, ROOM_CB(self._on_room)
        address = ctypes.cast(self._room_trampoline, ctypes.c_void_p)
        self.library.set_room_callback(self.handle, address, None)

    def set_phase(self, phase: Phase | None) -> None:
        """Set the phase of all tokens from the next step on; None infers it from the batch.

        The server core replaces this before each of its steps. Clears an exception that a callback
        raised in an earlier step and that was not reported.
        """
        self._error = None
        self.library.set_phase(self.handle, _BY_THE_BATCH if phase is None else phase)

    def sequence_end(self, sequence: int | None = None) -> None:
        """Report with the next step that a sequence was dropped; None: every sequence.

        The report leaves out sequences that no reported step had tokens of.
        """
        self.library.sequence_end(self.handle, _EVERY_SEQUENCE if sequence is None else sequence)

    @interrupts.called_from_c
    def _on_route(self, _user: int | None) -> int:
        start_ns = perf_counter_ns()
        try:
            event = self.event
            (
                event.layer,
                event.phase,
                event.n_tokens,
                event.n_ahead,
                event.has_importance,
                n_used,
                event.step,
            ) = self._event_header.tolist()
            if n_used != event.k:
                event.use(n_used)
            decision = self.decision
            decision.n_prefetch = 0
            decision.renormalize = False
            route = self._route
            if route is not None:
                route(event)
            return int(interrupts.asked())
        except BaseException as error:  # noqa: BLE001 - nothing may unwind through C
            self._error = error
            return 1
        finally:
            self._ring.append(perf_counter_ns() - start_ns)
            self._calls += 1

    @interrupts.called_from_c
    def _on_step(self, pointer: Any, _user: int | None) -> int:
        try:
            step: CStep = pointer.contents
            if self._step_done is not None:
                self._step_done(
                    ComputedStep(
                        step.step,
                        Phase(step.phase),
                        step.n_tokens,
                        float(step.us),
                        _names(step.starts, step.n_starts),
                        _names(step.prompt_ends, step.n_prompt_ends),
                        _names(step.ends, step.n_ends),
                    )
                )
            return int(interrupts.asked())
        except BaseException as error:  # noqa: BLE001 - nothing may unwind through C
            self._error = error
            return 1

    @interrupts.called_from_c
    def _on_room(self, pointer: Any, _user: int | None) -> int:
        try:
            if self._room is not None:
                self._room(pointer.contents)
            return int(interrupts.asked())
        except BaseException as error:  # noqa: BLE001 - nothing may unwind through C
            self._error = error
            return 1

    def apply(self, decision: DecisionBuffer) -> None:
        """Hands the decision over; native acts on it when the route callback returns."""
        self._decision_header[6] = decision.n_prefetch
        self._decision_header[7] = decision.renormalize

    def begin_step(self, phase: Phase) -> None:
        """A step of a store without a model begins; with one, the context does it."""
        self._error = None
        self.library.begin_step(self.handle, phase)

    def check_step(self) -> None:
        """After a step that failed: raises what a callback raised, or NativeError with the store's
        own reason. Nothing where the last step did not fail."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        reason = self.library.error(self.handle)
        if reason:
            raise NativeError(_text(reason))

    def cancel(self, on: bool) -> None:
        """Makes the running step stop early; stays set until called with False."""
        if self._handle is not None:
            self.library.cancel(self._handle, int(on))

    def stats(self) -> CStats:
        """The counters since creation or reset_stats; a copy."""
        stats = CStats()
        self.library.get_stats(self.handle, ctypes.byref(stats))
        return stats

    def resident(self) -> np.ndarray:
        """uint8 [n_layers, n_expert], a copy: the best tier of which every matrix is in memory,
        or ABSENT. At any time; a route callback has the view."""
        return self._of_each(self.library.get_resident, ctypes.c_uint8)

    def states(self) -> tuple[np.ndarray, np.ndarray]:
        """(resident, target), uint8 [n_layers, n_expert], copies: the tier that each expert is in,
        or ABSENT, and the tier that a transition brings, the same one where none is under way."""
        (resident, of_resident), (target, of_target) = self._array(_BYTE), self._array(_BYTE)
        self.library.get_states(self.handle, of_resident, of_target)
        return resident, target

    def landed(self) -> np.ndarray:
        """bool [n_layers, n_expert]: whether a transition is complete, so that the next step
        boundary publishes it. For tests."""
        return self._of_each(self.library.get_landed, ctypes.c_uint8).astype(bool)

    def take_counts(self) -> np.ndarray:
        """uint32 [n_layers, n_expert]: tokens routed to each expert since the last call."""
        counts = self.forget_counts()
        self._taken += counts
        return counts

    def forget_counts(self) -> np.ndarray:
        """As take_counts, and what it returns is counted nowhere."""
        return self._of_each(self.library.take_counts, ctypes.c_uint32)

    def taken_counts(self) -> np.ndarray:
        """uint32 [n_layers, n_expert], a copy: all that take_counts ever returned. From any
        thread."""
        taken: np.ndarray = self._taken.copy()
        return taken

    def _of_each(self, function: Any, ctype: Any) -> np.ndarray:
        """What a C function writes about each expert: [n_layers, n_expert]."""
        array, out = self._array(ctype)
        function(self.handle, out)
        return array

    def _array(self, ctype: Any) -> tuple[np.ndarray, Any]:
        """[n_layers, n_expert] for a C function to fill, and the same memory as C takes it: a
        ctypes array costs a step a tenth of a pointer to an array's data."""
        n_layers, n_expert = len(self.spec.layers), self.spec.n_expert
        out: Any = (ctype * (n_layers * n_expert))()
        array: np.ndarray = np.frombuffer(out, _DTYPES[ctype])
        return array.reshape(n_layers, n_expert), out

    def transition(self, wanted: Sequence[tuple[int, int, int]]) -> int:
        """Starts to bring (layer, expert, tier) in the background; returns how many were
        admitted. What is admitted becomes visible at a later step boundary."""
        items = _items(wanted)
        admitted = self.library.transition(self.handle, items, len(wanted))
        if admitted < 0:
            raise NativeError("a transition names an expert or a tier that the model does not have")
        return int(admitted)

    def set_transition_rate(self, bytes_per_s: int) -> None:
        """How fast transitions may read; 0 for no limit."""
        self.library.set_transition_rate(self.handle, bytes_per_s)

    def misses(self) -> str:
        """How misses are served: the configured way, or "copy" if that is not possible."""
        return str(Misses.MODES[self.stats().misses])

    def limit(self, n_bytes: int) -> int:
        """How many bytes slots may take from now on, at most what they were planned with. Experts
        that are next to be evicted go, and memory goes back to the system in pieces of 2 MiB.
        Returns the bytes of slots that are still to come: a read or a transition holds them, or,
        in a store without a model, a step. Between steps, from any thread, and from the step
        callback. Raises
        NativeError, and nothing has changed, within a step or a warm start, below one slot of each
        group, and where slots are on a device."""
        message = ctypes.create_string_buffer(_ERROR_BYTES)
        to_come = self.library.store_limit(self.handle, n_bytes, message, _ERROR_BYTES)
        if to_come < 0:
            raise NativeError(_text(message.value))
        return int(to_come)

    @property
    def loading(self) -> int:
        """How many matrices are being loaded, transitions included. From any thread."""
        return int(self.library.store_loading(self.handle))

    @property
    def tokens_done(self) -> float:
        """How many tokens of the running batch are computed, or of the last one between two. Each
        MoE layer of the running micro-batch adds its share. From any thread."""
        return 0.0 if self._handle is None else float(self.library.tokens_done(self._handle))

    def reset_stats(self) -> None:
        self.library.reset_stats(self.handle)

    @property
    def calls(self) -> int:
        """Route callbacks so far."""
        return self._calls

    def callback_us(self, since: int = 0) -> float | None:
        """The median of the Python time of the route callbacks after number `since` (the latest
        4096 of them at most), in microseconds; None without any."""
        n = self._calls - since
        return percentile([*self._ring][-n:], 50) / 1000.0 if n > 0 else None

    def warm(
        self,
        wanted: Sequence[tuple[int, int, int]],
        progress: Callable[[float], None] | None = None,
    ) -> int:
        """Loads (layer, expert, tier) triples into free slots; returns how many went in."""
        items = _items(wanted)
        stopped = False

        @interrupts.called_from_c
        def report(done: int, total: int, _user: int | None) -> None:
            nonlocal stopped
            try:
                if progress is not None and not stopped:
                    progress(done / max(1, total))
            except BaseException as error:  # noqa: BLE001 - raised below, once C has returned
                interrupts.hand_over(error)
                stopped = True
            if stopped or interrupts.asked():
                stopped = True
                self.cancel(True)

        try:
            with interrupts.held():
                loaded = self.library.warm(
                    self.handle, items, len(wanted), PROGRESS_CB(report), None
                )
        finally:
            if stopped:
                self.cancel(False)
        if loaded < 0:
            reason = self.library.error(self.handle)
            raise NativeError(_text(reason) if reason else "the experts could not be loaded")
        return int(loaded)

    def warm_host(self) -> None:
        """Read every expert in every precision into the host memory behind a device, best precision
        last, as far as that memory goes. Experts in the device's slots stay there. Call it between
        two steps; it blocks until the reads are done."""
        spec = self.spec
        for tier in reversed(range(spec.n_tiers)):
            for layer in range(len(spec.layers)):
                experts = [(layer, e, tier, 0, 1) for e in range(spec.n_expert)]
                items = (CPrefetch * spec.n_expert)(*(CPrefetch(*each) for each in experts))
                self.library.prefetch(self.handle, items, spec.n_expert)
                while self.library.store_loading(self.handle):
                    interrupts.check()
                    time.sleep(1e-3)

    def bring(self, layer: int, expert: int, tier: int) -> bool | None:
        """Loads one expert into slots that are free, as far as there are; from any thread, between
        steps. Returns whether anything was loaded, None where it cannot be: it could not be read,
        or steps are cancelled."""
        items = _items([(layer, expert, tier)])
        loaded = int(self.library.warm(self.handle, items, 1, PROGRESS_CB(), None))
        return None if loaded < 0 else loaded > 0

    @property
    def full(self) -> bool:
        """Whether every slot that may be used is in use."""
        stats = self.stats()
        return bool(stats.slot_bytes_in_use >= stats.slot_bytes)

    def check(self) -> None:
        """Raises NativeError where an invariant of the store does not hold. For tests."""
        message = ctypes.create_string_buffer(_ERROR_BYTES)
        if self.library.check(self.handle, message, _ERROR_BYTES) != 0:
            raise NativeError(_text(message.value))

    def close(self) -> None:
        """Frees the native store; the llama_context that used it must be gone before."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._route = self._step_done = self._room = None
            self.library.store_free(handle)


def _items(wanted: Sequence[tuple[int, int, int]]) -> ctypes.Array[CPrefetch]:
    """(layer, expert, tier) triples for C; one item where there are none."""
    return (CPrefetch * max(1, len(wanted)))(*(CPrefetch(*each) for each in wanted))


def _names(pointer: Any, n: int) -> tuple[int, ...]:
    """n sequence names; C may have a null pointer where there are none."""
    return tuple(pointer[:n]) if n else ()


def _text(message: bytes) -> str:
    return message.decode("utf-8", "replace")
