"""The best tier's word on every token, kept to compare others with."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np

from gguf_tools.closing import Closing
from gguf_tools.units import format_size
from orchestrator.errors import ConfigError


class Reference(Closing):
    """Log-probabilities float32 [n_tokens, n_vocab] in a file; free it with close or `with`."""

    def __init__(self, n_tokens: int, n_vocab: int, path: Path | None = None) -> None:
        """path: an empty file, or one that has them already; None for a temporary one. Raises
        ConfigError where the folder has no room for it."""
        needed = 4 * n_tokens * n_vocab
        folder = tempfile.gettempdir() if path is None else str(path.parent)
        free = shutil.disk_usage(folder).free
        known = 0 if path is None else path.stat().st_size
        if needed > free + known:
            raise ConfigError(
                f"comparing {n_tokens} tokens with the best tier takes {format_size(needed)} in "
                f"{folder}, where {format_size(free)} are free: lower --max-tokens"
            )
        self._file = tempfile.TemporaryFile() if path is None else path.open("r+b")  # noqa: SIM115
        self._file.truncate(needed)
        shape = (n_tokens, n_vocab)
        self.rows: np.ndarray = np.memmap(self._file, np.float32, "r+", shape=shape)

    def row(self, at: int) -> np.ndarray:
        """float32 [n_vocab], a view: the log-probabilities of one token's prediction."""
        return np.asarray(self.rows[at])

    def close(self) -> None:
        """Frees the file; safe to call twice."""
        self._file.close()


class ReferencePart:
    """Some of a reference's tokens, as if they were all: places int [n], where each stands in it.
    Lives as long as the whole."""

    def __init__(self, whole: Reference, places: np.ndarray) -> None:
        self._whole, self._places = whole, places

    def row(self, at: int) -> np.ndarray:
        """float32 [n_vocab], a view, of token `at` of the part."""
        return self._whole.row(int(self._places[at]))
