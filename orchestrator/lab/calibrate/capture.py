"""Captures the inputs of each MoE layer's expert matrices while llama.cpp's own path reads a text.

Memory is bounded for any model and text. `read` handles a window layer by layer while it is
computed. `layers` writes the activations of some layers to a temporary file, so that the experts of
one layer can be processed over the whole text.

The inputs are those of the matrix products themselves (src[1] of MUL_MAT_ID). This module therefore
needs no knowledge of the norms and scales before the experts, or of their activation function.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gguf_tools.closing import Closing
from gguf_tools.experts import ExpertModel
from gguf_tools.file.chunks import sha256_of
from gguf_tools.file.layout import DOWN
from gguf_tools.process import compute_threads
from gguf_tools.units import format_size
from orchestrator.errors import ConfigError, NativeError
from orchestrator.lab.eval.text import Tokenize, needed_tokens, read_documents, windows_of
from orchestrator.lab.observe import CalibrationBudget, Node, expert_product, observe

WINDOW = 512
SPILL_BYTES = 8 << 30
# Files in this folder survive a restart, so it is on a disk. The default temporary folder may be in
# memory.
_ON_DISK = Path("/var/tmp")

# A progress callback. Its argument is the completed fraction, 0 to 1.
Progress = Callable[[float], None]


def spill_folder() -> Path:
    """Return the folder for large temporary files.

    This is TMPDIR if the variable is set. Otherwise it is /var/tmp, or the default temporary folder
    if /var/tmp is not writable.
    """
    if "TMPDIR" not in os.environ and os.access(_ON_DISK, os.W_OK):
        return _ON_DISK
    return Path(tempfile.gettempdir())


class Rows:
    """Stores input vectors of experts for each token of a text, in an unnamed temporary file.

    A token has `per_token` vectors: one for each expert that it uses, or only one if its experts
    share their input. The system deletes the file automatically.

    The numbers are float16 with a scale for each vector, so that large values do not overflow.
    Values down to 2^-14 of the vector's largest magnitude have a relative error of at most 2^-11.
    """

    def __init__(self, folder: Path, n_tokens: int, shape: tuple[int, int]) -> None:
        """Create the file with zeros for n_tokens tokens.

        `shape` is (vectors per token, length of a vector). Raises ConfigError if the disk has too
        little free space.
        """
        self.per_token, width = shape
        n_rows = n_tokens * self.per_token
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.truncate(self.n_bytes(n_tokens, shape))
                if hasattr(os, "posix_fallocate"):
                    # Without this, a full disk would later kill the process (SIGBUS).
                    os.posix_fallocate(file.fileno(), 0, self.n_bytes(n_tokens, shape))
                self._values = np.memmap(file, np.float16, "r+", shape=(n_rows, width))
        except OSError as error:
            raise ConfigError(
                f"{folder}: no free space for activations: {error.strerror or error}: set TMPDIR"
                " to another folder"
            ) from error
        self._exponents = np.zeros(n_rows, np.int16)

    @staticmethod
    def n_bytes(n_tokens: int, shape: tuple[int, int]) -> int:
        """Return the size in bytes of a file with the input vectors of n_tokens tokens.

        `shape` is (vectors per token, length of a vector).
        """
        return 2 * n_tokens * shape[0] * shape[1]

    def put(self, token: int, values: np.ndarray) -> None:
        """Store the input vectors of n consecutive tokens in the file.

        They are the inputs of experts. A token has one vector for each expert that it uses, or only
        one vector if these experts share their input.

        - token: index of the first of these tokens.
        - values: finite float32 numbers [n, vectors per token, length of a vector].
        """
        rows = values.reshape(-1, values.shape[-1])
        exponents = np.frexp(np.abs(rows).max(axis=1))[1] - 1
        at = slice(token * self.per_token, token * self.per_token + len(rows))
        self._exponents[at] = exponents
        self._values[at] = np.ldexp(rows, -exponents[:, None])

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return stored input vectors, float32 [n, length of a vector].

        - rows: the indices of the n vectors. Each token has `per_token` consecutive vectors, so
          vector i of a token has the index token * per_token + i.
        """
        values = self._values[rows].astype(np.float32)
        found: np.ndarray = np.ldexp(values, self._exponents[rows, None].astype(np.int32))
        return found


# The default limit: 128 windows of 512 tokens. A longer text takes more time and changes the result
# little.
MAX_TOKENS = 65536
LEAST_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Calibration:
    """A calibration text, cut into windows: lists of tokens that the model reads separately.

    sha256 is the hexadecimal checksum of the text's file.
    """

    name: str
    sha256: str
    windows: list[list[int]]

    @property
    def n_tokens(self) -> int:
        return sum(len(window) for window in self.windows)

    def summary(self) -> str:
        """Return one line that identifies the calibration text.

        Files that are computed with the text, such as loss tables, have this line as metadata.
        """
        return f"{self.name}, {self.n_tokens} tokens, sha256 {self.sha256}"


