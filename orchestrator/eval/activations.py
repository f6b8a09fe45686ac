"""Activations of a model while it reads a text, through llama.cpp's evaluation callback.

Runs the plain upstream path with the best tier: what is read is the model's own.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.errors import NativeError
from orchestrator.llama import Bindings, Model

_NAME = re.compile(rb"([a-z_]+)-(\d+)")

# What a tensor of a layer is: the residual stream before and behind the experts, the router's
# input, and its logits, by the names that llama.cpp's graphs give them.
FFN_INPUT, OUTPUT, ROUTER_INPUT, ROUTER_LOGITS = "ffn_inp", "l_out", "ffn_norm", "ffn_moe_logits"
NAMES = (FFN_INPUT, OUTPUT, ROUTER_INPUT, ROUTER_LOGITS)

Activations = dict[tuple[str, int], np.ndarray]


class Recorder:
    """A model and a context that keep the activations of each read. Free it with close."""

    def __init__(self, path: Path, n_ctx: int, threads: int) -> None:
        """Raises NativeError."""
        bindings = Bindings.load()
        self._api: Any = bindings.api
        self._found: Activations = {}
        self._raised: BaseException | None = None
        self._handle: Any = None
        lib = self._api._lib
        for name, result in (
            ("ggml_get_name", ctypes.c_char_p),
            ("ggml_get_data", ctypes.c_void_p),
            ("ggml_nbytes", ctypes.c_size_t),
            ("ggml_is_contiguous", ctypes.c_bool),
        ):
            function = getattr(lib, name)
            function.argtypes, function.restype = [ctypes.c_void_p], result
        self._lib = lib
        self._model = Model(bindings, path, managed=False, use_extra_bufts=False, use_mmap=False)
        params = self._api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = n_ctx
        # Every token wants logits: else the last layer sees the last token only.
        params.n_outputs_max = params.n_outputs_max_per_seq = n_ctx
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self._callback = self._api.ggml_backend_sched_eval_callback(self._on_tensor)
        params.cb_eval = self._callback
        self._handle = self._api.llama_init_from_model(self._model.handle, params)
        if not self._handle:
            self._model.close()
            raise NativeError(f"llama.cpp cannot make a context{bindings.complaint()}")
        self._batch = self._api.llama_batch_init(n_ctx, 0, 1)

    def read(self, tokens: Sequence[int]) -> Activations:
        """Activations of one text, read at once: (name, layer) -> float32 [T, width].

        Raises NativeError where the model has none of those names.
        """
        self._found = {}
        batch, n = self._batch, len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        batch.n_tokens = n
        self._api.llama_memory_clear(self._api.llama_get_memory(self._handle), True)
        status = self._api.llama_decode(self._handle, batch)
        if self._raised is not None:
            error, self._raised = self._raised, None
            raise error
        if status != 0:
            raise NativeError(f"llama.cpp failed to evaluate {n} tokens")
        found = {key: value.reshape(n, -1) for key, value in self._found.items()}
        if not any(name == ROUTER_INPUT for name, _ in found):
            raise NativeError("the model's graph does not name its router inputs as expected")
        return found

    def _on_tensor(self, tensor: int, ask: bool, _user: int | None) -> bool:
        try:
            match = _NAME.fullmatch(self._lib.ggml_get_name(tensor) or b"")
            name = match[1].decode() if match else ""
            if ask:
                return name in NAMES
            if match and name in NAMES and self._lib.ggml_is_contiguous(tensor):
                n_bytes = self._lib.ggml_nbytes(tensor)
                data = ctypes.string_at(self._lib.ggml_get_data(tensor), n_bytes)
                self._found[name, int(match[2])] = np.frombuffer(data, np.float32)
            return True
        except BaseException as error:  # noqa: BLE001 - read raises it, once C has returned
            self._raised = error
            return not ask

    def close(self) -> None:
        """Frees the context and the model; safe to call twice."""
        if self._handle:
            self._api.llama_batch_free(self._batch)
            self._api.llama_free(self._handle)
            self._handle = None
        self._model.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
