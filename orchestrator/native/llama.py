"""llama.cpp's model and context, through the low-level bindings of llama_cpp_python.

The bindings' high-level Llama class is not used, because it copies the logits of every token.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools import built, interrupts
from gguf_tools.experts import DEFAULT_KV, KV_TYPES
from orchestrator.config import native_log_enabled
from orchestrator.errors import NativeError
from orchestrator.native import Library
from orchestrator.native.ggml import ABORT_CALLBACK, GgmlFunctions

EXPERT_PATTERN = rb"blk\.\d+\.ffn_(up|gate|gate_up|down)_exps\.weight"
# Exit status after a fatal error in llama.cpp, as a shell reports SIGABRT.
ABORTED = 128 + 6
# Finds the reason in the message of a fatal error.
ABORT_REASON = r"the process \((.*)\): the"
_BUILD_FOLDER = re.compile(r"^\S*/")
_LOG_ERROR = 4
_MAX_COMPLAINTS = 4
_ALL_LAYERS = 1 << 20
_PIECE_BYTES = 256
# How long OpenMP's threads spin between two graphs: for about 1 ms instead of 20 ms.
_OPENMP_SPINS = "20000"
_LAZY_ON = 2  # LLAMA_LAZY_MODE_ON
_GPU = 1  # GGML_BACKEND_DEVICE_TYPE_GPU


class BufferTypeOverride(ctypes.Structure):
    """The buffer type for tensors whose names match a pattern (C struct of llama.cpp).

    The bindings do not declare this struct.
    """

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


class Bindings:
    """The Python bindings of llama.cpp's library, and the latest errors in its log.

    api: the module of the bindings. complaints: the errors.
    """

    _shared: Bindings | None = None

    def __init__(self) -> None:
        os.environ.setdefault("GOMP_SPINCOUNT", _OPENMP_SPINS)  # read when the library is loaded
        # Otherwise ggml starts a debugger on errors, which prints pages and sometimes hangs.
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        try:
            self.api: Any = built.bindings()
        except built.NotBuilt as error:
            raise NativeError(str(error)) from error
        self.complaints: list[str] = []
        self._log = self.api.llama_log_callback(self._on_log)
        self.listen()
        self.loading = ""  # path of the model that was loaded last
        self._abort = ABORT_CALLBACK(self._on_abort)
        GgmlFunctions(self.api._lib).set_abort_callback(self._abort)
        self.api.llama_backend_init()
        self._library: Library | None = None

    @classmethod
    def load(cls) -> Bindings:
        """Return the bindings. The first call in a process loads them.

        Raises NativeError if moe-edge's build of llama.cpp is not installed.
        """
        if cls._shared is None:
            cls._shared = cls()
        return cls._shared

    def library(self) -> Library:
        """Return the functions that moe-edge has added to llama.cpp's library.

        Raises NativeError if the library was built without moe-edge.
        """
        if self._library is None:
            self._library = Library(self.api._lib)
        return self._library

    def refusal(self) -> str:
        """Return why the expert store refused the model or context that was made last.

        Returns "" if nothing was refused. A reason is returned only once.
        """
        return (self.library().load_error() or b"").decode("utf-8", "replace")

    def count_gpus(self) -> int:
        """Return the number of GPUs that llama.cpp sees."""
        ggml = GgmlFunctions(self.api._lib)
        devices = map(ggml.backend_dev_get, range(ggml.backend_dev_count()))
        return sum(ggml.backend_dev_type(each) == _GPU for each in devices)

    def _on_abort(self, message: bytes) -> None:
        """Print one sentence about a fatal error in ggml, and end the process.

        ggml calls this on any thread. The process ends because llama.cpp cannot continue.
        """
        reason = _BUILD_FOLDER.sub("", message.decode("utf-8", "replace").strip())
        about = f"{self.loading}: " if self.loading else ""
        said = (
            f"Error: {about}llama.cpp had to end the process ({reason}): the file is damaged, or"
            " this llama.cpp cannot run it\n"
        )
        with suppress(OSError):
            os.write(2, ("\n" * os.isatty(2) + said).encode())
        os._exit(ABORTED)

    def listen(self) -> None:
        """Receive the messages of llama.cpp's log again, and forget earlier errors.

        Other code in the process may have replaced the receiver of the log.
        """
        self.complaints.clear()
        self.api.llama_log_set(self._log, ctypes.c_void_p(0))

    @interrupts.called_from_c
    def _on_log(self, level: int, text: bytes, _user: int | None) -> None:
        line = text.decode("utf-8", "replace")
        if level == _LOG_ERROR and line.strip() and len(self.complaints) < _MAX_COMPLAINTS:
            self.complaints.append(line.strip())
        if native_log_enabled():
            print(line, end="", file=sys.stderr, flush=True)

    def complaint(self) -> str:
        """Return the first error in llama.cpp's log since the last call, in parentheses, or "".

        Later errors usually follow from the first error.
        """
        said = list(self.complaints)
        self.complaints.clear()
        return f" ({said[0]})" if said else ""


class Model:
    """A loaded llama_model and its vocabulary. Call `close` after its contexts are closed."""

    def __init__(
        self,
        bindings: Bindings,
        path: Path,
        *,
        managed: bool,
        use_extra_bufts: bool,
        use_mmap: bool,
        gpu: int | None = None,
        buffer_type: int | None = None,
        progress: Callable[[float], None] | None = None,
        no_data: bool = False,
        overrides: Mapping[str, int | str] | None = None,
        **more: Any,
    ) -> None:
        """Load a model from a GGUF file.

        managed: whether an expert store holds the experts. Their tensors are then placeholders, in
        buffers of type buffer_type, and rows of lookup tables are read from the file when needed.
        use_extra_bufts: repack weights for the CPU. gpu: number of the GPU that gets all weights;
        None to load them to host memory. no_data: allocate no memory for the model and its
        contexts, which then report how much they would need. overrides: metadata that replaces the
        file's metadata, by key. more: other fields of llama_model_params.

        Raises NativeError with the library's reason, and any exception of `progress`.
        """
        api = self.api = bindings.api
        self._handle: int | None = None
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0 if gpu is None else _ALL_LAYERS
        params.split_mode, params.main_gpu = api.LLAMA_SPLIT_MODE_NONE, gpu or 0
        params.load_mode = api.LLAMA_LOAD_MODE_AUTO if use_mmap else api.LLAMA_LOAD_MODE_NONE
        params.use_extra_bufts, params.no_alloc = use_extra_bufts, no_data
        places = (BufferTypeOverride * 2)()
        if managed:
            params.lazy_mode = _LAZY_ON
            places[0].pattern = EXPERT_PATTERN
            places[0].buffer_type = buffer_type or bindings.library().buffer_type()
            params.tensor_buft_overrides = ctypes.cast(places, ctypes.c_void_p)
        values = _overrides(api, overrides) if overrides else None
        if values is not None:
            params.kv_overrides = values
        for name, value in more.items():
            setattr(params, name, value)

        @interrupts.called_from_c
        def report(done: float, _user: int | None) -> bool:
            try:
                if progress is not None:
                    progress(done)
            except BaseException as error:  # noqa: BLE001 - raised again after C has returned
                interrupts.hand_over(error)
                return False
            return not interrupts.asked()

        params.progress_callback = api.llama_progress_callback(report)
        bindings.listen()
        bindings.loading = str(path)
        handle = None
        try:
            with interrupts.held():
                handle = api.llama_model_load_from_file(os.fsencode(path), params)
        except BaseException:
            if handle:
                api.llama_model_free(handle)
            raise
        if not handle:
            if managed and (reason := bindings.refusal()):
                raise NativeError(f"{path}: {reason}")
            raise NativeError(f"{path}: llama.cpp cannot load the model{bindings.complaint()}")
        self._handle = handle
        self.path, self.managed = path, managed
        self.vocab = api.llama_model_get_vocab(handle)
        self.n_vocab: int = api.llama_vocab_n_tokens(self.vocab)

    @property
    def handle(self) -> int:
        """The address of the llama_model. Raises NativeError after `close`."""
        if self._handle is None:
            raise NativeError("the model is closed")
        return self._handle

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Return the token ids of a text.

        add_special: add the special tokens that the model expects, such as BOS. parse_special:
        parse the names of control tokens in the text. Raises NativeError if the tokenizer fails.
        """
        data = text.encode("utf-8", "replace")
        capacity = len(data) + 16
        for _ in range(2):
            tokens = (self.api.llama_token * capacity)()
            count = self.api.llama_tokenize(
                self.vocab, data, len(data), tokens, capacity, add_special, parse_special
            )
            if count >= 0:
                return list(tokens[:count])
            capacity = -count
        raise NativeError("the text cannot be tokenized")

    def piece(self, token: int, special: bool = False, capacity: int = _PIECE_BYTES) -> bytes:
        """Return the bytes of a token's text.

        special: return the names of control tokens, instead of empty bytes. capacity: expected
        maximum length in bytes. A longer text is also returned, but takes a second call.
        """
        text = ctypes.create_string_buffer(capacity)
        count = self.api.llama_token_to_piece(self.vocab, token, text, capacity, 0, special)
        return self.piece(token, special, -count) if count < 0 else text.raw[:count]

    def is_end(self, token: int) -> bool:
        """Whether a token ends an answer."""
        return bool(self.api.llama_vocab_is_eog(self.vocab, token))

    def adds_bos(self) -> bool:
        """Whether the tokenizer starts a text with BOS."""
        return bool(self.api.llama_vocab_get_add_bos(self.vocab))

    def bos(self) -> str:
        """Return the text of the BOS token; "" if there is none."""
        return self._token_text(self.api.llama_vocab_bos(self.vocab))

    def eos(self) -> str:
        """Return the text of the EOS token; "" if there is none."""
        return self._token_text(self.api.llama_vocab_eos(self.vocab))

    def _token_text(self, token: int) -> str:
        return "" if token < 0 else self.piece(token, special=True).decode("utf-8", "replace")

    def close(self) -> None:
        """Free the model. Safe to call twice."""
        if self._handle is not None:
            self.api.llama_model_free(self._handle)
            self._handle = None


