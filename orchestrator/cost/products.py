"""Timings of a model's matrix products on this processor.

They use ggml's own kernels and weights that exceed all caches.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import ExitStack
from time import perf_counter
from typing import NamedTuple

import numpy as np

from gguf_tools.closing import Closing
from gguf_tools.file.layout import GGMLType, row_bytes
from gguf_tools.process import Disturbance
from orchestrator.errors import NativeError
from orchestrator.native.ggml import GgmlFunctions, InitParams

# Total weights of one timing, more than the caches of a processor hold.
POOL_BYTES = 96 * 2**20
_MOST_MATRICES = 256
# A timing ends after _RUNS runs and _LEAST_SECONDS, or after TIMING_S. _LEAST_SECONDS exceeds a
# typical interruption.
_RUNS, _LEAST_SECONDS, TIMING_S = 7, 0.02, 0.1
# The machine is quiet while threads wait for a core for less than this share of the time.
QUIET_SHARE = 0.1
# Experts that a token uses in one timing, and nodes of a chain.
_USED, _CHAIN = 8, 64
# Maximum number of layers in one attention timing with one query.
_MOST_LAYERS = 48
# The byte that fills weights and inputs; it makes an ordinary number in each type.
_FILL = 0x3C
_F16_BYTES = 2
_SUCCESS = 0


class Product(NamedTuple):
    """A matrix product whose time is measured: one weight matrix times some rows of activations.

    - type: the ggml type of the weights.
    - n_in, n_out: the length of a row of the matrix, and the number of its rows.
    - rows: the number of rows of activations.
    - repacked: the weights are in llama.cpp's repacked layout.
    - routed: the product is that of an MoE layer, whose operation multiplies several experts at
      once.
    - in_slots: the weights are in huge memory pages, like experts in the slots of the expert store.
    """

    type: GGMLType
    n_in: int
    n_out: int
    rows: int
    repacked: bool = False
    routed: bool = False
    in_slots: bool = False

    @property
    def nbytes(self) -> int:
        """The size of the weight matrix in bytes."""
        return row_bytes(self.type, self.n_in) * self.n_out


class Small(NamedTuple):
    """An operation without weights, such as a norm, over `rows` rows of `n` numbers each."""

    n: int
    rows: int


class Attention(NamedTuple):
    """A description of the attention of one layer, whose time is measured.

    - n_head, n_head_kv: the number of heads of queries, and of keys and values.
    - key_length, value_length: numbers per head in a key and in a value, of 16 bits each.
    - rows: the number of tokens whose attention is computed together.
    - cells: the length of the KV cache, in tokens.
    """

    n_head: int
    n_head_kv: int
    key_length: int
    value_length: int
    rows: int
    cells: int


# Bytes for the tensors and the graph of one timing, without their data.
_CONTEXT_BYTES = 4 * 2**20


class Timer(GgmlFunctions, Closing):
    """Times matrix products and other operations with ggml. Close it after use."""

    def __init__(
        self,
        lib: ctypes.CDLL,
        threads: int,
        pool_bytes: int = POOL_BYTES,
        seconds: float = TIMING_S,
    ) -> None:
        """Prepare timings with a number of threads.

        pool_bytes: weights of one timing. If they fit in a processor cache, products seem too fast.
        seconds: maximum duration of one timing. Raises NativeError if ggml's CPU backend cannot be
        opened.
        """
        super().__init__(lib)
        self._pool_bytes, self._seconds = pool_bytes, seconds
        self._backend: int = self.backend_cpu_init()
        if not self._backend:
            raise NativeError(
                "ggml's CPU backend cannot be opened to time operations: free memory and try again"
            )
        self.backend_cpu_set_n_threads(self._backend, threads)
        self._plain: int = self.backend_cpu_buffer_type()
        self._repack = self._repacked_type()

    def _repacked_type(self) -> int | None:
        """Return the handle of llama.cpp's buffer type for repacked weights.

        The result is None if the processor has no repacked layout.
        """
        reg = self.backend_cpu_reg()
        address = self.backend_reg_get_proc_address(reg, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return None
        types = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(
            self.backend_reg_dev_get(reg, 0)
        )
        at = 0
        while found := types[at]:
            if self.backend_buft_name(found) == b"CPU_REPACK":
                return int(found)
            at += 1
        return None

    def seconds(self, what: Product | Small | Attention) -> float:
        """Time an operation with ggml, and return the seconds that the operation takes.

        what: a matrix product, the attention of one layer, or an operation without weights (Small),
        such as a norm. The timing temporarily allocates memory: about `pool_bytes` (an argument of
        the constructor) and some MiB more. Raises NativeError if ggml cannot compute the operation.
        """
        if isinstance(what, Small):
            return self._small(what)
        if isinstance(what, Attention):
            return self._attention(what)
        return self._routed(what) if what.routed else self._single(what)

    def _routed(self, what: Product) -> float:
        most = _MOST_MATRICES if what.rows == 1 else 2 * _USED
        n = max(4, min(most, self._pool_bytes // what.nbytes))
        used = min(_USED, n // 2)
        n_ops = n // used if what.rows == 1 else 1
        with ExitStack() as stack:
            weights = self._context(stack)
            experts = self.new_tensor_3d(weights, what.type, what.n_in, what.n_out, n)
            self._allocate(stack, weights, what)
            context = self._context(stack)
            x = self.new_tensor_3d(context, GGMLType.F32, what.n_in, 1, what.rows)
            chosen = [
                self.new_tensor_2d(context, GGMLType.I32, used, what.rows) for _ in range(n_ops)
            ]
            ops = [self.mul_mat_id(context, experts, x, ids) for ids in chosen]
            self._allocate(stack, context)
            for number, ids in enumerate(chosen):
                first = number * used
                values = np.tile(np.arange(first, first + used, dtype=np.int32), what.rows)
                self.backend_tensor_set(ids, values.ctypes.data, 0, values.nbytes)
            return self._time(context, ops) / used

    def _single(self, what: Product) -> float:
        n = 2 if what.rows > 1 else max(2, min(_MOST_MATRICES, self._pool_bytes // what.nbytes))
        with ExitStack() as stack:
            weights = self._context(stack)
            matrices = [
                self.new_tensor_2d(weights, what.type, what.n_in, what.n_out) for _ in range(n)
            ]
            self._allocate(stack, weights, what)
            context = self._context(stack)
            x = self.new_tensor_2d(context, GGMLType.F32, what.n_in, what.rows)
            ops = [self.mul_mat(context, each, x) for each in matrices]
            self._allocate(stack, context)
            return self._time(context, ops)

    def _small(self, what: Small) -> float:
        with ExitStack() as stack:
            context = self._context(stack)
            ops = [self.new_tensor_2d(context, GGMLType.F32, what.n, what.rows)]
            for _ in range(_CHAIN):
                ops.append(self.rms_norm(context, ops[-1], 1e-6))
            self._allocate(stack, context)
            return self._time(context, ops[1:])

    def _attention(self, what: Attention) -> float:
        """Return the seconds of the attention of one layer.

        With one query, several layers are timed, so that no cache holds all their keys and values.
        During a real token, the weights evict them from the caches between layers.
        """
        lengths = what.key_length, what.value_length
        layer_bytes = what.cells * what.n_head_kv * sum(lengths) * _F16_BYTES
        n = max(2, min(_MOST_LAYERS, self._pool_bytes // layer_bytes)) if what.rows == 1 else 1
        with ExitStack() as stack:
            context = self._context(stack)
            q = self.new_tensor_3d(context, GGMLType.F32, what.key_length, what.rows, what.n_head)
            ops = []
            for _ in range(n):
                k, v = (self._cached(context, length, what) for length in lengths)
                ops.append(self.flash_attn_ext(context, q, k, v, None, 0.1, 0.0, 0.0))
            self._allocate(stack, context)
            return self._time(context, ops)

    def _cached(self, context: int, length: int, what: Attention) -> int:
        """Return a tensor of keys or values as in llama.cpp's KV cache, viewed by heads.

        length: numbers per head and cell.
        """
        head, n = length * _F16_BYTES, what.n_head_kv
        whole = self.new_tensor_2d(context, GGMLType.F16, length * n, what.cells)
        found: int = self.view_3d(context, whole, length, what.cells, n, n * head, head, 0)
        return found

    def _context(self, stack: ExitStack) -> int:
        context: int = self.init(InitParams(_CONTEXT_BYTES, None, True))
        stack.callback(self.free, context)
        return context

    def _allocate(self, stack: ExitStack, context: int, weights: Product | None = None) -> None:
        repacked = weights is not None and weights.repacked
        if repacked and self._repack is None:
            raise NativeError(
                "ggml cannot repack weights on this processor, so products with repacked weights "
                "cannot be timed"
            )
        where = self._repack if repacked else self._plain
        buffer = self.backend_alloc_ctx_tensors_from_buft(context, where)
        if not buffer:
            raise NativeError("not enough memory to time matrix products")
        stack.callback(self.backend_buffer_free, buffer)
        if weights is not None and weights.in_slots:
            base = self.backend_buffer_get_base(buffer)
            _ask_for_huge_pages(base, self.backend_buffer_get_size(buffer))
        self.backend_buffer_clear(buffer, _FILL)

    def _time(self, context: int, ops: list[int]) -> float:
        """Return the seconds of one of several equal operations, which form one graph.

        The result is the median over several runs of the graph. On a busy machine it is the tenth
        percentile, because nine of ten runs may have been interrupted.
        """
        graph = self.new_graph(context)
        for op in ops:
            self.build_forward_expand(graph, op)
        if self.backend_graph_compute(self._backend, graph) != _SUCCESS:
            raise NativeError(
                "ggml failed to compute an operation (such as a matrix product), so it cannot be "
                "timed: free memory and try again"
            )
        times: list[float] = []
        others = Disturbance()
        now = begin = perf_counter()
        while now < begin + (_LEAST_SECONDS if len(times) >= _RUNS else self._seconds):
            self.backend_graph_compute(self._backend, graph)
            start, now = now, perf_counter()
            times.append(now - start)
        below = 2 if others.share() < QUIET_SHARE else 10
        return sorted(times)[len(times) // below] / len(ops)

    def close(self) -> None:
        """Free the ggml backend that computes the timed operations. Safe to call twice."""
        if self._backend:
            self.backend_free(self._backend)
        self._backend = 0


def _ask_for_huge_pages(base: int, n_bytes: int) -> None:
    """Request huge pages for memory that has not been written yet.

    base: address of the memory. The expert store requests them for slots in the same way.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    first = -(-base // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (base + n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        libc = ctypes.CDLL(None)
        length = ctypes.c_size_t(last - first)
        libc.madvise(ctypes.c_void_p(first), length, mmap.MADV_HUGEPAGE)
