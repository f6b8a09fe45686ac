"""A mirror of patches/native/moe-edge.h: structs, callbacks and functions.

The names are the header's, where every field is explained.
"""

from __future__ import annotations

import ctypes
from typing import Any

ABI_VERSION = 14
MAX_TIERS = 5
MAX_AHEAD = 4
N_KINDS = 4
DIRECT_IO = 1
EXACT_TIERS = 2
SIMULATED = 4
WHOLE_EXPERTS = 8
RIGID = 16
FAILED = -3


class CSlices(ctypes.Structure):
    _fields_ = [
        ("offset", ctypes.c_uint64),
        ("expert_bytes", ctypes.c_uint64),
        ("file", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("interleaved_rows", ctypes.c_int32),
        ("checksums", ctypes.POINTER(ctypes.c_uint32)),
        ("compute_us", ctypes.c_double),
    ]


class CGroup(ctypes.Structure):
    _fields_ = [
        ("slot_bytes", ctypes.c_uint64),
        ("n_slots", ctypes.c_int32),
        ("n_passing", ctypes.c_int32),
        ("place", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class CLayer(ctypes.Structure):
    _fields_ = [
        ("il", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("slices", (CSlices * MAX_TIERS) * N_KINDS),
    ]


class CConfig(ctypes.Structure):
    _fields_ = [
        ("files", ctypes.POINTER(ctypes.c_char_p)),
        ("layers", ctypes.POINTER(CLayer)),
        ("groups", ctypes.POINTER(CGroup)),
        ("device", ctypes.c_void_p),
        ("budget_bytes", ctypes.c_uint64),
        ("host_bytes", ctypes.c_uint64),
        ("copy_bytes_per_s", ctypes.c_double),
        ("read_bytes_per_s", ctypes.c_double),
        ("round_trip_us", ctypes.c_double),
        ("misses", ctypes.c_int32),
        ("n_host_threads", ctypes.c_int32),
        ("n_files", ctypes.c_int32),
        ("n_layers", ctypes.c_int32),
        ("n_groups", ctypes.c_int32),
        ("n_tiers", ctypes.c_int32),
        ("n_expert", ctypes.c_int32),
        ("n_expert_used", ctypes.c_int32),
        ("max_tokens", ctypes.c_int32),
        ("n_ahead", ctypes.c_int32),
        ("n_io_threads", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("importance_window", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class CEvent(ctypes.Structure):
    _fields_ = [
        ("layer", ctypes.c_int32),
        ("phase", ctypes.c_int32),
        ("n_tokens", ctypes.c_int32),
        ("n_ahead", ctypes.c_int32),
        ("has_importance", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("step", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("phases", ctypes.c_void_p),
        ("sequences", ctypes.c_void_p),
        ("ahead_ids", ctypes.c_void_p),
        ("ahead", ctypes.c_void_p),
        ("importance", ctypes.c_void_p),
        ("resident", ctypes.c_void_p),
        ("missing", ctypes.c_void_p),
    ]


class CStep(ctypes.Structure):
    _fields_ = [
        ("step", ctypes.c_int64),
        ("us", ctypes.c_uint64),
        ("phase", ctypes.c_int32),
        ("n_tokens", ctypes.c_int32),
        ("n_starts", ctypes.c_int32),
        ("n_prompt_ends", ctypes.c_int32),
        ("n_ends", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("starts", ctypes.POINTER(ctypes.c_int32)),
        ("prompt_ends", ctypes.POINTER(ctypes.c_int32)),
        ("ends", ctypes.POINTER(ctypes.c_int32)),
    ]


class CPrefetch(ctypes.Structure):
    _fields_ = [
        ("layer", ctypes.c_int16),
        ("expert", ctypes.c_int16),
        ("tier", ctypes.c_uint8),
        ("kinds", ctypes.c_uint8),
        ("passing", ctypes.c_int16),
    ]


class CDecision(ctypes.Structure):
    _fields_ = [
        ("tier", ctypes.c_void_p),
        ("passing", ctypes.c_void_p),
        ("prefetch", ctypes.c_void_p),
        ("n_prefetch", ctypes.c_int32),
        ("renormalize", ctypes.c_int32),
    ]


class CStats(ctypes.Structure):
    _fields_ = [
        ("requests", ctypes.c_uint64 * 2),
        ("hits", ctypes.c_uint64 * 2),
        ("demand_bytes", ctypes.c_uint64 * 2),
        ("prefetch_bytes", ctypes.c_uint64 * 2),
        ("wait_us", ctypes.c_uint64 * 2),
        ("host_hits", ctypes.c_uint64 * 2),
        ("copy_bytes", ctypes.c_uint64 * 2),
        ("copy_wait_us", ctypes.c_uint64 * 2),
        ("in_place", ctypes.c_uint64 * 2),
        ("in_place_bytes", ctypes.c_uint64 * 2),
        ("host_computed", ctypes.c_uint64 * 2),
        ("callback_us", ctypes.c_uint64 * 2),
        ("callbacks", ctypes.c_uint64 * 2),
        ("routed", (ctypes.c_uint64 * (MAX_TIERS + 1)) * 2),
        ("computed", (ctypes.c_uint64 * MAX_TIERS) * 2),
        ("waves", ctypes.c_uint64),
        ("promotions", ctypes.c_uint64),
        ("evictions", ctypes.c_uint64),
        ("prefetch_used", ctypes.c_uint64),
        ("prefetch_wasted", ctypes.c_uint64),
        ("prefetch_cancelled", ctypes.c_uint64),
        ("slot_bytes_in_use", ctypes.c_uint64),
        ("slot_bytes_peak", ctypes.c_uint64),
        ("budget_bytes", ctypes.c_uint64),
        ("read_us", ctypes.c_uint64),
        ("experts_promoted", ctypes.c_uint64),
        ("experts_demoted", ctypes.c_uint64),
        ("transitions_rejected", ctypes.c_uint64),
        ("transitions_failed", ctypes.c_uint64),
        ("transition_bytes", ctypes.c_uint64),
        ("host_bytes", ctypes.c_uint64),
        ("direct_io", ctypes.c_int32),
        ("host_pinned", ctypes.c_int32),
        ("misses", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class CDeviceInfo(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 128),
        ("free_bytes", ctypes.c_uint64),
        ("total_bytes", ctypes.c_uint64),
    ]


class CBandwidths(ctypes.Structure):
    _fields_ = [
        ("pinned_bytes_per_s", ctypes.c_double),
        ("pageable_bytes_per_s", ctypes.c_double),
        ("round_trip_us", ctypes.c_double),
        ("read_bytes_per_s", ctypes.c_double),
        ("compute_bytes_per_s", ctypes.c_double),
    ]


class CMemory(ctypes.Structure):
    _fields_ = [
        ("weights", ctypes.c_uint64 * 2),
        ("cache", ctypes.c_uint64 * 2),
        ("scratch", ctypes.c_uint64 * 2),
    ]


# What the header's structs measure on a 64-bit machine. The library is built from the
# same header and checked by its ABI version; these catch a mirror that went astray.
STRUCT_BYTES = {
    CSlices: 48,
    CGroup: 24,
    CLayer: 8 + N_KINDS * MAX_TIERS * 48,
    CConfig: 128,
    CEvent: 112,
    CStep: 64,
    CPrefetch: 8,
    CDecision: 32,
    CStats: 528,
    CDeviceInfo: 144,
    CBandwidths: 40,
    CMemory: 48,
}

ROUTE_CB = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
STEP_CB = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(CStep), ctypes.c_void_p)
PROGRESS_CB = ctypes.CFUNCTYPE(None, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)
VISIT_CB = ctypes.CFUNCTYPE(
    None,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_void_p,
)

_STORE = ctypes.c_void_p
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "moe_edge_abi_version": (ctypes.c_int32, []),
    "moe_edge_interleaves": (ctypes.c_int32, [ctypes.c_int32, ctypes.c_int64, ctypes.c_int64]),
    "moe_edge_crc32": (ctypes.c_uint32, [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64]),
    "moe_edge_architecture": (ctypes.c_char_p, [ctypes.c_int32]),
    "moe_edge_slot_bytes": (ctypes.c_uint64, [ctypes.c_uint64, ctypes.c_uint64]),
    "moe_edge_device_slot_bytes": (
        ctypes.c_uint64,
        [ctypes.c_int32, ctypes.c_uint64, ctypes.c_int64],
    ),
    "moe_edge_host_least_bytes": (ctypes.c_uint64, [ctypes.POINTER(CConfig)]),
    "moe_edge_device_find": (
        ctypes.c_void_p,
        [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t],
    ),
    "moe_edge_device_describe": (ctypes.c_int, [ctypes.c_void_p, ctypes.POINTER(CDeviceInfo)]),
    "moe_edge_device_buffer_type": (ctypes.c_void_p, [ctypes.c_void_p]),
    "moe_edge_device_measure": (
        ctypes.c_int,
        [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int32, ctypes.POINTER(CBandwidths)],
    ),
    "moe_edge_measure_product": (
        ctypes.c_int,
        [
            *(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32),
            *[ctypes.POINTER(ctypes.c_double)] * 2,
        ],
    ),
    "moe_edge_store_create": (
        _STORE,
        [ctypes.POINTER(CConfig), ctypes.c_char_p, ctypes.c_size_t],
    ),
    "moe_edge_store_free": (None, [_STORE]),
    "moe_edge_buffer_type": (ctypes.c_void_p, []),
    "moe_edge_load_error": (ctypes.c_char_p, []),
    "moe_edge_get_memory": (None, [ctypes.c_void_p, ctypes.POINTER(CMemory)]),
    "moe_edge_adapt_threads": (None, [ctypes.c_void_p, ctypes.c_int32]),
    "moe_edge_store_event": (ctypes.POINTER(CEvent), [_STORE]),
    "moe_edge_store_decision": (ctypes.POINTER(CDecision), [_STORE]),
    "moe_edge_set_callback": (
        None,
        [_STORE, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32],
    ),
    "moe_edge_set_step_callback": (None, [_STORE, ctypes.c_void_p, ctypes.c_void_p]),
    "moe_edge_set_phase": (None, [_STORE, ctypes.c_int32]),
    "moe_edge_sequence_end": (None, [_STORE, ctypes.c_int32]),
    "moe_edge_begin_step": (None, [_STORE, ctypes.c_int32]),
    "moe_edge_error": (ctypes.c_char_p, [_STORE]),
    "moe_edge_cancel": (None, [_STORE, ctypes.c_int32]),
    "moe_edge_get_stats": (None, [_STORE, ctypes.POINTER(CStats)]),
    "moe_edge_reset_stats": (None, [_STORE]),
    "moe_edge_get_resident": (None, [_STORE, ctypes.POINTER(ctypes.c_uint8)]),
    "moe_edge_warm": (
        ctypes.c_int32,
        [_STORE, ctypes.POINTER(CPrefetch), ctypes.c_int32, PROGRESS_CB, ctypes.c_void_p],
    ),
    "moe_edge_check": (ctypes.c_int, [_STORE, ctypes.c_char_p, ctypes.c_size_t]),
    "moe_edge_apply": (
        ctypes.c_int,
        [
            _STORE,
            ctypes.c_int32,
            ctypes.POINTER(ctypes.c_int32),
            ctypes.POINTER(ctypes.c_uint8),
            ctypes.POINTER(ctypes.c_uint8),
            ctypes.c_int32,
        ],
    ),
    "moe_edge_prefetch": (None, [_STORE, ctypes.POINTER(CPrefetch), ctypes.c_int32]),
    "moe_edge_transition": (ctypes.c_int32, [_STORE, ctypes.POINTER(CPrefetch), ctypes.c_int32]),
    "moe_edge_set_transition_rate": (None, [_STORE, ctypes.c_uint64]),
    "moe_edge_get_states": (
        None,
        [_STORE, ctypes.POINTER(ctypes.c_uint8), ctypes.POINTER(ctypes.c_uint8)],
    ),
    "moe_edge_get_landed": (None, [_STORE, ctypes.POINTER(ctypes.c_uint8)]),
    "moe_edge_take_counts": (None, [_STORE, ctypes.POINTER(ctypes.c_uint32)]),
    "moe_edge_use": (
        ctypes.c_int,
        [
            _STORE,
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.POINTER(ctypes.c_int32),
            ctypes.c_int32,
            VISIT_CB,
            ctypes.c_void_p,
        ],
    ),
    "moe_edge_sim_speed": (None, [_STORE, ctypes.c_uint64, ctypes.c_uint64]),
    "moe_edge_sim_advance": (ctypes.c_uint64, [_STORE, ctypes.c_uint64]),
    "moe_edge_sim_route": (
        ctypes.c_int,
        [_STORE, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32],
    ),
    "moe_edge_sim_use": (
        ctypes.c_int,
        [
            _STORE,
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.POINTER(ctypes.c_int32),
            ctypes.c_int32,
            ctypes.c_uint64,
        ],
    ),
}
