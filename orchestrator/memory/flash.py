"""Whether a GPU computes a model's attention as flash attention, asked of its backend."""

from __future__ import annotations

import ctypes

from gguf_tools.experts import KV_TYPES, ExpertModel
from gguf_tools.file.layout import GGMLType
from orchestrator.native.llama import Bindings

_TOKENS, _CELLS = 512, 1024  # of a batch and of a cache, as a graph may have them
_TENSORS_BYTES = 64 << 10


class _InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


def runs_flash(bindings: Bindings, gpu: int, model: ExpertModel, kv: str) -> bool:
    """gpu: its number among llama.cpp's. kv: of KV_TYPES. False where a layer's heads have no
    kernel, or the library was built without them; and for latent attention, whose heads in the
    cache are others than the header's."""
    hparams = model.hparams
    if f"{hparams.arch}.attention.key_length_mla" in model.metadata:
        return False
    heads = set(zip(hparams.n_head, hparams.n_head_kv, strict=True))
    return all(
        _supports(bindings, gpu, n_head, n_kv, hparams.key_length, hparams.value_length, kv)
        for n_head, n_kv in heads
        if n_kv > 0
    )


def _supports(
    bindings: Bindings, gpu: int, n_head: int, n_head_kv: int, key: int, value: int, kv: str
) -> bool:
    """Whether the backend of a GPU has a kernel for attention with heads of these numbers and
    lengths."""
    ggml = bindings.api._lib
    pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    ggml.ggml_init.argtypes, ggml.ggml_init.restype = [_InitParams], pointer
    ggml.ggml_free.argtypes = [pointer]
    ggml.ggml_new_tensor_4d.argtypes = [pointer, ctypes.c_int, *[number] * 4]
    ggml.ggml_new_tensor_4d.restype = pointer
    ggml.ggml_flash_attn_ext.argtypes = [*[pointer] * 5, *[real] * 3]
    ggml.ggml_flash_attn_ext.restype = pointer
    ggml.ggml_backend_reg_by_name.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_reg_by_name.restype = pointer
    ggml.ggml_backend_reg_dev_get.argtypes = [pointer, ctypes.c_size_t]
    ggml.ggml_backend_reg_dev_get.restype = pointer
    ggml.ggml_backend_dev_supports_op.argtypes = [pointer, pointer]
    ggml.ggml_backend_dev_supports_op.restype = ctypes.c_bool

    backend = ggml.ggml_backend_reg_by_name(b"CUDA")
    if not backend:
        return False
    ctx = ggml.ggml_init(_InitParams(_TENSORS_BYTES, None, True))
    try:

        def tensor(kind: GGMLType, *shape: int) -> int:
            made: int = ggml.ggml_new_tensor_4d(ctx, int(kind), *shape)
            return made

        of_cache = KV_TYPES[kv]
        queries = tensor(GGMLType.F32, key, _TOKENS, n_head, 1)
        keys = tensor(of_cache, key, _CELLS, n_head_kv, 1)
        values = tensor(of_cache, value, _CELLS, n_head_kv, 1)
        mask = tensor(GGMLType.F16, _CELLS, _TOKENS, 1, 1)
        op = ggml.ggml_flash_attn_ext(ctx, queries, keys, values, mask, 1.0, 0.0, 0.0)
        device = ggml.ggml_backend_reg_dev_get(backend, gpu)
        return bool(ggml.ggml_backend_dev_supports_op(device, op))
    finally:
        ggml.ggml_free(ctx)
