"""A second context on a runtime's model, as another front end of llama.cpp would create it."""

import ctypes
from dataclasses import dataclass

import numpy as np

from orchestrator.native.llama import Bindings


@dataclass(frozen=True)
class Token:
    """One token of a batch. wanted: compute its logits."""

    id: int
    pos: int
    sequence: int = 0
    wanted: bool = False


def prompt(tokens, pos=0, sequence=0):
    """Tokens of one sequence. Only the last one gets logits."""
    last = len(tokens) - 1
    return [Token(each, pos + i, sequence, i == last) for i, each in enumerate(tokens)]


class Decoder:
    """A context that decodes batches. Call `close` before the model is freed."""

    def __init__(self, model, n_ubatch=8, n_batch=64):
        api = self.api = Bindings.load().api
        self.n_vocab = model.n_vocab
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 256, n_batch, n_ubatch
        params.n_seq_max, params.kv_unified = 4, True
        params.n_outputs_max = params.n_outputs_max_per_seq = n_batch
        params.n_threads = params.n_threads_batch = 1
        params.no_perf, params.op_offload, params.offload_kqv = True, False, False
        self.handle = api.llama_init_from_model(model.handle, params)
        assert self.handle
        self.memory = api.llama_get_memory(self.handle)
        self._batch = api.llama_batch_init(n_batch, 0, 1)

    def decode(self, tokens):
        """Return the status of llama_decode."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token.id, token.pos, token.wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, token.sequence
        return int(self.api.llama_decode(self.handle, batch))

    def logits(self, i=-1):
        """Return a copy of the logits of batch token i."""
        pointer = self.api.llama_get_logits_ith(self.handle, i)
        return np.ctypeslib.as_array(pointer, (self.n_vocab,)).copy()

    def last_pos(self, sequence=0):
        """Return the position of a sequence's last token in the KV cache, or -1 if it is empty."""
        return int(self.api.llama_memory_seq_pos_max(self.memory, sequence))

    def forget(self):
        self.api.llama_memory_clear(self.memory, True)

    def stop_when(self, callback):
        """Set the context's abort callback, an api.ggml_abort_callback."""
        self.api.llama_set_abort_callback(self.handle, callback, ctypes.c_void_p(None))

    def close(self):
        self.api.llama_batch_free(self._batch)
        self.api.llama_free(self.handle)