def read_calibration(
    tokenize: Tokenize, path: Path, limit: int = MAX_TOKENS, window: int = WINDOW
) -> Calibration:
    """Read a calibration text of at most `limit` tokens from a text file or from JSON lines.

    The text is cut into windows of at most `window` tokens. Each window is part of one document. An
    .xz file is decompressed. Raises ConfigError if the text cannot be read or is too short.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"{path} is not a regular file: give a regular file, because its checksum is stored"
        )
    documents = read_documents(path, needed_tokens(limit, window))
    cut = windows_of(tokenize, documents, window, limit)
    found = Calibration(path.name, sha256_of(path), [each.tokens for each in cut])
    if found.n_tokens < LEAST_TOKENS:
        raise ConfigError(
            f"{path}: {found.n_tokens} tokens are too few to calibrate on, the minimum is"
            f" {LEAST_TOKENS}: use a longer text"
        )
    return found


class WindowActivations(NamedTuple):
    """Activations of one layer's experts for a window (a piece of text) of T tokens.

    - ids: the k experts that the router chose for each token, int32 [T, k].
    - x: inputs of the gate and up matrices, float32 [T, s, n_embd]. Usually, all experts of a token
      have the same input, and s is 1. In some models, each expert's input is multiplied by its gate
      weight. The k inputs of a token then differ, and s is k.
    - hidden: inputs of the down matrices, float32 [T, k, n_ff].
    """

    x: np.ndarray
    hidden: np.ndarray
    ids: np.ndarray


# A callback that receives (layer, index of the window, activations of the layer).
Sink = Callable[[int, int, WindowActivations], None]


@dataclass
class LayerActivations:
    """The activations of one layer's experts for a text of T tokens.

    - layer: index among the MoE layers.
    - ids: the k experts that the router chose for each token, int32 [T, k].
    - x: inputs of the gate and up matrices.
    - hidden: inputs of the down matrices.
    """

    layer: int
    n_expert: int
    ids: np.ndarray
    x: Rows
    hidden: Rows

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    @cached_property
    def _order(self) -> tuple[np.ndarray, np.ndarray]:
        flat = self.ids.ravel()
        order = np.argsort(flat, kind="stable")
        return order, np.searchsorted(flat[order], np.arange(self.n_expert + 1))

    def counts(self) -> np.ndarray:
        """Return the number of tokens that were routed to each expert, int64 [n_expert]."""
        return np.diff(self._order[1])

    def places(self, expert: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions at which an expert occurs in the field `ids`, as (rows, columns).

        A row of `ids` is a token of the text, and its columns are the k experts that the token
        uses. Both arrays are int64 [n], in the order of the text.
        """
        order, bounds = self._order
        token, slot = np.divmod(order[bounds[expert] : bounds[expert + 1]], self.ids.shape[1])
        return token, slot

    def inputs(self, kind: int, expert: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the inputs of an expert's matrix, float32 [n, row length], one row per token.

        The rows are those of the tokens that were routed to the expert, in the order of the text.
        `kind` is the matrix kind, such as DOWN. start and stop select a range of these rows, to
        limit the memory.
        """
        token, slot = (each[start:stop] for each in self.places(expert))
        rows = self.hidden if kind == DOWN else self.x
        return rows.take(token * rows.per_token + (slot if rows.per_token > 1 else 0))


class Capture(Closing):
    """A loaded model that records the inputs of its experts while it reads. Free it with close."""

    def __init__(
        self,
        path: Path,
        threads: int | None = None,
        budget: CalibrationBudget | None = None,
    ) -> None:
        """Load a model that can read windows (pieces of text) of at most WINDOW tokens.

        `budget` caps the memory of the process, and experts are then read from the file on demand.
        With None, memory has no cap. Raises GGUFError, NativeError or BudgetError.
        """
        with ExpertModel.open(path) as model:
            self.layer_ids = list(model.layer_ids)
            self.n_expert, self.n_expert_used = model.n_expert, model.n_expert_used
            downs = [shapes[DOWN] for shapes in model.shapes]
            # The row lengths of each layer's expert inputs: those of gate and up, and those of
            # down.
            self._widths = [(down[1], down[0]) for down in downs if down is not None]
        self._layer_of = {il: layer for layer, il in enumerate(self.layer_ids)}
        self._only: frozenset[int] = frozenset()
        self._sink: Sink = lambda *_: None
        self._number = 0
        # State of the current window: the inputs of gate and up by layer, and the layers that are
        # not yet computed.
        self._inputs: dict[int, np.ndarray] = {}
        self._missing: set[int] = set()
        threads = compute_threads(threads)
        self._observer = observe(
            path, WINDOW, threads, lambda node: self._place(node) is not None, self._keep, budget
        )

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text. The BOS token comes first if the model uses one."""
        return self._observer.model.tokenize(text, add_special=True, parse_special=True)

    def read(
        self,
        windows: Sequence[Sequence[int]],
        layers: Sequence[int],
        sink: Sink,
        progress: Progress = lambda share: None,
    ) -> None:
        """Read each window (list of tokens) as a separate text, and record the inputs of experts.

        After each layer in `layers` is computed, `sink` is called with the layer, the index of the
        window, and the inputs of the layer's experts. `sink` may keep the arrays. Its exceptions
        are raised here.

        Raises NativeError if the inputs cannot be found in the model's graph.
        """
        self._only, self._sink = frozenset(layers), sink
        for number, window in enumerate(windows):
            self._inputs, self._missing, self._number = {}, set(layers), number
            self._observer.read(window)
            if self._missing:
                layer = self.layer_ids[min(self._missing)]
                raise NativeError(
                    f"layer {layer}: cannot record the inputs of the experts, because moe-edge "
                    "does not know this model's compute graph: the model cannot be calibrated"
                )
            progress((number + 1) / len(windows))

    def layers(
        self, windows: Sequence[Sequence[int]], progress: Progress = lambda share: None
    ) -> Generator[LayerActivations, None, None]:
        """Yield the activations of each layer's experts for all windows, layer by layer.

        Activations are kept in temporary files. If the files of all layers would exceed
        SPILL_BYTES, the model reads the windows several times, each time for some of the layers. A
        yielded object is valid until the next one.

        Raises ConfigError if the disk has too little free space. Raises NativeError if the experts'
        inputs cannot be found in the model's graph.
        """
        n_tokens, where = sum(map(len, windows)), spill_folder()
        groups: list[list[int]] = []
        left = 0
        for layer in range(len(self.layer_ids)):
            if self._layer_bytes(layer, n_tokens) > left or not groups:
                groups.append([])
                left = SPILL_BYTES
            groups[-1].append(layer)
            left -= self._layer_bytes(layer, n_tokens)
        for number, group in enumerate(groups):
            needed = sum(self._layer_bytes(layer, n_tokens) for layer in group)
            free = shutil.disk_usage(where).free
            if needed > free:
                raise ConfigError(
                    f"{where} has too little free space for the activations of {n_tokens} tokens:"
                    f" {format_size(needed)} needed, {format_size(free)} free. Use fewer tokens, or"
                    " set TMPDIR to another folder"
                )

            def report(share: float, number: int = number) -> None:
                progress((number + share) / len(groups))

            yield from self._pass(windows, group, where, report)

    def _pass(
        self,
        windows: Sequence[Sequence[int]],
        group: list[int],
        folder: Path,
        progress: Progress,
    ) -> Generator[LayerActivations, None, None]:
        *starts, n_tokens = np.cumsum([0, *(len(window) for window in windows)]).tolist()
        found: dict[int, LayerActivations] = {}

        def keep(layer: int, number: int, seen: WindowActivations) -> None:
            each = found.get(layer)
            if each is None:
                k = seen.ids.shape[1]
                each = found[layer] = LayerActivations(
                    layer,
                    self.n_expert,
                    np.empty((n_tokens, k), np.int32),
                    Rows(folder, n_tokens, (seen.x.shape[1], seen.x.shape[2])),
                    Rows(folder, n_tokens, (k, seen.hidden.shape[2])),
                )
            start = starts[number]
            each.ids[start : start + len(seen.ids)] = seen.ids
            each.x.put(start, seen.x)
            each.hidden.put(start, seen.hidden)

        self.read(windows, group, keep, progress)
        for layer in group:
            yield found.pop(layer)

    def _layer_bytes(self, layer: int, n_tokens: int) -> int:
        n_embd, n_ff = self._widths[layer]
        k = self.n_expert_used
        return Rows.n_bytes(n_tokens, (1, n_embd)) + Rows.n_bytes(n_tokens, (k, n_ff))

    def _place(self, node: Node) -> tuple[int, int] | None:
        """Return (layer, matrix kind) if a node's input is recorded, or else None.

        Such a node is a product of expert matrices.
        """
        found = expert_product(node, self._layer_of)
        return found if found and found[0] in self._only else None

    def _keep(self, node: Node) -> None:
        place = self._place(node)
        if place is None:
            return
        layer, kind = place
        if kind != DOWN:
            if layer not in self._inputs:
                self._inputs[layer] = node.source(1).array()[0]
        elif layer in self._inputs:
            hidden, ids = node.source(1).array()[0], node.source(2).array()[0, 0]
            seen = WindowActivations(self._inputs.pop(layer), hidden, ids)
            if not all(np.isfinite(each).all() for each in seen):
                raise NativeError(f"layer {self.layer_ids[layer]}: an activation is not finite")
            self._missing.discard(layer)
            self._sink(layer, self._number, seen)

    def close(self) -> None:
        """Free the model. A second call has no effect."""
        self._observer.close()
