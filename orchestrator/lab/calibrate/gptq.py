"""GPTQ with the Hessians of a calibration run, made layer by layer while ``pack`` asks for the
experts."""

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
# Inputs for each column that the layer's mean is taken of.
SAMPLES = 8


@contextmanager
def computing() -> Iterator[str]:
    """The device that torch computes on. On the CPU it uses one thread meanwhile: pack's own
    threads share the cores. Raises QuantizeError without torch."""
    gptq.torch_module()
    with one_torch_thread():
        yield gptq.default_device()


class Gptq:
    """An ExpertQuantizer. Where an expert saw no token, its gate and up are rounded by what the
    layer's tokens say, and its down as ggml does it alone."""

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
        """layers: what a capture gives, one at a time, when pack has come to the next. threads:
        those of pack. factorizing: how many Hessians may be factorized at once."""
        self.calibration = calibration
        self._threads = threads
        self._turns = threading.Semaphore(factorizing)
        self._ggml, self._layers, self._device = ggml, layers, device
        self._lock = threading.Lock()
        self._current: _Layer | None = None
        # Of each layer so far: the tokens that each expert saw, and the columns of its matrices.
        self._seen: list[tuple[np.ndarray, int]] = []

    def quantize(
        self, layer: int, kind: int, expert: int, values: Floats, ggml_type: GGMLType
    ) -> Blocks:
        factor = self._at(layer).factor(kind, expert)
        if factor is not None:
            return gptq.quantize(self._ggml, ggml_type, values, factor)
        alike = np.ones(values.shape[1], np.float32) if ggml_type in IMPORTANCE_TYPES else None
        return self._ggml.quantize(ggml_type, values, alike)

    def note(self) -> str | None:
        """A sentence on experts that saw too few tokens to go by, None where all saw enough."""
        few = sum(int((counts < columns).sum()) for counts, columns in self._seen)
        none = sum(int((counts == 0).sum()) for counts, _ in self._seen)
        if not few:
            return None
        total = sum(len(counts) for counts, _ in self._seen)
        return (
            f"{few} of {total} experts saw fewer tokens than their matrices have columns ({none}"
            " saw none), and were rounded by their layer's tokens as well: more text (--calib,"
            " --calib-tokens) makes them better"
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
                raise QuantizeError(f"layer {layer} was not asked for in its turn")
            return self._current


def kept_factors(threads: int) -> int:
    """How many factors are kept. Gate and up of an expert share one, all its tiers do, and pack
    goes through the experts in turn: so what the threads are at, and one more, is what may be asked
    for again. Threads that fell behind have others of their own, one less than there are."""
    return threads + 1


class _Layer:
    """The factors of one layer, each made when it is first asked for, the last ones kept."""

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
        """Of one expert's matrix; None where there is nothing to go by."""
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
        """Mean x x^T over inputs of gate and up, spread over the text: a sample will do for what
        smooths the experts' own."""
        x = self._seen.x
        n_rows = self._seen.n_tokens * x.per_token
        columns = x.take(np.arange(0)).shape[1]
        step = max(1, n_rows // (SAMPLES * columns))
        rows = np.arange(0, n_rows, step)
        return self._outer_sum(rows, x.take) / len(rows)

    def _outer_sum(self, rows: np.ndarray, take: Callable[[np.ndarray], Floats]) -> Square:
        parts = (rows[at : at + ROWS_AT_ONCE] for at in range(0, max(len(rows), 1), ROWS_AT_ONCE))
        return gptq.outer_sum((take(each) for each in parts), self._device)
