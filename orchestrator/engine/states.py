"""What a context holds of one sequence, as bytes: to keep it elsewhere, and to bring it back."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from orchestrator.errors import NativeError
from orchestrator.native.llama import Context

# A copy in memory begins with a magic and the sequence's number, which a file lacks.
COPY_HEAD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a sequence to which its memory can go back.

    length: the tokens before it. part: what cannot be had by cutting, uint8; None where everything
    can. policy: what the policy knew of the sequence there.
    """

    length: int
    part: np.ndarray | None
    policy: bytes | None

    @property
    def n_bytes(self) -> int:
        return (0 if self.part is None else self.part.nbytes) + len(self.policy or b"")


class SequenceState:
    """The state of one sequence of a context, whole or in part.

    The part is what attention over the whole context does not hold: the states of recurrent
    layers, and the keys and values of layers with a window. It is small, and the rest can be cut.
    """

    def __init__(self, context: Context, sequence: int = 0) -> None:
        self._context = context
        self._sequence = sequence

    @cached_property
    def recurrent(self) -> bool:
        """Whether not even the sequence itself can be cut: a recurrent layer knows its latest state
        alone."""
        api, model = self._context.api, self._context.model.handle
        return bool(api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model))

    @cached_property
    def has_part(self) -> bool:
        """Whether a copy cannot be cut everywhere, since it leaves out what a window no longer
        sees."""
        api, model = self._context.api, self._context.model.handle
        return self.recurrent or int(api.llama_model_n_swa(model)) > 0

    def n_bytes(self, part: bool = False) -> int:
        """What read takes."""
        context, flags = self._context, self._flags(part)
        size = context.api.llama_state_seq_get_size_ext(context.handle, self._sequence, flags)
        return int(size)

    def read(self, part: bool = False) -> np.ndarray:
        """A copy, uint8. Raises NativeError."""
        api = self._context.api
        data = np.empty(self.n_bytes(part), np.uint8)
        done = api.llama_state_seq_get_data_ext(
            self._context.handle, _pointer(data), data.nbytes, self._sequence, self._flags(part)
        )
        if done != data.nbytes:
            raise NativeError("llama.cpp cannot copy a conversation's memory")
        return data

    def write(self, data: np.ndarray, part: bool = False) -> bool:
        """Puts a copy in the place of what the sequence holds; False where it does not go in, and
        the sequence is then no longer what it was."""
        api = self._context.api
        done = api.llama_state_seq_set_data_ext(
            self._context.handle, _pointer(data), data.nbytes, self._sequence, self._flags(part)
        )
        return int(done) == data.nbytes

    def save(self, path: Path, tokens: Sequence[int]) -> int:
        """Writes tokens and the whole state to a file, which it replaces, a layer at a time.
        Returns its bytes; 0 where that failed."""
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        return int(
            self._context.api.llama_state_seq_save_file(
                self._context.handle, os.fsencode(path), self._sequence, array, len(tokens)
            )
        )

    def load(self, path: Path, n_tokens: int) -> bool:
        """As write, from a file that save made of so many tokens; more may follow in it."""
        tokens, count = (ctypes.c_int32 * n_tokens)(), ctypes.c_size_t()
        done = self._context.api.llama_state_seq_load_file(
            self._context.handle,
            os.fsencode(path),
            self._sequence,
            tokens,
            n_tokens,
            ctypes.byref(count),
        )
        return bool(done) and count.value == n_tokens

    def _flags(self, part: bool) -> int:
        return int(self._context.api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) if part else 0


def _pointer(data: np.ndarray) -> ctypes._Pointer[ctypes.c_uint8]:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
