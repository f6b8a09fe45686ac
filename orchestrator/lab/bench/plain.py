"""The reference: a model on the plain upstream path of the installed library.

It attaches no store, so that what is measured here is upstream at the flags given, though in our
patched build.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools import built
from gguf_tools.closing import Closing
from orchestrator.errors import NativeError
from orchestrator.native.llama import Bindings, BufferTypeOverride, LlamaContext, Model

# Before ours, which would have OpenMP's threads wait otherwise than upstream's do.
built.bindings()


def _experts_on_cpu(bindings: Bindings, n_layers: int) -> Any:
    """The overrides of --n-cpu-moe N: the experts of layers 0 to N-1, and an end mark."""
    overrides = (BufferTypeOverride * (n_layers + 1))()
    find = bindings.api._lib.ggml_backend_cpu_buffer_type
    find.restype = ctypes.c_void_p
    for layer in range(n_layers):
        overrides[layer].pattern = rb"blk\.%d\.ffn_(up|down|gate|gate_up)_exps" % layer
        overrides[layer].buffer_type = find()
    return overrides


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
        bindings = Bindings.load()
        more: dict[str, Any] = {}
        if mmap:
            more["load_mode"] = bindings.api.LLAMA_LOAD_MODE_MMAP
        overrides = _experts_on_cpu(bindings, cpu_moe)
        if cpu_moe:
            more["tensor_buft_overrides"] = ctypes.cast(overrides, ctypes.c_void_p)
        with ExitStack() as stack:
            model = Model(
                bindings,
                path,
                managed=False,
                use_extra_bufts=extra_bufts,
                use_mmap=mmap,
                gpu=gpu,
                overrides=dict([experts_used]) if experts_used else None,
                **more,
            )
            stack.enter_context(closing(model))
            # Without a GPU of its own all is computed on the CPU, as ours is.
            on_gpu = gpu is not None
            self._context = LlamaContext(
                bindings,
                model,
                n_ctx=n_ctx,
                n_ubatch=n_ubatch,
                threads=threads,
                outputs=1,
                flash_attention=True,
                on_gpu=on_gpu,
                op_offload=on_gpu,
                n_outputs_max=0,
                n_outputs_max_per_seq=1,
            )
            stack.enter_context(closing(self._context))
            self._opened = stack.pop_all()
        self.n_vocab, self.context = model.n_vocab, self._context.handle

    def close(self) -> None:
        """Frees everything; further calls are not allowed."""
        self._opened.close()

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, names of control tokens read as such. Raises NativeError."""
        return self._context.model.tokenize(text, add_special=True, parse_special=True)

    def eval(self, tokens: list[int], pos: int) -> npt.NDArray[np.float32]:
        """Decodes tokens at positions pos.. and returns the last one's logits [1, n_vocab], a copy.
        What the KV cache holds from pos on is dropped first. Raises NativeError."""
        context = self._context
        context.forget_from(pos)
        for start in range(0, len(tokens), context.n_ubatch):
            status = context.decode(tokens[start : start + context.n_ubatch], pos + start)
            if status:
                raise NativeError(f"llama_decode failed with {status}")
        logits: npt.NDArray[np.float32] = context.logits().copy()
        return logits
