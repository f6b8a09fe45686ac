"""GPTQ with Hessians from a calibration run, computed layer by layer while `pack` quantizes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np

from gguf_tools.convert.upstream import one_torch_thread
from gguf_tools.errors import QuantizeError
from gguf_tools.file.layout import DOWN, GATE, IMPORTANCE_TYPES, GGMLType
from gguf_tools.quantize import gptq
from gguf_tools.quantize.ggml import Blocks, Floats, Ggml
from gguf_tools.quantize.gptq import Factor, Square
from orchestrator.lab.calibrate.capture import LayerActivations

ROWS_AT_ONCE = 4096
# Number of sampled inputs, per matrix column, for the mean over a layer's experts.
SAMPLES = 8


@contextmanager
def computing() -> Iterator[str]:
    """Yield the name of the device on which torch computes GPTQ.

    Until the context ends, torch uses only one CPU thread, because the threads of `moe-edge pack`
    share the cores. Raises QuantizeError if torch is missing.
    """
    gptq.torch_module()
    with one_torch_thread():
        yield gptq.default_device()


class Gptq:
    """Quantizes expert matrices with GPTQ (implements ExpertQuantizer).

    An expert that the calibration text never used has no Hessian of its own. Its gate and up
    matrices use the mean Hessian of the layer. Its down matrix is rounded by ggml.
    """

    method = "gptq"
    has_importance = True

    def __init__(
        self,
        ggml: Ggml,
        layers: Iterator[LayerActivations],
        calibration: str,
        device: str,
        threads: int,
        factorizing: int,
    ) -> None:
        """Set up the quantizer, which `moe-edge pack` calls layer by layer.

        - layers: yields the activations of one layer at a time, when `pack` reaches the layer.
        - calibration: one line that identifies the calibration text.
        - device: the torch device.
        - threads: number of threads of `pack`.
        - factorizing: maximum number of Hessians that are factorized at the same time.
        """
        self.calibration = calibration
        self._threads = threads
        self._turns = threading.Semaphore(factorizing)
        self._ggml, self._layers, self._device = ggml, layers, device
        self._lock = threading.Lock()
        self._current: _Layer | None = None
        # For each processed layer: the token counts of its experts, and the number of columns of
        # their matrices.
        self._seen: list[tuple[np.ndarray, int]] = []

    def quantize(
        self, layer: int, kind: int, expert: int, values: Floats, ggml_type: GGMLType
    ) -> Blocks:
        factor = self._at(layer).factor(kind, expert)
        if factor is not None:
            return gptq.quantize(self._ggml, ggml_type, values, factor)
        uniform = np.ones(values.shape[1], np.float32) if ggml_type in IMPORTANCE_TYPES else None
        return self._ggml.quantize(ggml_type, values, uniform)

    def note(self) -> str | None:
        """Return a warning about experts that saw too few tokens, or None if all saw enough.

        Too few means fewer tokens than the expert's matrices have columns.
        """
        few = sum(int((counts < columns).sum()) for counts, columns in self._seen)
        none = sum(int((counts == 0).sum()) for counts, _ in self._seen)
        if not few:
            return None
        total = sum(len(counts) for counts, _ in self._seen)
        return (
            f"{few} of {total} experts got too few tokens of the text for GPTQ, and {none} of them "
            f"got no token. For these experts, GPTQ also used the tokens of other experts of the "
            f"same layer. More text improves the result (--calib, --calib-tokens)."
        )

    def _at(self, layer: int) -> _Layer:
        with self._lock:
            while self._current is None or self._current.number < layer:
                self._current = None
                seen = next(self._layers, None)
                if seen is None:
                    break
                self._current = _Layer(seen, self._device, self._threads, self._turns)
                self._seen.append((seen.counts(), len(self._current.shared)))
            if self._current is None or self._current.number != layer:
                raise QuantizeError(
                    f"layer {layer} was requested out of order: request the layers in ascending "
                    f"order"
                )
            return self._current


def kept_factors(threads: int) -> int:
    """Return how many factorized Hessians are kept in memory if `threads` threads quantize experts.

    A factorized Hessian is used again for other matrices and precisions of the same expert.
    """
    return threads + 1


class _Layer:
    """The factorized Hessians of the expert matrices of one layer.

    Each factor is computed when it is first requested. Only the most recently requested factors are
    kept.
    """

    def __init__(
        self, seen: LayerActivations, device: str, threads: int, turns: threading.Semaphore
    ) -> None:
        self.number = seen.layer
        self._kept, self._turns = kept_factors(threads), turns
        self._seen, self._device = seen, device
        self._counts = seen.counts()
        self._lock = threading.Lock()
        self._made: dict[tuple[bool, int], Future[Factor | None]] = {}
        self.shared = self._mean_of_all()

    def factor(self, kind: int, expert: int) -> Factor | None:
        """Return the factorized Hessian with which GPTQ quantizes a matrix of an expert.

        The Hessian is the smoothed sum of x x^T over the calibration inputs x of the matrix. The
        result contains the Cholesky factor of the inverse Hessian. The result is None if the
        Hessian is zero, because there is no calibration data, or if it cannot be factorized.

        kind: the kind of the matrix, such as DOWN. expert: the index of the expert.
        """
        key = (kind == DOWN, expert)
        with self._lock:
            known = self._made.pop(key, None)
            made = self._made[key] = known or Future()
            while len(self._made) > self._kept:
                del self._made[next(iter(self._made))]
        if known is None:
            try:
                with self._turns:
                    made.set_result(gptq.factorize(self._hessian(kind, expert), self._device))
            except BaseException as error:
                made.set_exception(error)
                raise
        return made.result()

    def _hessian(self, kind: int, expert: int) -> Square:
        tokens = int(self._counts[expert])
        side = DOWN if kind == DOWN else GATE

        def take(rows: np.ndarray) -> Floats:
            start, stop = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
            return self._seen.inputs(side, expert, start, stop)

        own = self._outer_sum(np.arange(tokens), take)
        return gptq.smoothed(own, tokens, None if kind == DOWN else self.shared)

    def _mean_of_all(self) -> Square:
        """Return the mean of x x^T over a sample of the layer's inputs x of gate and up.

        The sample is spread evenly over the text. The mean is used to smooth the Hessians of the
        single experts.
        """
        x = self._seen.x
        n_rows = self._seen.n_tokens * x.per_token
        columns = x.take(np.arange(0)).shape[1]
        step = max(1, n_rows // (SAMPLES * columns))
        rows = np.arange(0, n_rows, step)
        return self._outer_sum(rows, x.take) / len(rows)

    def _outer_sum(self, rows: np.ndarray, take: Callable[[np.ndarray], Floats]) -> Square:
        parts = (rows[at : at + ROWS_AT_ONCE] for at in range(0, max(len(rows), 1), ROWS_AT_ONCE))
        return gptq.outer_sum((take(each) for each in parts), self._device)
