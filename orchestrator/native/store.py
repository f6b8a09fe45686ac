"""The native store, seen from Python: one Store owns its memory views and route callback."""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from orchestrator.errors import NativeError
from orchestrator.events import (
    MAX_PREFETCH,
    DecisionBuffer,
    Phase,
    RouteEvent,
    StoreView,
    percentile,
)
from orchestrator.native.abi import (
    ABI_VERSION,
    DIRECT_IO,
    EXACT_TIERS,
    FUNCTIONS,
    PROGRESS_CB,
    ROUTE_CB,
    SIMULATED,
    STRUCT_BYTES,
    CConfig,
    CEvent,
    CGroup,
    CLayer,
    CPrefetch,
    CStats,
)

_ERROR_BYTES = 512
_RING = 4096

RouteCallback = Callable[[RouteEvent], None]


@dataclass(frozen=True, slots=True)
class Slices:
    """Where the experts of one (layer, kind, tier) lie; see struct moe_edge_slices."""

    file: int
    offset: int
    expert_bytes: int
    type: int
    group: int


@dataclass(frozen=True, slots=True)
class Misses:
    """How a store on a device serves what the device lacks, where a layer has few tokens: "copy",
    "read", "compute" or "auto". For auto, the bytes of weights that each way takes in a second, 0
    where it cannot be had, and the microseconds that it takes the host and the device to wait for
    each other. threads: of the host, that compute."""

    mode: str = "copy"
    copy: float = 0.0
    read: float = 0.0
    compute: float = 0.0
    round_trip_us: float = 0.0
    threads: int = 1

    MODES: ClassVar = ("copy", "read", "compute", "auto")  # by number


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Everything a store is built from.

    layers: (il, {(kind, tier): Slices}) for each MoE layer in order, tiers numbered
    best first without gaps; groups: (slot_bytes, n_slots). n_passing[group]: slots that
    passing requests may take from the others; 1 where it is empty. importance_window: token
    importance from the last W queries; 0 none, -1 all of them. exact_tiers: a request drops
    a better copy.
    """

    files: tuple[Path, ...]
    layers: tuple[tuple[int, dict[tuple[int, int], Slices]], ...]
    groups: tuple[tuple[int, int], ...]
    budget_bytes: int
    n_tiers: int
    n_expert: int
    n_expert_used: int
    max_tokens: int
    n_ahead: int
    n_io_threads: int
    direct_io: bool = True
    n_passing: tuple[int, ...] = ()
    importance_window: int = 0
    exact_tiers: bool = False
    device: str | None = None  # whose memory the slots are; None for the host's
    host_bytes: int = 0  # the cache of experts behind a device
    misses: Misses = Misses()
    simulated: bool = False  # no file is opened; see orchestrator.native.simulation


class Library:
    """The moe_edge_* functions of a loaded llama library, ABI checked.

    Raises NativeError where the library is the stock one or another version.
    """

    def __init__(self, lib: ctypes.CDLL) -> None:
        if sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
            raise NativeError("moe-edge needs a 64-bit little-endian machine")
        for struct, size in STRUCT_BYTES.items():
            if ctypes.sizeof(struct) != size:
                raise NativeError(
                    f"{struct.__name__} measures {ctypes.sizeof(struct)} bytes, not {size}"
                )
        self.lib = lib
        found = self._find("moe_edge_abi_version")()
        if found != ABI_VERSION:
            raise NativeError(
                f"the installed llama_cpp has moe-edge ABI {found}, this Python code needs "
                f"{ABI_VERSION}: run `make build`"
            )
        for name, (restype, argtypes) in FUNCTIONS.items():
            function = self._find(name)
            function.restype = restype
            function.argtypes = argtypes
            setattr(self, name.removeprefix("moe_edge_"), function)

    def _find(self, name: str) -> Any:
        # A symbol of a library that this one depends on (ggml-cpu) is found through it.
        try:
            return self.lib[name]
        except AttributeError:
            raise NativeError(
                "the installed llama_cpp is the stock package, without the expert store: "
                f"run `make build` (missing symbol {name})"
            ) from None

    def managed_architectures(self) -> tuple[str, ...]:
        """The architectures whose experts a store can manage, as GGUF names them."""
        names = takewhile(bool, map(self.architecture, count()))
        return tuple(name.decode() for name in names)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Store:
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
        self._ring = array("q", bytes(8 * _RING))
        self._calls = 0
        event = library.store_event(handle).contents
        decision = library.store_decision(handle).contents
        self.event, self.view = _event_views(event, spec)
        self._event_header = _ints(event)[:7]
        tier = _array(decision.tier, ctypes.c_uint8, (spec.n_expert,))
        passing = _array(decision.passing, ctypes.c_uint8, (spec.n_expert,))
        prefetch = _array(decision.prefetch, ctypes.c_int64, (MAX_PREFETCH,))
        self.decision = DecisionBuffer(tier, passing, prefetch)
        self._decision_header = _ints(decision)

    @classmethod
    def create(cls, library: Library, spec: StoreSpec) -> Store:
        """Allocates pools and starts I/O threads. Raises NativeError with the store's reason."""
        config, keep_alive = _c_config(spec)
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

    def attach(self, model: int) -> None:
        """Binds the store to the expert tensors of a loaded llama_model."""
        message = ctypes.create_string_buffer(_ERROR_BYTES)
        if self.library.store_attach(self.handle, model, message, _ERROR_BYTES) != 0:
            raise NativeError(_text(message.value) or "the model's experts cannot be managed")

    @property
    def abort(self) -> tuple[Any, int]:
        """(C function, its data) that says whether the running step should end."""
        return self.library.abort, self.handle

    def should_abort(self) -> bool:
        """Whether the running step failed or was cancelled."""
        return bool(self.library.abort(self.handle))

    def set_route(self, route: RouteCallback | None, default_tier: int = 0) -> None:
        """Calls route for every MoE layer; None asks for default_tier without Python."""
        self._route = route
        self._trampoline = ROUTE_CB(self._on_route) if route is not None else None
        address = ctypes.cast(self._trampoline, ctypes.c_void_p) if route is not None else None
        self.library.set_callback(self.handle, address, None, default_tier)

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
                _,
                event.step,
            ) = self._event_header.tolist()
            decision = self.decision
            decision.n_prefetch = 0
            decision.renormalize = False
            route = self._route
            if route is not None:
                route(event)
            return 0
        except BaseException as error:  # noqa: BLE001 - nothing may unwind through C
            self._error = error
            return 1
        finally:
            self._ring[self._calls % _RING] = perf_counter_ns() - start_ns
            self._calls += 1

    def apply(self, decision: DecisionBuffer) -> None:
        """Hands the decision over; native acts on it when the route callback returns."""
        self._decision_header[6] = decision.n_prefetch
        self._decision_header[7] = decision.renormalize

    def begin_step(self, phase: Phase) -> None:
        """Before each llama_decode."""
        self._error = None
        self.library.begin_step(self.handle, phase)

    def check_step(self) -> None:
        """After each llama_decode, before its output is used: raises what a route callback
        raised, or NativeError with the store's own reason."""
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

    def states(self) -> np.ndarray:
        """uint8 [n_layers, n_expert], a copy: the ExpertState of each expert, now."""
        return self._of_each(self.library.get_states, ctypes.c_uint8)

    def take_counts(self) -> np.ndarray:
        """uint32 [n_layers, n_expert]: tokens routed to each expert since the last call."""
        return self._of_each(self.library.take_counts, ctypes.c_uint32)

    def _of_each(self, function: Any, ctype: Any) -> np.ndarray:
        """What a C function writes about each expert: [n_layers, n_expert]."""
        out = np.empty((len(self.spec.layers), self.spec.n_expert), np.dtype(ctype))
        function(self.handle, out.ctypes.data_as(ctypes.POINTER(ctype)))
        return out

    def transition(self, wanted: Sequence[tuple[int, int, int]]) -> int:
        """Starts to bring (layer, expert, tier) in the background; returns how many were
        admitted. What is admitted becomes visible at a later begin_step."""
        items = _items(wanted)
        admitted = self.library.transition(self.handle, items, len(wanted))
        if admitted < 0:
            raise NativeError("a transition names an expert or a tier that the model does not have")
        return int(admitted)

    def set_transition_rate(self, bytes_per_s: int) -> None:
        """How fast transitions may read; 0 for no limit."""
        self.library.set_transition_rate(self.handle, bytes_per_s)

    def misses(self) -> str:
        """How misses are served: what was asked for, or "copy" where that cannot be had."""
        return str(Misses.MODES[self.stats().misses])

    def reset_stats(self) -> None:
        self.library.reset_stats(self.handle)

    @property
    def calls(self) -> int:
        """Route callbacks so far."""
        return self._calls

    def callback_us(self, q: float = 50.0, since: int = 0) -> float | None:
        """Percentile of the Python time of the route callbacks after number `since` (the
        latest 4096 of them at most), in microseconds; None without any."""
        n = min(self._calls - since, _RING)
        if n <= 0:
            return None
        recent = [self._ring[i % _RING] for i in range(self._calls - n, self._calls)]
        return percentile(recent, q) / 1000.0

    def warm(
        self,
        wanted: Sequence[tuple[int, int, int]],
        progress: Callable[[float], None] | None = None,
    ) -> int:
        """Loads (layer, expert, tier) triples into free slots; returns how many went in."""
        items = _items(wanted)
        raised: list[BaseException] = []

        def report(done: int, total: int, _user: int | None) -> None:
            if progress is None or raised:
                return
            try:
                progress(done / max(1, total))
            except BaseException as error:  # noqa: BLE001 - raised below, once C has returned
                raised.append(error)
                self.cancel(True)

        loaded = self.library.warm(self.handle, items, len(wanted), PROGRESS_CB(report), None)
        if raised:
            self.cancel(False)
            raise raised[0]
        if loaded < 0:
            reason = self.library.error(self.handle)
            raise NativeError(_text(reason) if reason else "the experts could not be loaded")
        return int(loaded)

    def check(self) -> None:
        """Raises NativeError where an invariant of the store does not hold. For tests."""
        message = ctypes.create_string_buffer(_ERROR_BYTES)
        if self.library.check(self.handle, message, _ERROR_BYTES) != 0:
            raise NativeError(_text(message.value))

    def close(self) -> None:
        """Frees the native store; the llama_context that used it must be gone before."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._route = None
            self.library.store_free(handle)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _items(wanted: Sequence[tuple[int, int, int]]) -> ctypes.Array[CPrefetch]:
    """(layer, expert, tier) triples for C; one item where there are none."""
    items = (CPrefetch * max(1, len(wanted)))()
    for item, (layer, expert, tier) in zip(items, wanted, strict=False):
        item.layer, item.expert, item.tier = layer, expert, tier
    return items


def _text(message: bytes) -> str:
    return message.decode("utf-8", "replace")


def _ints(struct: ctypes.Structure) -> memoryview:
    """The struct's memory as 32-bit integers."""
    integers = (ctypes.c_int32 * (ctypes.sizeof(struct) // 4)).from_buffer(struct)
    return memoryview(integers).cast("B").cast("i")


def _array(address: int | None, ctype: Any, shape: tuple[int, ...]) -> np.ndarray:
    count = int(np.prod(shape))
    if count == 0:
        return np.zeros(shape, np.dtype(ctype))
    if not address:
        raise NativeError("the native store handed out a null array")
    return np.ctypeslib.as_array((ctype * count).from_address(address)).reshape(shape)


def event_arrays(event: CEvent, spec: StoreSpec) -> tuple[np.ndarray, ...]:
    """The store's own arrays behind a route event, writable: ids, weights [max_tokens, k],
    tokens [max_tokens], ahead_ids, ahead [n_ahead, max_tokens, k], importance [max_tokens]."""
    rows = (spec.max_tokens, spec.n_expert_used)
    ahead = (spec.n_ahead, *rows)
    return (
        _array(event.ids, ctypes.c_int32, rows),
        _array(event.weights, ctypes.c_float, rows),
        _array(event.tokens, ctypes.c_int32, (spec.max_tokens,)),
        _array(event.ahead_ids, ctypes.c_int32, ahead),
        _array(event.ahead, ctypes.c_float, ahead),
        _array(event.importance, ctypes.c_float, (spec.max_tokens,)),
    )


def _event_views(event: CEvent, spec: StoreSpec) -> tuple[RouteEvent, StoreView]:
    return (
        RouteEvent(*event_arrays(event, spec)),
        StoreView(
            _array(event.resident, ctypes.c_uint8, (len(spec.layers), spec.n_expert)),
        ),
    )


def _c_config(spec: StoreSpec) -> tuple[CConfig, list[Any]]:
    """The C configuration and what must live as long as it is read."""
    files = (ctypes.c_char_p * len(spec.files))(*(bytes(path) for path in spec.files))
    layers = (CLayer * len(spec.layers))()
    for c_layer, (il, slices) in zip(layers, spec.layers, strict=True):
        c_layer.il = il
        for (kind, tier), piece in slices.items():
            target = c_layer.slices[kind][tier]
            target.offset = piece.offset
            target.expert_bytes = piece.expert_bytes
            target.file = piece.file
            target.type = piece.type
            target.group = piece.group
    groups = (CGroup * len(spec.groups))()
    for c_group, (slot_bytes, n_slots) in zip(groups, spec.groups, strict=True):
        c_group.slot_bytes, c_group.n_slots = slot_bytes, n_slots
    for c_group, n_passing in zip(groups, spec.n_passing, strict=False):
        c_group.n_passing = n_passing
    config = CConfig(
        files=files,
        layers=layers,
        groups=groups,
        budget_bytes=spec.budget_bytes,
        host_bytes=spec.host_bytes,
        copy_bytes_per_s=spec.misses.copy,
        read_bytes_per_s=spec.misses.read,
        compute_bytes_per_s=spec.misses.compute,
        round_trip_us=spec.misses.round_trip_us,
        misses=Misses.MODES.index(spec.misses.mode),
        n_host_threads=spec.misses.threads,
        n_files=len(spec.files),
        n_layers=len(spec.layers),
        n_groups=len(spec.groups),
        n_tiers=spec.n_tiers,
        n_expert=spec.n_expert,
        n_expert_used=spec.n_expert_used,
        max_tokens=spec.max_tokens,
        n_ahead=spec.n_ahead,
        n_io_threads=spec.n_io_threads,
        flags=DIRECT_IO * spec.direct_io
        | EXACT_TIERS * spec.exact_tiers
        | SIMULATED * spec.simulated,
        importance_window=spec.importance_window,
    )
    return config, [files, layers, groups]
