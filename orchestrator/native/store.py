"""The native expert store: Python's handle, with views of its memory and its callbacks."""

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
    """Return a writable view of a C struct's memory as 32-bit integers."""
    integers = (ctypes.c_int32 * (ctypes.sizeof(struct) // 4)).from_buffer(struct)
    return memoryview(integers).cast("B").cast("i")


def array_at(address: int | None, ctype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return a NumPy array that shares the native memory at an address.

    ctype: type of an element. Raises NativeError if the address is null.
    """
    count = int(np.prod(shape))
    if count == 0:
        return np.zeros(shape, np.dtype(ctype))
    if not address:
        raise NativeError("the native store returned no array: this is a bug in moe-edge")
    return np.ctypeslib.as_array((ctype * count).from_address(address)).reshape(shape)


def event_arrays(event: CEvent, spec: StoreSpec) -> tuple[np.ndarray, ...]:
    """Return NumPy views of the arrays in which the store describes the routing of a layer.

    T is `spec.max_tokens`, and k is `spec.n_expert_used`. Only the entries of the first
    `event.n_tokens` tokens are valid. The arrays are, in this order:

    - ids [T, k]: the experts of each token.
    - weights [T, k]: the routing weights of these experts.
    - tokens [T]: the index of each token in its micro-batch.
    - ahead_ids [n_ahead, T, k]: the experts that are predicted for the next n_ahead layers.
    - ahead [n_ahead, T, k]: the scores of these predictions.
    - importance [T]: the attention that each prompt token receives from its own sequence.
    - phases [T]: the phase of each token, prefill or decode.
    - sequences [T]: the sequence of each token.
    """
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
    """A native expert store, which reads experts from files into slots in memory.

    Make a store with `Store.create`, and free it with `close` or `with`. The function that is set
    with `set_route` chooses the precisions of a layer's experts. It reads `event` (the routing of
    the layer's tokens) and `view` (the experts in memory), and writes its choice to `decision`.
    These three are only valid during the call of this function.
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
        """Make a store: allocate its slots and start its I/O threads.

        The next model that is loaded with managed experts uses this store. Raises NativeError with
        the reason if the store cannot be made.
        """
        config, keep_alive = c_config(spec)
        message = ctypes.create_string_buffer(_ERROR_BYTES)
        if spec.device is not None:
            config.device = library.device_find(spec.device.encode(), message, _ERROR_BYTES)
            if not config.device:
                raise NativeError(_text(message.value))
        handle = library.store_create(ctypes.byref(config), message, _ERROR_BYTES)
        del keep_alive
        if not handle:
            raise NativeError(
                _text(message.value)
                or "the expert store (memory for experts) cannot be created, and its native code "
                "gives no reason: this is a bug in moe-edge"
            )
        return cls(library, handle, spec)

    @property
    def handle(self) -> int:
        """The address of the C object. Raises NativeError after `close`."""
        if self._handle is None:
            raise NativeError("the native store is closed")
        return self._handle

    @property
    def closed(self) -> bool:
        """Whether the native store has been freed."""
        return self._handle is None

    def set_route(
        self,
        route: RouteCallback | None,
        default_tier: int = 0,
        phases: Collection[Phase] = tuple(Phase),
    ) -> None:
        """Set the function that chooses the precision (tier) of routed experts in each MoE layer.

        The function is called in steps of the given phases. In other steps, the store requests
        every expert in default_tier without calling Python. If route is None, it does so in all
        steps.
        """
        self._route = route
        self._trampoline = ROUTE_CB(self._on_route) if route is not None else None
        mask = sum(1 << phase for phase in set(phases))
        self.library.set_callback(self.handle, self._trampoline, None, default_tier, mask)

    def set_step_done(self, done: StepCallback | None) -> None:
        """Set a function that is called after every successful step. None removes the function."""
        self._step_done = done
        self._step_trampoline = STEP_CB(self._on_step) if done is not None else None
        self.library.set_step_callback(self.handle, self._step_trampoline, None)

    def set_room(self, room: RoomCallback) -> None:
        """Set a function that makes memory available for the KV cache and for temporary buffers.

        On the CPU, the store may call it before a batch is computed or a saved sequence is
        restored. Its argument, a CRoom, tells the memory in use and the size of the batch or of the
        sequence. The function can shrink the expert cache with `Store.limit`. It returns nothing.
        If it raises an exception, the batch fails.
        """
        self._room, self._room_trampoline = room, ROOM_CB(self._on_room)
        address = ctypes.cast(self._room_trampoline, ctypes.c_void_p)
        self.library.set_room_callback(self.handle, address, None)

    def set_phase(self, phase: Phase | None) -> None:
        """Set the phase (prefill or decode) of all tokens from the next step on.

        If `phase` is None, the store determines the phase of each token from its batch.

        The method also discards the exception of a callback in an earlier step, if `check_step` has
        not raised it yet. Otherwise, `check_step` would raise this old exception after a later
        step.
        """
        self._error = None
        self.library.set_phase(self.handle, _BY_THE_BATCH if phase is None else phase)

    def sequence_end(self, sequence: int | None = None) -> None:
        """Tell the store that all tokens of a sequence were dropped; None stands for all sequences.

        The function that was set with `set_step_done` finds the sequence in `ComputedStep.ends`
        after the next step. Sequences that never had tokens in a step are not reported.
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
        except BaseException as error:  # noqa: BLE001 - exceptions cannot pass through C
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
        except BaseException as error:  # noqa: BLE001 - exceptions cannot pass through C
            self._error = error
            return 1

    @interrupts.called_from_c
    def _on_room(self, pointer: Any, _user: int | None) -> int:
        try:
            if self._room is not None:
                self._room(pointer.contents)
            return int(interrupts.asked())
        except BaseException as error:  # noqa: BLE001 - exceptions cannot pass through C
            self._error = error
            return 1

    def apply(self, decision: DecisionBuffer) -> None:
        """Pass a policy's decision for a layer to the store.

        Call this in the route callback (see `set_route`), with `Store.decision`. Do not change
        `decision` afterwards until the next call of the route callback, because the store reads its
        arrays after this callback has returned.
        """
        self._decision_header[6] = decision.n_prefetch
        self._decision_header[7] = decision.renormalize

    def begin_step(self, phase: Phase) -> None:
        """Begin a step (one pass through all layers) that llama.cpp does not compute.

        phase: prefill or decode. Steps of llama.cpp begin without this method. Call it in two
        cases:

        - In simulations and tests without llama.cpp.
        - Between two steps of llama.cpp, when experts have been read in another precision. The
          store uses the new precision only after a step has begun. The step computes nothing.
        """
        self._error = None
        self.library.begin_step(self.handle, phase)

    def check_step(self) -> None:
        """Raise the error of the last step, if it failed.

        The error is the exception of a Python callback, or a NativeError with the store's reason.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        reason = self.library.error(self.handle)
        if reason:
            raise NativeError(_text(reason))

    def cancel(self, on: bool) -> None:
        """Cancel the running step and all later steps, or let steps run again if `on` is false."""
        if self._handle is not None:
            self.library.cancel(self._handle, int(on))

    def stats(self) -> CStats:
        """Return a copy of the store's counters since its creation or the last reset_stats."""
        stats = CStats()
        self.library.get_stats(self.handle, ctypes.byref(stats))
        return stats

    def resident(self) -> np.ndarray:
        """Return the tier (precision) of each expert in memory, uint8 [n_layers, n_expert].

        The value is ABSENT if a matrix of the expert is not in memory. If its matrices have
        different tiers, the worst one counts. The result is a copy. Route callbacks should use
        `view` instead, because it is faster.
        """
        return self._of_each(self.library.get_resident, ctypes.c_uint8)

    def states(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (current tier, future tier) of each expert, both uint8 [n_layers, n_expert].

        The current tier is ABSENT for an expert that is not in memory. The future tier differs from
        the current tier while a transition reads the expert in another precision. The results are
        copies.
        """
        (resident, of_resident), (target, of_target) = self._array(_BYTE), self._array(_BYTE)
        self.library.get_states(self.handle, of_resident, of_target)
        return resident, target

    def landed(self) -> np.ndarray:
        """Return which experts have been read in another precision that is not yet in use.

        The result is bool [n_layers, n_expert]. The next step begins to use the new precision. For
        tests.
        """
        return self._of_each(self.library.get_landed, ctypes.c_uint8).astype(bool)

    def take_counts(self) -> np.ndarray:
        """Return how many tokens used each expert since the last call, uint32 [n_layers, n_expert].

        These counts are also added to the total that `taken_counts` returns.
        """
        counts = self.reset_counts()
        self._taken += counts
        return counts

    def reset_counts(self) -> np.ndarray:
        """Reset the usage counts of all experts, and return the old counts.

        The result is uint32 [n_layers, n_expert]. A usage count is the number of tokens that used
        an expert since the last reset. `take_counts` also resets the counts, and adds them to the
        total that `taken_counts` returns. This method does not change the total.
        """
        return self._of_each(self.library.take_counts, ctypes.c_uint32)

    def taken_counts(self) -> np.ndarray:
        """Return the sum of all results of `take_counts` so far, uint32 [n_layers, n_expert].

        A result of `take_counts` is the number of tokens that used each expert since its previous
        call. Later uses are added at the next call of `take_counts`. This method returns a copy.
        Safe on any thread.
        """
        taken: np.ndarray = self._taken.copy()
        return taken

    def _of_each(self, function: Any, ctype: Any) -> np.ndarray:
        """Call a C function that writes a value for each expert, and return the values as an array.

        The array is [n_layers, n_expert]. ctype: type of a value.
        """
        array, out = self._array(ctype)
        function(self.handle, out)
        return array

    def _array(self, ctype: Any) -> tuple[np.ndarray, Any]:
        """Return a new NumPy array [n_layers, n_expert], and a ctypes array that shares its memory.

        C functions get the ctypes array, because that takes a tenth of the time of a pointer to a
        NumPy array.
        """
        n_layers, n_expert = len(self.spec.layers), self.spec.n_expert
        out: Any = (ctype * (n_layers * n_expert))()
        array: np.ndarray = np.frombuffer(out, _DTYPES[ctype])
        return array.reshape(n_layers, n_expert), out

    def transition(self, wanted: Sequence[tuple[int, int, int]]) -> int:
        """Start to read experts in another precision (tier) in the background.

        wanted: (layer, expert, new tier) of each expert. Returns the number of experts that the
        store accepts. It rejects an expert if no slots are free for the new tier. An expert is
        computed in its old precision until a step begins after the read.
        """
        items = _items(wanted)
        admitted = self.library.transition(self.handle, items, len(wanted))
        if admitted < 0:
            raise NativeError(
                "the policy asked for an expert or a precision that the model does not have. This "
                "is a bug in the policy"
            )
        return int(admitted)

    def set_transition_rate(self, bytes_per_s: int) -> None:
        """Limit the bytes per second that transitions read; 0 means no limit.

        A transition reads an expert in another precision in the background. The expert's current
        precision stays in use meanwhile.
        """
        self.library.set_transition_rate(self.handle, bytes_per_s)

    def misses(self) -> str:
        """Return how a store on a GPU handles experts that are not in GPU memory when needed.

        "copy" copies a missing expert to the GPU, "compute" computes it on the host, and "auto"
        chooses the faster way for each expert. The mode can differ from the configured one, because
        "auto" is replaced by "copy" if the speed of copies is unknown.
        """
        return str(Misses.MODES[self.stats().misses])

    def limit(self, n_bytes: int) -> int:
        """Limit the memory of the expert cache to n_bytes, by evicting experts.

        A limit above the planned size of the cache means no limit. Return how many bytes above the
        limit are still in use, for example because experts are being read into this memory.

        Call this method between steps, on any thread. The functions that were set with `set_room`
        and `set_step_done` may call it. It raises NativeError, and keeps the previous limit, in
        three cases:

        - A step or `warm` is running.
        - The slots are on a GPU.
        - n_bytes is less than one slot of each group.
        """
        message = ctypes.create_string_buffer(_ERROR_BYTES)
        to_come = self.library.store_limit(self.handle, n_bytes, message, _ERROR_BYTES)
        if to_come < 0:
            raise NativeError(_text(message.value))
        return int(to_come)

    @property
    def loading(self) -> int:
        """Number of expert matrices that are being read now. Safe on any thread."""
        return int(self.library.store_loading(self.handle))

    @property
    def tokens_done(self) -> float:
        """Progress of the running batch, or of the last batch, as a number of tokens.

        The number grows with each computed MoE layer, so it may be fractional. Safe on any thread.
        """
        return 0.0 if self._handle is None else float(self.library.tokens_done(self._handle))

    def reset_stats(self) -> None:
        """Set all counters that `stats` returns to zero."""
        self.library.reset_stats(self.handle)

    @property
    def calls(self) -> int:
        """Number of times that the store has called the route callback.

        The route callback is the function that was set with `set_route`. It chooses the precision
        of each expert that a layer's tokens use. The store calls it once for each MoE layer of a
        step.
        """
        return self._calls

    def callback_us(self, since: int = 0) -> float | None:
        """Return the median duration of a call of the route callback, in microseconds.

        The route callback is the function that was set with `set_route`. The store calls it in each
        MoE layer of a step. since: the number of first calls to leave out. The median covers at
        most the latest 4096 calls. The result is None if no calls are left.
        """
        n = self._calls - since
        return percentile([*self._ring][-n:], 50) / 1000.0 if n > 0 else None

    def warm(
        self,
        wanted: Sequence[tuple[int, int, int]],
        progress: Callable[[float], None] | None = None,
    ) -> int:
        """Read experts into free slots, and wait for the reads. Return how many were read.

        wanted: (layer, expert, tier) of the experts. progress: gets the share that is read, 0 to 1.
        Raises NativeError if an expert cannot be read, and any exception of `progress`.
        """
        items = _items(wanted)
        stopped = False

        @interrupts.called_from_c
        def report(done: int, total: int, _user: int | None) -> None:
            nonlocal stopped
            try:
                if progress is not None and not stopped:
                    progress(done / max(1, total))
            except BaseException as error:  # noqa: BLE001 - raised again after C has returned
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
            raise NativeError(_text(reason) if reason else "the experts cannot be read")
        return int(loaded)

    def warm_host(self) -> None:
        """Read every expert in every precision into the host cache, and wait for the reads.

        The host cache is host memory between the files and the slots of a store on a GPU. Call this
        between steps.
        """
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
        """Read one expert into free slots, and wait for the read. Nothing is evicted for it.

        Returns True if the expert was read, and False if no slots were free. Returns None if
        reading failed or steps are cancelled. Call this between steps, on any thread.
        """
        items = _items([(layer, expert, tier)])
        loaded = int(self.library.warm(self.handle, items, 1, PROGRESS_CB(), None))
        return None if loaded < 0 else loaded > 0

    @property
    def full(self) -> bool:
        """Whether no expert slots are free."""
        stats = self.stats()
        return bool(stats.slot_bytes_in_use >= stats.slot_bytes)

    def check(self) -> None:
        """Raise NativeError if the store's internal state is inconsistent. For tests."""
        message = ctypes.create_string_buffer(_ERROR_BYTES)
        if self.library.check(self.handle, message, _ERROR_BYTES) != 0:
            raise NativeError(_text(message.value))

    def close(self) -> None:
        """Free the native store. The caller must free the store's llama_context first."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._route = self._step_done = self._room = None
            self.library.store_free(handle)


def _items(wanted: Sequence[tuple[int, int, int]]) -> ctypes.Array[CPrefetch]:
    """Return (layer, expert, tier) triples as a C array. The array has at least one element."""
    return (CPrefetch * max(1, len(wanted)))(*(CPrefetch(*each) for each in wanted))


def _names(pointer: Any, n: int) -> tuple[int, ...]:
    """Return n sequence numbers. C passes a null pointer if n is 0."""
    return tuple(pointer[:n]) if n else ()


def _text(message: bytes) -> str:
    return message.decode("utf-8", "replace")
