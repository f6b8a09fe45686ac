"""An importance matrix, gathered while a model reads the calibration text."""

from __future__ import annotations

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN, expert_tensor_name
from gguf_tools.quantize.imatrix import Entry, Imatrix
from orchestrator.events import distinct
from orchestrator.lab.calibrate.capture import WINDOW, Capture, Progress, WindowActivations
from orchestrator.lab.calibrate.text import Calibration


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
