"""How far the weights of a lower tier are from those of a better one: of a few rows of each expert,
which are read from the file while nobody asks."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.experts.slices import Slice
from gguf_tools.file.layout import GATE_UP, row_bytes
from gguf_tools.quantize.ggml import load_ggml
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
    with ExitStack() as opened, np.errstate(all="ignore"):
        files = [opened.enter_context(path.open("rb", buffering=0)) for path in model.files]
        for file in files:
            if hasattr(os, "posix_fadvise"):  # no more is read than what is asked for
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

        def rows(where: Slice | None, length: int, first: int, n: int) -> np.ndarray:
            assert where is not None  # as all of the model's kinds
            size = row_bytes(where.type, length)
            data = os.pread(files[where.file_index].fileno(), n * size, where.offset + first * size)
            if len(data) < n * size:
                raise OSError(f"{model.files[where.file_index]} was cut")
            return ggml.dequantize(where.type, np.frombuffer(data, np.uint8), length)

        for expert, layer in product(range(model.n_expert), range(model.n_layers)):
            if known.tokens[layer, expert]:
                continue
            random, error, tokens = np.random.default_rng((layer, expert)), 0.0, 0
            for kind in model.kinds(layer):
                if not goes_on():
                    return found
                length, n_rows = model.shapes[layer][kind] or (0, 0)
                n = min(_ROWS, n_rows)
                first = expert * n_rows + int(random.integers(n_rows - n + 1))
                of_tiers = model.slices[layer][kind]
                better, lower = (rows(of_tiers[tier], length, first, n) for tier in tiers)
                squares = np.square(better).sum()
                if squares:  # else there is nothing that may be off
                    both = 1 + (kind == GATE_UP)
                    error += both * float(np.square(lower - better).sum() / squares)
                tokens += n
            found.tokens[layer, expert], found.squares[layer, expert] = tokens, tokens * error
    return found
