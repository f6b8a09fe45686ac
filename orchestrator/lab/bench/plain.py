"""The reference: a model on the plain upstream path of the installed library.

It makes the bindings' own low-level calls and attaches no store, so that what is measured
here is upstream at the flags given, though in our patched build.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools import built
from gguf_tools.closing import Closing
from orchestrator.errors import NativeError
from orchestrator.native.llama import BufferTypeOverride

ll: Any = built.bindings()
_ALL_LAYERS = 1 << 20


def _experts_on_cpu(n_layers: int) -> Any:
    """The overrides of --n-cpu-moe N: the experts of layers 0 to N-1, and an end mark."""
    overrides = (BufferTypeOverride * (n_layers + 1))()
    find = ll._lib.ggml_backend_cpu_buffer_type
    find.restype = ctypes.c_void_p
    for layer in range(n_layers):
        overrides[layer].pattern = rb"blk\.%d\.ffn_(up|down|gate|gate_up)_exps" % layer
        overrides[layer].buffer_type = find()
    return overrides


@ll.llama_log_callback
def _silent(level: int, text: bytes, user_data: object) -> None:
    pass


def silence() -> None:
    """Lets llama.cpp say nothing, for the rest of the process."""
    ll.llama_log_set(_silent, None)


class PlainModel(Closing):
    """One model and one context; a context manager.

    mmap: weights are mapped and paged in, otherwise read into memory at load.
    extra_bufts: weights may be repacked for the CPU. gpu: everything goes to the GPU of this number
    but the experts of the first cpu_moe layers, as with upstream's --n-cpu-moe; None: to none.
    experts_used: (metadata key, how many experts a token uses), in the place of the file's.
    Raises NativeError.
    """

    def __init__(
        self,
        path: Path,
        *,
        n_ctx: int,
        n_ubatch: int = 512,
        threads: int,
        mmap: bool = True,
        extra_bufts: bool = False,
        gpu: int | None = None,
        cpu_moe: int = 0,
        experts_used: tuple[str, int] | None = None,
    ) -> None:
        ll.llama_backend_init()
        model_params = ll.llama_model_default_params()
        model_params.load_mode = ll.LLAMA_LOAD_MODE_MMAP if mmap else ll.LLAMA_LOAD_MODE_NONE
        model_params.use_extra_bufts = extra_bufts
        model_params.n_gpu_layers = 0 if gpu is None else _ALL_LAYERS
        model_params.split_mode, model_params.main_gpu = ll.LLAMA_SPLIT_MODE_NONE, gpu or 0
        overrides = _experts_on_cpu(cpu_moe)
        if cpu_moe:
            model_params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        if experts_used is not None:
            changed = (ll.llama_model_kv_override * 2)()  # the second one marks the end
            changed[0].tag, changed[0].key = ll.LLAMA_KV_OVERRIDE_TYPE_INT, experts_used[0].encode()
            changed[0].value.val_i64 = experts_used[1]
            model_params.kv_overrides = changed
        self._model = ll.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise NativeError(f"{path}: upstream could not load it")
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_ubatch, n_ubatch
        params.n_threads = params.n_threads_batch = threads
        # without a GPU of its own all is computed on the CPU, as ours is
        params.offload_kqv = params.op_offload = gpu is not None
        self._context = ll.llama_init_from_model(self._model, params)
        if not self._context:
            ll.llama_model_free(self._model)
            raise NativeError(f"{path}: upstream could not make a context of {n_ctx} tokens")
        self._vocab = ll.llama_model_get_vocab(self._model)
        self.n_vocab = int(ll.llama_vocab_n_tokens(self._vocab))
        self._n_batch = n_ubatch
        self._batch = ll.llama_batch_init(n_ubatch, 0, 1)

    @property
    def context(self) -> int:
        """The llama_context."""
        return int(ctypes.cast(self._context, ctypes.c_void_p).value or 0)

    def close(self) -> None:
        """Frees everything; further calls are not allowed."""
        ll.llama_batch_free(self._batch)
        ll.llama_free(self._context)
        ll.llama_model_free(self._model)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, names of control tokens read as such. Raises NativeError."""
        data = text.encode()
        tokens = (ll.llama_token * (len(data) + 16))()
        count = ll.llama_tokenize(self._vocab, data, len(data), tokens, len(tokens), True, True)
        if count < 0:
            raise NativeError("the text cannot be tokenized")
        return list(tokens[:count])

    def eval(
        self, tokens: list[int], pos: int, want_all_logits: bool = False
    ) -> npt.NDArray[np.float32]:
        """Decodes tokens at positions pos.. and returns logits [n_out, n_vocab], a copy.

        What the KV cache holds from pos on is dropped first.
        n_out is len(tokens) with want_all_logits, else 1 (the last token's).
        """
        rows = []
        ll.llama_memory_seq_rm(ll.llama_get_memory(self._context), 0, pos, -1)
        for start in range(0, len(tokens), self._n_batch):
            chunk = tokens[start : start + self._n_batch]
            last = start + len(chunk) == len(tokens)
            batch = self._batch
            batch.n_tokens = len(chunk)
            for i, token in enumerate(chunk):
                batch.token[i] = token
                batch.pos[i] = pos + start + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = want_all_logits or (last and i == len(chunk) - 1)
            status = ll.llama_decode(self._context, batch)
            if status:
                raise NativeError(f"llama_decode failed with {status}")
            wanted = range(len(chunk)) if want_all_logits else [len(chunk) - 1] if last else []
            for i in wanted:
                pointer = ll.llama_get_logits_ith(self._context, i)
                rows.append(np.ctypeslib.as_array(pointer, (self.n_vocab,)).copy())
        return np.stack(rows)
