"""A mirror of patches/native/moe-edge.h: structs, callbacks and functions.

Names are the same as in the header, which documents every field.
"""

from __future__ import annotations

import ctypes
from typing import Any

ABI_VERSION = 23
MAX_TIERS = 5
MAX_AHEAD = 4
N_KINDS = 4
DIRECT_IO = 1
EXACT_TIERS = 2
SIMULATED = 4
WHOLE_EXPERTS = 8
RIGID = 16
# The causes for which the decoding thread waits, in the order of enum moe_edge_wait.
WAITS = ("disk", "host tier", "copy", "transition", "launch")
# Return values of llama_decode: a failed step, and too few free KV cells for the batch.
FAILED = -3
NO_ROOM = 1

_POINTER, _TEXT, _SIZE = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
_INT, _F64 = ctypes.c_int, ctypes.c_double
_U8, _U32, _U64 = ctypes.c_uint8, ctypes.c_uint32, ctypes.c_uint64
_I16, _I32, _I64 = ctypes.c_int16, ctypes.c_int32, ctypes.c_int64


def fields_of(ctype: Any, *names: str) -> list[tuple[str, Any]]:
    """Return (name, ctype) declarations of struct fields that have the same ctypes type."""
    return [(name, ctype) for name in names]


class CSlices(ctypes.Structure):
    """The position in a file of one layer's experts, for one matrix kind and tier (C struct).

    Matrix kinds are gate, up, down, and gate and up in one matrix. Tiers are precisions.
    """

    _fields_ = [
        *fields_of(_U64, "offset", "expert_bytes"),
        *fields_of(_I32, "file", "type", "group", "interleaved_rows"),
        ("checksums", ctypes.POINTER(_U32)),
        ("compute_us", _F64),
    ]


class CGroup(ctypes.Structure):
    """A group of expert slots of one size (C struct).

    An expert can evict only experts of its own group.
    """

    _fields_ = [("slot_bytes", _U64), *fields_of(_I32, "n_slots", "n_passing", "place", "reserved")]


class CLayer(ctypes.Structure):
    """The positions in files of one MoE layer's experts, by matrix kind and tier (C struct)."""

    _fields_ = [*fields_of(_I32, "il", "reserved"), ("slices", (CSlices * MAX_TIERS) * N_KINDS)]


class CConfig(ctypes.Structure):
    """All parameters of an expert store (C struct)."""

    _fields_ = [
        ("files", ctypes.POINTER(_TEXT)),
        ("layers", ctypes.POINTER(CLayer)),
        ("groups", ctypes.POINTER(CGroup)),
        ("device", _POINTER),
        *fields_of(_U64, "budget_bytes", "host_bytes"),
        *fields_of(_F64, "copy_bytes_per_s", "round_trip_us"),
        *fields_of(
            _I32,
            "misses",
            "n_host_threads",
            "n_files",
            "n_layers",
            "n_groups",
            "n_tiers",
            "n_expert",
            "n_expert_used",
            "max_tokens",
            "n_ahead",
            "n_io_threads",
            "flags",
            "importance_window",
            "reserved",
        ),
    ]


class CEvent(ctypes.Structure):
    """The experts that the router of one layer chose for the tokens of a step (C struct)."""

    _fields_ = [
        *fields_of(_I32, "layer", "phase", "n_tokens", "n_ahead", "has_importance", "n_used"),
        ("step", _I64),
        *fields_of(
            _POINTER,
            "ids",
            "weights",
            "tokens",
            "phases",
            "sequences",
            "ahead_ids",
            "ahead",
            "importance",
            "resident",
            "missing",
        ),
    ]


class CStep(ctypes.Structure):
    """The report of a computed step: number, duration, phase, tokens and sequences (C struct)."""

    _fields_ = [
        ("step", _I64),
        ("us", _U64),
        *fields_of(_I32, "phase", "n_tokens", "n_starts", "n_prompt_ends", "n_ends", "reserved"),
        *fields_of(ctypes.POINTER(_I32), "starts", "prompt_ends", "ends"),
    ]


class CPrefetch(ctypes.Structure):
    """An expert that the store should read, and its precision (tier) (C struct)."""

    _fields_ = [
        *fields_of(_I16, "layer", "expert"),
        *fields_of(_U8, "tier", "kinds"),
        ("passing", _I16),
    ]


class CDecision(ctypes.Structure):
    """The precisions (tiers) that a policy chose for the experts of one layer (C struct)."""

    _fields_ = [
        *fields_of(_POINTER, "tier", "passing", "prefetch"),
        *fields_of(_I32, "n_prefetch", "renormalize"),
    ]


