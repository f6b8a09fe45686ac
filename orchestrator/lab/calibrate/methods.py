"""Quantization methods by name, with what each needs of a calibration run; an importance matrix,
gathered while a model reads the text."""

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
from orchestrator.lab.observe import CalibrationRoom, window_bytes


def gather(
    capture: Capture,
    model: ExpertModel,
    calibration: Calibration,
    progress: Progress = lambda share: None,
) -> Imatrix:
    """Sums of the squared inputs of each expert's matrices, and the tokens that each expert saw.

    model is the file that capture reads. Nothing but the sums is kept in memory. Raises as
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
    """Sums over an expert's tokens of squared inputs, float32 [n_expert, width], of values
    [T, s, width], s = 1 or k, and ids [T, k]."""
    squares = np.square(values)
    total = np.zeros((n_expert, values.shape[2]), np.float32)
    for expert in distinct(ids):
        token, slot = np.nonzero(ids == expert)
        total[expert] = squares[token, slot if values.shape[1] > 1 else 0].sum(axis=0)
    return total


RTN, IMATRIX, GPTQ = "rtn", "imatrix", "gptq"
METHODS = (RTN, IMATRIX, GPTQ)
# What a process that calibrates takes beside one that answers: its modules, and ggml's tables for
# quantizing. Measured: 2 to 4 MiB.
_PROCESS_BYTES = 4 << 20
# GPTQ's copies of the run of rows that it rounds.
_RUN_COPIES = 8
# Square matrices in float64 that factorizing a Hessian takes at once, the Hessian among them:
# measured 5.4. Before, it is a sum, of which these bytes of an element live at once: the sum, and
# a part's product in float32 and in float64.
_SQUARES = 6
_SUM_BYTES = 20
# A part's inputs, as they were kept and in float32 twice.
_INPUT_BYTES = 10
# torch: measured 197 MiB behind a first product and a first factor, 71 of them pages of its
# libraries; and 10 more beside pack's threads, which each have an arena of malloc's.
_TORCH_BYTES = 224 << 20
# The part of the cap that several experts handled at once may fill.
_SHARE = 4


@dataclass(frozen=True, slots=True)
class Method:
    """What the options of a command ask for. name None: imatrix where one is given, else rtn.
    calib: the text to calibrate on, its first `tokens` tokens. imatrix: a file that has the
    statistics already. ram: the cap on the model that reads the text, and on what is kept of it."""

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
        """Raises ConfigError for what does not go together."""
        name = self.chosen
        if name not in METHODS:
            raise ConfigError(f"--method {name}: unknown; there are {', '.join(METHODS)}")
        if name == RTN and (self.calib or self.imatrix):
            option = "--calib" if self.calib else "--imatrix"
            raise ConfigError(f"{option} does nothing for --method rtn: choose imatrix")
        if name == IMATRIX and (self.calib is None) == (self.imatrix is None):
            raise ConfigError("--method imatrix needs either --calib TEXT or --imatrix FILE")
        if name == GPTQ and (self.calib is None or self.imatrix is not None):
            raise ConfigError("--method gptq needs --calib TEXT, and takes no --imatrix")


@contextmanager
def open_quantizer(
    method: Method, source: Path, progress: Progress, note: Callable[[str], None]
) -> Iterator[ExpertQuantizer | None]:
    """The quantizer of a method for the experts of a model; None for rtn, which needs nothing.
    note gets sentences for the user. Raises MoeEdgeError in one of its forms."""
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
    """A model that reads, the text that it is to read, and how many experts are handled at once
    meanwhile, each_bytes each. own_bytes: what else is in memory then. Raises BudgetError naming
    the cap with which one expert at a time works."""
    if method.calib is None:
        raise ConfigError("a text to calibrate on is missing: give --calib TEXT")
    threads = compute_threads(method.threads)
    n = threads if each_bytes else 1
    if each_bytes and method.ram is not None:
        n = max(1, min(threads, method.ram // _SHARE // each_bytes))
    while True:
        own = own_bytes + n * each_bytes + _PROCESS_BYTES
        room = None if method.ram is None else CalibrationRoom(method.ram, own)
        try:
            opened = Capture(source, threads=method.threads, room=room)
            break
        except BudgetError:
            if n == 1:
                raise
            n -= 1
    with opened as capture:
        yield capture, read_calibration(capture.tokenize, method.calib, method.tokens), n


@contextmanager
def gptq_of(method: Method, source: Path, progress: Progress) -> Iterator[Gptq]:
    """GPTQ over the text of a method's calibration, read while layers are asked for."""
    threads = compute_threads(method.threads)
    with ExpertModel.open(source) as model:
        shapes = [shape for layer in model.shapes for shape in layer if shape is not None]
        n = max(width for width, _ in shapes)
        # pack's threads hold a run of rows each, in float32, its encodings, and what is chosen
        # among.
        run = min(RUN_WEIGHTS, max(width * rows for width, rows in shapes))
        own = window_bytes(model, WINDOW) + _TORCH_BYTES + threads * _RUN_COPIES * 4 * run
        # The layer's mean stands beside the factors.
        own += 8 * n**2 * (kept_factors(threads) + threads)
        # The largest Hessian, while it is made of so many inputs at once, and factorized.
        rows = min(ROWS_AT_ONCE, method.tokens)
        each = max(_SQUARES * 8 * n**2, _SUM_BYTES * n**2 + _INPUT_BYTES * rows * n)
    with (
        computing() as device,
        _reading(method, source, own, each) as (capture, calibration, factorizing),
        closing(capture.layers(calibration.windows, progress=progress)) as layers,
    ):
        # The first pass over the text, while its progress is shown.
        first = next(layers)
        seen, line = chain([first], layers), calibration.summary()
        yield Gptq(load_ggml(), seen, line, device, threads, factorizing)


def calibrated(method: Method, model: ExpertModel, progress: Progress) -> tuple[Imatrix, str]:
    """The importance matrix of a calibration run, and a line on its text."""
    columns = sum(shape[0] for layer in model.shapes for shape in layer if shape is not None)
    own = window_bytes(model, WINDOW) + 4 * model.n_expert * columns  # its sums
    with _reading(method, model.path, own) as (capture, calibration, _):
        return gather(capture, model, calibration, progress), calibration.summary()


def save_imatrix(method: Method, source: Path, out: Path, progress: Progress) -> str | None:
    """Writes the importance matrix of a calibration run; returns a sentence on experts that saw
    too few tokens."""
    with ExpertModel.open(source) as model:
        imatrix, _ = calibrated(method, model, progress)
        write_imatrix(out, imatrix)
        return ExpertImportance(imatrix, model).note()
