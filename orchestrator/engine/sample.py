"""How far the weights of a lower tier are from those of a better one: of a few rows of each expert,
which are read from the file while nobody asks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import GATE_UP, row_bytes
from gguf_tools.quantize.ggml import Ggml, load_ggml
from orchestrator.allocation.estimate import Outputs

# Rows of each matrix. Their error is that of the whole matrix to 5 % on the demo model.
_ROWS = 2


def sample(
    model: ExpertModel, tiers: tuple[int, int], known: Outputs, goes_on: Callable[[], bool]
) -> Outputs:
    """Samples experts of which nothing is known, one of each layer and then the next: as tokens
    their rows; as squares so many times their squared error, as a share of the squared weights,
    added up over the matrices, whose roundings are independent.

    tiers: of the file, the better one first. goes_on: asked before each matrix. Returns what was
    found until it ended. Raises OSError, and QuantizeError where ggml is missing.
    """
    found, ggml = Outputs.none(known.tokens.shape), load_ggml()
    with _unbuffered(model) as files:
        for expert, layer in product(range(model.n_expert), range(model.n_layers)):
            if known.tokens[layer, expert]:
                continue
            random, error, n = np.random.default_rng((layer, expert)), 0.0, 0
            for kind in model.kinds(layer):
                if not goes_on():
                    return found
                _, n_rows = model.shapes[layer][kind] or (0, 0)
                rows = min(_ROWS, n_rows)
                start = int(random.integers(n_rows - rows + 1))
                read = partial(_rows, model, ggml, files, layer, kind, expert, start, rows)
                better, lower = (read(tier) for tier in tiers)
                squares = np.vdot(better, better)
                if squares:  # else there is nothing that may be wrong
                    both = 1 + (kind == GATE_UP)
                    error += both * float(np.square(lower - better).sum() / squares)
                n += rows
            found.tokens[layer, expert], found.squares[layer, expert] = n, n * error
    return found


@contextmanager
def _unbuffered(model: ExpertModel) -> Iterator[list[int]]:
    """The files of a model, of which no more is read than what is asked for."""
    files: list[int] = []
    try:
        for path in model.files:
            files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(files[-1], 0, 0, os.POSIX_FADV_RANDOM)
        yield files
    finally:
        for each in files:
            os.close(each)


def _rows(
    model: ExpertModel,
    ggml: Ggml,
    files: list[int],
    layer: int,
    kind: int,
    expert: int,
    start: int,
    n: int,
    tier: int,
) -> np.ndarray:
    """float32 [n, row length], from a row of an expert's matrix on."""
    where, shape = model.slices[layer][kind][tier], model.shapes[layer][kind]
    if where is None or shape is None:
        raise KeyError(f"layer {layer} lacks a matrix")
    size = row_bytes(where.type, shape[0])
    at = where.offset + expert * where.expert_bytes + start * size
    data = os.pread(files[where.file_index], n * size, at)
    if len(data) < n * size:
        raise OSError(f"{model.files[where.file_index]} was cut")
    return ggml.dequantize(where.type, np.frombuffer(data, np.uint8), shape[0])
