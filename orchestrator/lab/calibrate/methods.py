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
from orchestrator.lab.observe import CalibrationBudget, window_bytes


def gather(
    capture: Capture,
    model: ExpertModel,
    calibration: Calibration,
    progress: Progress = lambda share: None,
) -> Imatrix:
    """Return the sums of squared inputs of each expert's matrices, and the token counts.

    `model` is the file that `capture` reads. Only the sums are kept in memory. Raises as
    Capture.read does.
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
    """Return the sum of squared inputs over each expert's tokens, float32 [n_expert, width].

    `values` are [T, s, width] with s = 1 or k; `ids` are [T, k].
    """
    squares = np.square(values)
    total = np.zeros((n_expert, values.shape[2]), np.float32)
    for expert in distinct(ids):
        token, slot = np.nonzero(ids == expert)
        total[expert] = squares[token, slot if values.shape[1] > 1 else 0].sum(axis=0)
    return total


RTN, IMATRIX, GPTQ = "rtn", "imatrix", "gptq"
METHODS = (RTN, IMATRIX, GPTQ)
# Additional memory of a calibrating process: modules, and ggml's quantization tables. Measured:
# 2 to 4 MiB.
_PROCESS_BYTES = 4 << 20
# Copies of a run of rows while GPTQ rounds it.
_RUN_COPIES = 8
# Number of square float64 matrices in memory while a Hessian is factorized, itself included
# (measured: 5.4). While it is summed, an element needs _SUM_BYTES: the sum, and the product of a
# part in float32 and float64.
_SQUARES = 6
_SUM_BYTES = 20
# Bytes per input value of a part: as stored, and twice in float32.
_INPUT_BYTES = 10
# Memory of torch: 197 MiB measured after a first product and factor, 71 of them library pages;
# 10 more with pack's threads, each of which has a malloc arena.
_TORCH_BYTES = 224 << 20
# 1 / _SHARE of the cap may be used to process several experts concurrently.
_SHARE = 4


@dataclass(frozen=True, slots=True)
class Method:
    """Options of a quantization method.

    - name: None selects imatrix if a file is given, else rtn.
    - calib: text to calibrate on; its first `tokens` tokens are used.
    - imatrix: file with existing statistics.
    - ram: memory cap for the model that reads the text and for the data kept of it.
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
        """Raise ConfigError for options that contradict each other."""
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
    """Yield the quantizer of a method for a model's experts; None for rtn, which needs no data.

    `note` receives messages for the user. Raises MoeEdgeError.
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
    """Yield a model that captures, its text, and the number of experts to process concurrently.

    Each of these needs each_bytes; own_bytes are needed in addition. Raises BudgetError with the
    smallest cap that suffices for one expert at a time.
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
    """Yield GPTQ for a method's text, which is read while layers are requested."""
    threads = compute_threads(method.threads)
    with ExpertModel.open(source) as model:
        shapes = [shape for layer in model.shapes for shape in layer if shape is not None]
        n = max(width for width, _ in shapes)
        # Each of pack's threads holds a run of rows in float32, its encodings and the candidates.
        run = min(RUN_WEIGHTS, max(width * rows for width, rows in shapes))
        own = window_bytes(model, WINDOW) + _TORCH_BYTES + threads * _RUN_COPIES * 4 * run
        # The factors, and the layer's mean.
        own += 8 * n**2 * (kept_factors(threads) + threads)
        # The largest Hessian, while it is summed over this many inputs, or factorized.
        rows = min(ROWS_AT_ONCE, method.tokens)
        each = max(_SQUARES * 8 * n**2, _SUM_BYTES * n**2 + _INPUT_BYTES * rows * n)
    with (
        computing() as device,
        _reading(method, source, own, each) as (capture, calibration, factorizing),
        closing(capture.layers(calibration.windows, progress=progress)) as layers,
    ):
        # Makes the first pass over the text now, while its progress is shown.
        first = next(layers)
        seen, line = chain([first], layers), calibration.summary()
        yield Gptq(load_ggml(), seen, line, device, threads, factorizing)


def calibrated(method: Method, model: ExpertModel, progress: Progress) -> tuple[Imatrix, str]:
    """Run a calibration. Returns the importance matrix and a line about its text."""
    columns = sum(shape[0] for layer in model.shapes for shape in layer if shape is not None)
    own = window_bytes(model, WINDOW) + 4 * model.n_expert * columns  # its sums
    with _reading(method, model.path, own) as (capture, calibration, _):
        return gather(capture, model, calibration, progress), calibration.summary()


def save_imatrix(method: Method, source: Path, out: Path, progress: Progress) -> str | None:
    """Write the importance matrix of a calibration run.

    Returns a sentence about experts that saw too few tokens, or None.
    """
    with ExpertModel.open(source) as model:
        imatrix, _ = calibrated(method, model, progress)
        write_imatrix(out, imatrix)
        return ExpertImportance(imatrix, model).note()
