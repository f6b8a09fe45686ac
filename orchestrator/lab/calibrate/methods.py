"""Quantization methods by name, and the calibration runs that they need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN, expert_tensor_name
from gguf_tools.pack.jobs import RUN_WEIGHTS
from gguf_tools.process import compute_threads
from gguf_tools.quantize.ggml import load_ggml
from gguf_tools.quantize.imatrix import Entry, ExpertImportance, Imatrix, write_imatrix
from gguf_tools.quantize.methods import ByImportance, ExpertQuantizer
from orchestrator.errors import BudgetError, ConfigError
from orchestrator.events import distinct
from orchestrator.lab.calibrate.capture import (
    MAX_TOKENS,
    WINDOW,
    Calibration,
    Capture,
    Progress,
    WindowActivations,
    read_calibration,
)
from orchestrator.lab.calibrate.gptq import ROWS_AT_ONCE, Gptq, computing, kept_factors
from orchestrator.lab.observe import CalibrationBudget, expert_input_bytes


def gather(
    capture: Capture,
    model: ExpertModel,
    calibration: Calibration,
    progress: Progress = lambda share: None,
) -> Imatrix:
    """Read a text and return its importance matrix: the sums of squared inputs of expert matrices.

    The result also contains the number of tokens routed to each expert. `model` is the file that
    `capture` has loaded. Only the sums are kept in memory. Raises NativeError if the experts'
    inputs cannot be found in the model's graph.
    """
    n_layers, n = len(model.layer_ids), model.n_expert
    sums: list[dict[int, np.ndarray]] = [
        {
            kind: np.zeros((n, shape[0]), np.float32)
            for kind, shape in enumerate(model.shapes[layer])
            if shape is not None
        }
        for layer in range(n_layers)
    ]
    counts = np.zeros((n_layers, n), np.int64)

    def add(layer: int, _number: int, seen: WindowActivations) -> None:
        up = sum_squares(seen.x, seen.ids, n)
        down = sum_squares(seen.hidden, seen.ids, n)
        for kind, total in sums[layer].items():
            total += down if kind == DOWN else up
        counts[layer] += np.bincount(seen.ids.ravel(), minlength=n)

    capture.read(calibration.windows, range(n_layers), add, progress)
    entries = {
        expert_tensor_name(il, kind): Entry(total, counts[layer].astype(np.float32))
        for layer, il in enumerate(model.layer_ids)
        for kind, total in sums[layer].items()
    }
    n_windows = len(calibration.windows)
    return Imatrix(calibration.name, entries, [calibration.name], n_windows, WINDOW)


def sum_squares(values: np.ndarray, ids: np.ndarray, n_expert: int) -> np.ndarray:
    """Return the squared inputs of each expert, summed over its tokens: float32 [n_expert, width].

    `values` are the inputs of T tokens [T, s, width]. s is 1 if the k experts of a token share an
    input, else k. `ids` are the experts of each token [T, k].
    """
    squares = np.square(values)
    total = np.zeros((n_expert, values.shape[2]), np.float32)
    for expert in distinct(ids):
        token, slot = np.nonzero(ids == expert)
        total[expert] = squares[token, slot if values.shape[1] > 1 else 0].sum(axis=0)
    return total


RTN, IMATRIX, GPTQ = "rtn", "imatrix", "gptq"
METHODS = (RTN, IMATRIX, GPTQ)
# Memory of a calibrating process in addition to the model: Python modules, and ggml's quantization
# tables. Measured: 2 to 4 MiB.
_PROCESS_BYTES = 4 << 20
# Number of float32 copies of the rows that GPTQ rounds at a time.
_RUN_COPIES = 8
# Number of square float64 matrices in memory while a Hessian is factorized, including the Hessian
# (measured: 5.4).
_SQUARES = 6
# Bytes per element of a Hessian while it is summed: the sum, and the product of some inputs in
# float32 and float64.
_SUM_BYTES = 20
# Bytes per input value that is added to a Hessian: the stored float16, and two float32 copies.
_INPUT_BYTES = 10
# Memory of torch. Measured: 197 MiB after the first product and factorization, and 10 MiB more for
# the malloc arenas of pack's threads.
_TORCH_BYTES = 224 << 20
# At most 1 / _SHARE of the memory cap is used to process several experts at the same time.
_SHARE = 4


@dataclass(frozen=True, slots=True)
class Method:
    """The quantization method for experts, with its options.

    - name: rtn, imatrix or gptq. None selects imatrix if `imatrix` is given, else rtn.
    - calib: text file to calibrate on; its first `tokens` tokens are used.
    - imatrix: file with an existing importance matrix, which replaces a calibration.
    - ram: memory cap of a calibration, in bytes. None means no cap.
    """

    name: str | None = None
    calib: Path | None = None
    imatrix: Path | None = None
    tokens: int = MAX_TOKENS
    threads: int | None = None
    ram: int | None = None

    @property
    def chosen(self) -> str:
        return self.name or (IMATRIX if self.imatrix else RTN)

    def check(self) -> None:
        """Raise ConfigError for an unknown quantization method or contradictory options."""
        name = self.chosen
        if name not in METHODS:
            raise ConfigError(f"--method {name} is unknown: choose one of {', '.join(METHODS)}")
        if name == RTN and (self.calib or self.imatrix):
            option = "--calib" if self.calib else "--imatrix"
            raise ConfigError(f"{option} has no effect with --method rtn: use --method imatrix")
        if name == IMATRIX and (self.calib is None) == (self.imatrix is None):
            raise ConfigError("--method imatrix needs either --calib TEXT or --imatrix FILE")
        if name == GPTQ and (self.calib is None or self.imatrix is not None):
            raise ConfigError("--method gptq needs --calib TEXT and cannot be used with --imatrix")


@contextmanager
def open_quantizer(
    method: Method, source: Path, progress: Progress, note: Callable[[str], None]
) -> Iterator[ExpertQuantizer | None]:
    """Perform the calibration that a quantization method needs, and yield its quantizer.

    Yields None for the method rtn (rounding to the nearest value), which needs no data. `source` is
    the model file. `note` receives warnings for the user. Raises MoeEdgeError if the options are
    invalid or the calibration fails.
    """
    method.check()
    if method.chosen == RTN:
        yield None
        return
    if method.chosen == GPTQ:
        with gptq_of(method, source, progress) as quantizer:
            yield quantizer
            weak = quantizer.note()
        if weak:
            note(weak)
        return
    with ExpertModel.open(source) as model:
        if method.imatrix is not None:
            by = ByImportance.of_file(method.imatrix, model, load_ggml())
        else:
            imatrix, calibration = calibrated(method, model, progress)
            by = ByImportance(load_ggml(), imatrix, model, calibration)
    weak = by.note()
    if weak:
        note(weak)
    yield by


@contextmanager
def _reading(
    method: Method, source: Path, own_bytes: int, each_bytes: int = 0
) -> Iterator[tuple[Capture, Calibration, int]]:
    """Load a model to read a calibration text within a memory cap.

    Yields the model, the text, and the number of experts to process at the same time. Each such
    expert needs each_bytes, in addition to own_bytes. Raises BudgetError with the minimum cap if
    not even one expert fits.
    """
    if method.calib is None:
        raise ConfigError("a text to calibrate on is missing: give --calib TEXT")
    threads = compute_threads(method.threads)
    n = threads if each_bytes else 1
    if each_bytes and method.ram is not None:
        n = max(1, min(threads, method.ram // _SHARE // each_bytes))
    while True:
        own = own_bytes + n * each_bytes + _PROCESS_BYTES
        budget = None if method.ram is None else CalibrationBudget(method.ram, own)
        try:
            opened = Capture(source, threads=method.threads, budget=budget)
            break
        except BudgetError:
            if n == 1:
                raise
            n -= 1
    with opened as capture:
        yield capture, read_calibration(capture.tokenize, method.calib, method.tokens), n


@contextmanager
def gptq_of(method: Method, source: Path, progress: Progress) -> Iterator[Gptq]:
    """Return a context manager that yields one quantizer, which applies GPTQ to all experts.

    GPTQ needs the inputs of the experts. To record them, the model in the file `source` reads the
    calibration text of `method`. If the inputs of all layers are too large to store at once, the
    model reads the text again for each further group of layers. The caller must therefore quantize
    the layers in order.

    - progress: receives the completed fraction of the reading.
    """
    threads = compute_threads(method.threads)
    with ExpertModel.open(source) as model:
        shapes = [shape for layer in model.shapes for shape in layer if shape is not None]
        n = max(width for width, _ in shapes)
        # Each thread of pack holds rows in float32, their encodings and the encodings' candidates.
        run = min(RUN_WEIGHTS, max(width * rows for width, rows in shapes))
        own = expert_input_bytes(model, WINDOW) + _TORCH_BYTES + threads * _RUN_COPIES * 4 * run
        # Memory of the factorized Hessians, and of the mean Hessian of the layer.
        own += 8 * n**2 * (kept_factors(threads) + threads)
        # Memory for the largest Hessian, while its inputs are summed or while it is factorized.
        rows = min(ROWS_AT_ONCE, method.tokens)
        each = max(_SQUARES * 8 * n**2, _SUM_BYTES * n**2 + _INPUT_BYTES * rows * n)
    with (
        computing() as device,
        _reading(method, source, own, each) as (capture, calibration, factorizing),
        closing(capture.layers(calibration.windows, progress=progress)) as layers,
    ):
        # Read the text for the first layers now, because progress is shown only until `pack`
        # begins.
        first = next(layers)
        seen, line = chain([first], layers), calibration.summary()
        yield Gptq(load_ggml(), seen, line, device, threads, factorizing)


def calibrated(method: Method, model: ExpertModel, progress: Progress) -> tuple[Imatrix, str]:
    """Compute the importance matrix of a model from a calibration text.

    The matrix has the sums of the squared inputs of each expert matrix. Returns the matrix, and one
    line that identifies the text.

    - method: the options of the quantization, which include the file of the text.
    - progress: receives the completed fraction.
    """
    columns = sum(shape[0] for layer in model.shapes for shape in layer if shape is not None)
    own = expert_input_bytes(model, WINDOW) + 4 * model.n_expert * columns  # the sums of squares
    with _reading(method, model.path, own) as (capture, calibration, _):
        return gather(capture, model, calibration, progress), calibration.summary()


def save_imatrix(method: Method, source: Path, out: Path, progress: Progress) -> str | None:
    """Compute the importance matrix of a model, and write it to the file `out`.

    The model reads a calibration text for this purpose. The matrix has the sums of the squared
    inputs of each expert matrix. Returns a warning about experts that saw too few tokens, or None.

    - method: names the text file, the number of tokens and the memory cap.
    - source: the model file.
    - progress: receives the completed fraction.
    """
    with ExpertModel.open(source) as model:
        imatrix, _ = calibrated(method, model, progress)
        write_imatrix(out, imatrix)
        return ExpertImportance(imatrix, model).note()
