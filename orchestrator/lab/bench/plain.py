"""Upstream llama.cpp as a baseline: a model without an expert store.

It uses our patched build of the library, in which llama.cpp's own path is unchanged.
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

# Load llama.cpp before our bindings, which would change how OpenMP threads wait.
built.bindings()


def _experts_on_cpu(bindings: Bindings, n_layers: int) -> Any:
    """Return the tensor overrides that keep the experts of the first n_layers layers on the CPU.

    llama.cpp makes the same overrides for --n-cpu-moe. The last element is an end marker.
    """
    overrides = (BufferTypeOverride * (n_layers + 1))()
    find = bindings.api._lib.ggml_backend_cpu_buffer_type
    find.restype = ctypes.c_void_p
    for layer in range(n_layers):
        overrides[layer].pattern = rb"blk\.%d\.ffn_(up|down|gate|gate_up)_exps" % layer
        overrides[layer].buffer_type = find()
    return overrides


class PlainModel(Closing):
    """Runs a model with upstream llama.cpp, without our engine. Also a context manager.

    - mmap: map the model file, so that weights are read when they are first used. If False, all
      weights are read at load.
    - extra_bufts: allow llama.cpp to repack weights for faster products on the CPU.
    - gpu: number of the GPU, or None to use the CPU only. The experts of the first `cpu_moe` layers
      stay on the CPU, as with llama.cpp's --n-cpu-moe.
    - experts_used: a pair (metadata key, n). Each token uses n experts, instead of the number that
      the model file has under this key.

    Raises NativeError if the model cannot be loaded.
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
            # Without `gpu`, compute everything on the CPU, as our engine does.
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
        """Free the model and the context. No other method may be called afterwards."""
        self._opened.close()

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text. Names of control tokens become control tokens.

        Raises NativeError if the text cannot be tokenized.
        """
        return self._context.model.tokenize(text, add_special=True, parse_special=True)

    def eval(self, tokens: list[int], pos: int) -> npt.NDArray[np.float32]:
        """Evaluate tokens at positions pos, pos + 1, and so on, and return the last token's logits.

        Tokens at positions 0 to pos - 1 must have been evaluated before. Tokens that were evaluated
        at `pos` or later are first removed from the KV cache. The result is a copy, float32 [1,
        n_vocab]. Raises NativeError if the evaluation fails.
        """
        context = self._context
        context.forget_from(pos)
        for start in range(0, len(tokens), context.n_ubatch):
            status = context.decode(tokens[start : start + context.n_ubatch], pos + start)
            if status:
                raise NativeError(f"llama_decode failed with {status}")
        logits: npt.NDArray[np.float32] = context.logits().copy()
        return logits