class CStats(ctypes.Structure):
    """The counters of an expert store (C struct).

    Arrays of length 2 have one entry for prefill and one for decode.
    """

    _fields_ = [
        *fields_of(
            _U64 * 2,
            "requests",
            "hits",
            "demand_bytes",
            "prefetch_bytes",
            "wait_us",
            "host_hits",
            "copy_bytes",
            "host_computed",
            "host_computed_bytes",
            "callback_us",
            "callbacks",
            "locks",
        ),
        ("waits", _U64 * len(WAITS) * 2),
        ("waited_ns", _U64 * len(WAITS) * 2),
        ("routed", _U64 * (MAX_TIERS + 1) * 2),
        ("computed", _U64 * MAX_TIERS * 2),
        *fields_of(
            _U64,
            "waves",
            "promotions",
            "evictions",
            "prefetch_used",
            "prefetch_wasted",
            "prefetch_cancelled",
            "slot_bytes_in_use",
            "slot_bytes_peak",
            "budget_bytes",
            "slot_bytes",
            "read_us",
            "experts_promoted",
            "experts_demoted",
            "transitions_begun",
            "transitions_rejected",
            "transitions_failed",
            "transition_bytes",
            "table_writes",
            "host_bytes",
        ),
        *fields_of(_I32, "direct_io", "host_pinned", "misses", "reserved"),
    ]


class CDeviceInfo(ctypes.Structure):
    """The name of a GPU, and its free and total memory (C struct)."""

    _fields_ = [("name", ctypes.c_char * 128), *fields_of(_U64, "free_bytes", "total_bytes")]


class CBandwidths(ctypes.Structure):
    """Measured speeds of copies from the host to a device, and of the host's computing (C struct).

    pinned_bytes_per_s, pageable_bytes_per_s: copies from pinned and from ordinary host memory.
    round_trip_us: time of the smallest copy. compute_bytes_per_s: bytes of weights that the host
    multiplies with one token.
    """

    _fields_ = [
        *fields_of(
            _F64,
            "pinned_bytes_per_s",
            "pageable_bytes_per_s",
            "round_trip_us",
            "compute_bytes_per_s",
        )
    ]


class CMemory(ctypes.Structure):
    """The memory in bytes that a context and its model take, without expert slots (C struct).

    Each field has two values: the host memory, and the total memory of all devices.

    - weights: model weights.
    - cache: the KV cache.
    - scratch: temporary buffers of compute graphs.
    """

    _fields_ = [*fields_of(_U64 * 2, "weights", "cache", "scratch")]


class CTouched(ctypes.Structure):
    """The host memory of all llama.cpp contexts of this process, in bytes (C struct).

    cache: the KV caches. scratch: temporary buffers of compute graphs. work: buffers of the CPU
    backend. Each of these arrays is [allocated bytes, bytes in physical memory]. used: bytes of the
    KV cells that hold a token. cells_end: number of KV cells up to the last used cell.
    """

    _fields_ = [
        *fields_of(_U64 * 2, "cache", "scratch", "work"),
        *fields_of(_U64, "used", "cells_end"),
    ]


class CRoom(ctypes.Structure):
    """The argument of the callback that makes memory available for a batch (C struct).

    The store calls the callback before a batch is computed or a saved state is restored.

    The callback reads:

    - touched: the memory that KV caches and temporary buffers take now.
    - n_bytes: bytes of the state to be restored, or 0.
    - n_tokens: number of tokens in the batch, or 0.

    The callback may change:

    - at_once: the maximum number of tokens per micro-batch. The store sets it to the maximum of the
      context.
    - drop_scratch: 0, or 1 to free the temporary buffers of earlier batches.
    """

    _fields_ = [
        ("touched", CTouched),
        ("n_bytes", _U64),
        *fields_of(_I32, "n_tokens", "at_once", "drop_scratch", "reserved"),
    ]


# Sizes of the header's structs on a 64-bit machine. The ABI version guards against another library;
# these sizes detect an error in this mirror.
STRUCT_BYTES = {
    CSlices: 48,
    CGroup: 24,
    CLayer: 8 + N_KINDS * MAX_TIERS * 48,
    CConfig: 120,
    CEvent: 112,
    CStep: 64,
    CPrefetch: 8,
    CDecision: 32,
    CStats: 696,
    CDeviceInfo: 144,
    CBandwidths: 32,
    CMemory: 48,
    CTouched: 64,
    CRoom: 88,
}

ROUTE_CB = ctypes.CFUNCTYPE(_INT, _POINTER)
STEP_CB = ctypes.CFUNCTYPE(_INT, ctypes.POINTER(CStep), _POINTER)
ROOM_CB = ctypes.CFUNCTYPE(_INT, ctypes.POINTER(CRoom), _POINTER)
PROGRESS_CB = ctypes.CFUNCTYPE(None, _I32, _I32, _POINTER)
VISIT_CB = ctypes.CFUNCTYPE(None, _I32, _I32, _I32, _POINTER, _U64, _POINTER)

FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "moe_edge_abi_version": (_I32, []),
    "moe_edge_interleaves": (_I32, [_I32, _I64, _I64]),
    "moe_edge_crc32": (_U32, [_U32, _POINTER, _U64]),
    "moe_edge_slot_bytes": (_U64, [_U64, _U64]),
    "moe_edge_device_slot_bytes": (_U64, [_I32, _U64, _I64]),
    "moe_edge_host_least_bytes": (_U64, [ctypes.POINTER(CConfig)]),
    "moe_edge_device_find": (_POINTER, [_TEXT, _TEXT, _SIZE]),
    "moe_edge_device_describe": (_INT, [_POINTER, ctypes.POINTER(CDeviceInfo)]),
    "moe_edge_device_buffer_type": (_POINTER, [_POINTER]),
    "moe_edge_device_copy_times": (_INT, [_POINTER, _I32]),
    "moe_edge_device_measure": (_INT, [_POINTER, _U64, _I32, ctypes.POINTER(CBandwidths)]),
    "moe_edge_measure_product": (_INT, [*(_I32, _I64, _I64, _I32), *[ctypes.POINTER(_F64)] * 2]),
    "moe_edge_in_turn": (None, [_I32]),
    "moe_edge_store_create": (_POINTER, [ctypes.POINTER(CConfig), _TEXT, _SIZE]),
    "moe_edge_store_free": (None, [_POINTER]),
    "moe_edge_store_limit": (_I64, [_POINTER, _U64, _TEXT, _SIZE]),
    "moe_edge_store_loading": (_I32, [_POINTER]),
    "moe_edge_tokens_done": (_F64, [_POINTER]),
    "moe_edge_buffer_type": (_POINTER, []),
    "moe_edge_load_error": (_TEXT, []),
    "moe_edge_get_memory": (None, [_POINTER, ctypes.POINTER(CMemory)]),
    "moe_edge_get_touched": (None, [ctypes.POINTER(CTouched)]),
    "moe_edge_adapt_threads": (None, [_POINTER, _I32]),
    "moe_edge_store_event": (ctypes.POINTER(CEvent), [_POINTER]),
    "moe_edge_store_decision": (ctypes.POINTER(CDecision), [_POINTER]),
    "moe_edge_set_callback": (None, [_POINTER, _POINTER, _POINTER, _I32, _U32]),
    "moe_edge_set_step_callback": (None, [_POINTER, _POINTER, _POINTER]),
    "moe_edge_set_room_callback": (None, [_POINTER, _POINTER, _POINTER]),
    "moe_edge_set_phase": (None, [_POINTER, _I32]),
    "moe_edge_sequence_end": (None, [_POINTER, _I32]),
    "moe_edge_begin_step": (None, [_POINTER, _I32]),
    "moe_edge_error": (_TEXT, [_POINTER]),
    "moe_edge_cancel": (None, [_POINTER, _I32]),
    "moe_edge_get_stats": (None, [_POINTER, ctypes.POINTER(CStats)]),
    "moe_edge_reset_stats": (None, [_POINTER]),
    "moe_edge_get_resident": (None, [_POINTER, ctypes.POINTER(_U8)]),
    "moe_edge_warm": (_I32, [_POINTER, ctypes.POINTER(CPrefetch), _I32, PROGRESS_CB, _POINTER]),
    "moe_edge_check": (_INT, [_POINTER, _TEXT, _SIZE]),
    "moe_edge_apply": (
        _INT,
        [_POINTER, _I32, ctypes.POINTER(_I32), ctypes.POINTER(_U8), ctypes.POINTER(_U8), _I32],
    ),
    "moe_edge_prefetch": (None, [_POINTER, ctypes.POINTER(CPrefetch), _I32]),
    "moe_edge_transition": (_I32, [_POINTER, ctypes.POINTER(CPrefetch), _I32]),
    "moe_edge_set_transition_rate": (None, [_POINTER, _U64]),
    "moe_edge_get_states": (None, [_POINTER, ctypes.POINTER(_U8), ctypes.POINTER(_U8)]),
    "moe_edge_get_landed": (None, [_POINTER, ctypes.POINTER(_U8)]),
    "moe_edge_take_counts": (None, [_POINTER, ctypes.POINTER(_U32)]),
    "moe_edge_use": (_INT, [_POINTER, _I32, _I32, ctypes.POINTER(_I32), _I32, VISIT_CB, _POINTER]),
    "moe_edge_sim_speed": (None, [_POINTER, _U64, _U64]),
    "moe_edge_sim_advance": (_U64, [_POINTER, _U64]),
    "moe_edge_sim_route": (_INT, [_POINTER, _I32, _I32, _I32, _I32]),
    "moe_edge_sim_use": (_INT, [_POINTER, _I32, _I32, ctypes.POINTER(_I32), _I32, _U64]),
}
