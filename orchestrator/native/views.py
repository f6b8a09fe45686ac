"""The store's own memory as Python sees it, without a copy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from orchestrator.errors import NativeError
from orchestrator.events import RouteEvent, StoreView
from orchestrator.native.abi import CEvent
from orchestrator.native.spec import StoreSpec


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


def event_views(event: CEvent, spec: StoreSpec) -> tuple[RouteEvent, StoreView]:
    return (
        RouteEvent(*event_arrays(event, spec)),
        StoreView(
            array_at(event.resident, ctypes.c_uint8, (len(spec.layers), spec.n_expert)),
            array_at(event.missing, ctypes.c_uint8, (len(spec.layers), spec.n_expert)),
        ),
    )