def _overrides(api: Any, overrides: Mapping[str, int | str]) -> Any:
    """Return metadata overrides as an array of llama_model_kv_override for llama.cpp.

    overrides: values by metadata key. An entry without a key ends the array.
    """
    values = (api.llama_model_kv_override * (len(overrides) + 1))()
    for each, (key, value) in zip(values, overrides.items(), strict=False):
        each.key = key.encode()
        if isinstance(value, int):
            each.tag, each.value.val_i64 = api.LLAMA_KV_OVERRIDE_TYPE_INT, value
        else:
            each.tag, each.value.val_str = api.LLAMA_KV_OVERRIDE_TYPE_STR, value.encode()
    return values


class LlamaContext:
    """A llama_context, which evaluates tokens of one or several sequences.

    All sequences share its KV cells. Call `close` before the expert store and the model are closed.
    """

    def __init__(
        self,
        bindings: Bindings,
        model: Model,
        *,
        n_ctx: int,
        n_ubatch: int,
        threads: int,
        outputs: int,
        flash_attention: bool,
        on_gpu: bool = False,
        sequences: int = 0,
        kv: str = DEFAULT_KV,
        **more: Any,
    ) -> None:
        """Make a context. Raises NativeError with llama.cpp's reason if that fails.

        n_ctx: context length in tokens. n_ubatch: micro-batch size. outputs: largest number of
        tokens of a sequence that have logits in one step. flash_attention: if False, attention
        weights can be read from the graph. on_gpu: whether the KV cache is on the GPU. sequences:
        number of sequences in addition to sequence 0. kv: type of the KV cache, from KV_TYPES.
        more: other fields of llama_context_params.
        """
        api = self.api = bindings.api
        self.model = model
        if api.llama_model_is_diffusion(model.handle):
            raise NativeError(
                f"{model.path}: diffusion models are not supported: they do not generate token by "
                "token"
            )
        params = api.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_ubatch = n_ubatch
        # llama.cpp's server core tests each context with a batch of two tokens.
        params.n_batch = max(2, n_ubatch)
        self.outputs = params.n_outputs_max_per_seq = outputs
        params.n_outputs_max = max(outputs, 1 + sequences)
        if sequences:
            params.n_seq_max, params.kv_unified = 1 + sequences, True
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        if kv != DEFAULT_KV:
            params.type_k = params.type_v = int(KV_TYPES[kv])
        if not flash_attention:
            params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        # By default a CUDA build moves the KV cache and large products to the GPU.
        params.offload_kqv = on_gpu
        params.op_offload = False
        for name, value in more.items():
            setattr(params, name, value)
        bindings.listen()
        self._handle: int | None = api.llama_init_from_model(model.handle, params)
        if not self._handle:
            if model.managed and (reason := bindings.refusal()):
                raise NativeError(f"{model.path}: {reason}")
            raise NativeError(f"llama.cpp cannot make a context{bindings.complaint()}")
        # Returns whether to end a decode early. Called during interruptible steps.
        self.should_stop: Callable[[], bool] = lambda: False
        # Ends a decode early. Called from another thread when a signal arrives.
        self.stop: Callable[[], None] = lambda: None
        self._abort = api.ggml_abort_callback(self._on_abort)
        self._no_abort = api.ggml_abort_callback(0)
        self.n_ubatch: int = api.llama_n_ubatch(self._handle)
        self.n_ctx: int = api.llama_n_ctx(self._handle)
        self._memory = api.llama_get_memory(self._handle)
        self._batch = api.llama_batch_init(self.n_ubatch, 0, 1)
        shape = (self.n_ubatch,)
        self._tokens = np.ctypeslib.as_array(self._batch.token, shape)
        self._positions = np.ctypeslib.as_array(self._batch.pos, shape)
        self._wanted = np.ctypeslib.as_array(self._batch.logits, shape)
        np.ctypeslib.as_array(self._batch.n_seq_id, shape)[:] = 1
        for i in range(self.n_ubatch):
            self._batch.seq_id[i][0] = 0

    @interrupts.called_from_c
    def _on_abort(self, _data: int | None) -> bool:
        # Running Python between graph nodes also lets a Ctrl-C handler run.
        try:
            return self.should_stop() or interrupts.asked()
        except BaseException as error:  # noqa: BLE001 - raised again after C has returned
            interrupts.hand_over(error)
            return True

    @property
    def handle(self) -> int:
        """The address of the llama_context. Raises NativeError after `close`."""
        if self._handle is None:
            raise NativeError("the context is closed")
        return self._handle

    def decode(
        self, tokens: Sequence[int], pos: int, all_logits: bool = False, interruptible: bool = False
    ) -> int:
        """Evaluate at most n_ubatch tokens of sequence 0, at positions pos, pos + 1, and so on.

        all_logits: compute logits of each token, instead of only the last token. interruptible:
        check should_stop before every graph node; this is slow, so use it for long steps only.

        Returns the status of llama_decode: 0 for success, 1 for too few KV cells, 2 after an abort,
        negative on an error. Raises KeyboardInterrupt, and any exception of should_stop.
        """
        n = len(tokens)
        self._tokens[:n] = tokens
        self._positions[:n] = range(pos, pos + n)
        self._wanted[:n] = all_logits
        self._wanted[n - 1] = 1
        self._batch.n_tokens = n
        return self._decode(interruptible)

    def decode_each(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        wanted: np.ndarray | None = None,
    ) -> int:
        """Evaluate tokens of several sequences in one step.

        Token i gets position positions[i] in sequence sequences[i]. wanted: which tokens get
        logits, bool; None for all tokens. Returns the status of llama_decode: 0 for success, 1 for
        too few KV cells, 2 after an abort, negative on an error.
        """
        n = len(tokens)
        self._tokens[:n], self._positions[:n] = tokens, positions
        self._wanted[:n] = 1 if wanted is None else wanted
        self._batch.n_tokens = n
        try:
            for i, sequence in enumerate(sequences):
                self._batch.seq_id[i][0] = sequence
            return self._decode()
        finally:
            for i in range(n):
                self._batch.seq_id[i][0] = 0

    def _decode(self, interruptible: bool = False) -> int:
        with interrupts.held(self.stop):
            if not interruptible:
                return int(self.api.llama_decode(self.handle, self._batch))
            self.api.llama_set_abort_callback(self.handle, self._abort, None)
            try:
                return int(self.api.llama_decode(self.handle, self._batch))
            finally:
                self.api.llama_set_abort_callback(self.handle, self._no_abort, None)

    def share(self, sequence: int) -> None:
        """Drop all tokens of a sequence, then give it the tokens of sequence 0.

        Both sequences then use the same KV cells for these tokens, so no cell is copied. sequence:
        the number of the sequence, other than 0.
        """
        self.api.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self.api.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def logits(self, n_outputs: int = 1) -> np.ndarray:
        """Return the logits of the last decode, float32 [n_outputs, n_vocab].

        n_outputs: number of tokens that got logits in that decode. The array is a view that is
        valid until the next decode.
        """
        pointer = self.api.llama_get_logits(self.handle)
        if not pointer:
            raise NativeError("llama.cpp has no logits: decode a step first")
        return np.ctypeslib.as_array(pointer, (n_outputs, self.model.n_vocab))

    def forget_from(self, pos: int, sequence: int = 0) -> bool:
        """Drop the tokens of a sequence from position pos on.

        Returns False, and drops nothing, if the model cannot truncate a sequence there.
        """
        return bool(self.api.llama_memory_seq_rm(self._memory, sequence, pos, -1))

    def forget_all(self) -> None:
        """Drop the tokens of all sequences."""
        self.api.llama_memory_clear(self._memory, True)

    def close(self) -> None:
        """Free the context. Safe to call twice."""
        if self._handle is not None:
            self.api.llama_batch_free(self._batch)
            self.api.llama_free(self._handle)
            self._handle = None
