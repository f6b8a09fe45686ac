"""A store whose reads move no bytes and take virtual time: who drives it plays the graph.

The cache is the native store's own, line by line; how long a read takes stands in
patches/native/moe-edge-transport.h.
"""

from __future__ import annotations

import ctypes

import numpy as np

from gguf_tools import interrupts
from orchestrator.errors import NativeError
from orchestrator.native.store import Store, event_arrays

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

    def _fail(self) -> None:
        self._store.check_step()
        raise NativeError("the simulated step failed without a reason")
