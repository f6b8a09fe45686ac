"""Quantization methods by name, with what each needs of a calibration run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gguf_tools.experts import ExpertModel
from gguf_tools.imatrix import ExpertImportance, Imatrix, read_imatrix
from gguf_tools.methods import ByImportance, ExpertQuantizer
from gguf_tools.quantize import load
from orchestrator.calibrate.capture import Capture, Progress
from orchestrator.calibrate.gather import gather
from orchestrator.calibrate.text import MAX_TOKENS, read_calibration
from orchestrator.errors import ConfigError

RTN, IMATRIX = "rtn", "imatrix"
METHODS = (RTN, IMATRIX)


@dataclass(frozen=True, slots=True)
class Method:
    """What the options of a command ask for. name None: imatrix where one is given, else rtn.
    calib: the text to calibrate on, its first `tokens` tokens. imatrix: a file that has the
    statistics already."""

    name: str | None = None
    calib: Path | None = None
    imatrix: Path | None = None
    tokens: int = MAX_TOKENS
    threads: int | None = None

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


@contextmanager
def open_quantizer(
    method: Method, source: Path, progress: Progress, note: Callable[[str], None]
) -> Iterator[ExpertQuantizer | None]:
    """The quantizer of a method for the experts of a model; None for rtn. note gets sentences for
    the user. Raises MoeEdgeError in one of its forms."""
    method.check()
    if method.chosen == RTN:
        yield None
        return
    with ExpertModel.open(source) as model:
        if method.imatrix is not None:
            imatrix = read_imatrix(method.imatrix)
            calibration = imatrix.summary()
        else:
            imatrix, calibration = calibrated(method, model, progress)
        importance = ExpertImportance(imatrix, model)
    weak = importance.note()
    if weak:
        note(weak)
    yield ByImportance(load(), importance, calibration)


def calibrated(method: Method, model: ExpertModel, progress: Progress) -> tuple[Imatrix, str]:
    """The importance matrix of a calibration run, and a line on its text."""
    if method.calib is None:
        raise ConfigError("a text to calibrate on is missing: give --calib TEXT")
    with Capture(model.path, threads=method.threads) as capture:
        calibration = read_calibration(capture, method.calib, method.tokens)
        return gather(capture, model, calibration, progress), calibration.summary()
