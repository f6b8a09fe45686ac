"""ctypes declarations of the ggml functions that we call, from llama.cpp's library."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any


class InitParams(ctypes.Structure):
    """The parameters with which ggml allocates a new context for tensors (C struct of ggml)."""

    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


# ggml_abort_callback_t: gets a text with the file, the line and the failed assertion.
ABORT_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)

_P, _I, _L, _F, _S = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_size_t
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (_P, [InitParams]),
    "ggml_set_abort_callback": (_P, [ABORT_CALLBACK]),
    "ggml_free": (None, [_P]),
    "ggml_new_tensor_2d": (_P, [_P, _I, _L, _L]),
    "ggml_new_tensor_3d": (_P, [_P, _I, _L, _L, _L]),
    "ggml_new_tensor_4d": (_P, [_P, _I, _L, _L, _L, _L]),
    "ggml_view_3d": (_P, [_P, _P, _L, _L, _L, _S, _S, _S]),
    "ggml_mul_mat": (_P, [_P, _P, _P]),
    "ggml_mul_mat_id": (_P, [_P, _P, _P, _P]),
    "ggml_rms_norm": (_P, [_P, _P, _F]),
    "ggml_flash_attn_ext": (_P, [_P, _P, _P, _P, _P, _F, _F, _F]),
    "ggml_new_graph": (_P, [_P]),
    "ggml_build_forward_expand": (None, [_P, _P]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, [_P, _P]),
    "ggml_backend_buffer_clear": (None, [_P, ctypes.c_uint8]),
    "ggml_backend_buffer_free": (None, [_P]),
    "ggml_backend_buffer_get_base": (_P, [_P]),
    "ggml_backend_buffer_get_size": (_S, [_P]),
    "ggml_backend_tensor_set": (None, [_P, _P, _S, _S]),
    "ggml_backend_graph_compute": (_I, [_P, _P]),
    "ggml_backend_cpu_init": (_P, []),
    "ggml_backend_cpu_set_n_threads": (None, [_P, _I]),
    "ggml_backend_cpu_buffer_type": (_P, []),
    "ggml_backend_cpu_reg": (_P, []),
    "ggml_backend_reg_by_name": (_P, [ctypes.c_char_p]),
    "ggml_backend_reg_dev_get": (_P, [_P, _S]),
    "ggml_backend_reg_get_proc_address": (_P, [_P, ctypes.c_char_p]),
    "ggml_backend_dev_count": (_S, []),
    "ggml_backend_dev_get": (_P, [_S]),
    "ggml_backend_dev_type": (_I, [_P]),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, [_P, _P]),
    "ggml_backend_buft_name": (ctypes.c_char_p, [_P]),
    "ggml_backend_free": (None, [_P]),
}


class GgmlFunctions:
    """The ggml functions that moe-edge calls, as attributes without the prefix `ggml_`."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        """Look up the functions in llama.cpp's library, and declare their types.

        lib: llama.cpp's library, which depends on ggml.
        """
        for name, (result, arguments) in _FUNCTIONS.items():
            function = lib[name]
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
