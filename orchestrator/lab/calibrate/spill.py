"""Rows of activations in a file, in half the bytes of float32."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from orchestrator.errors import ConfigError

# Survives a restart, so it is on a disk: the system's folder for temporary files may be memory.
_ON_DISK = Path("/var/tmp")


def spill_folder() -> Path:
    """Where temporary files of many bytes belong: TMPDIR, or a folder on a disk."""
    if "TMPDIR" not in os.environ and os.access(_ON_DISK, os.W_OK):
        return _ON_DISK
    return Path(tempfile.gettempdir())


class Rows:
    """n_tokens x per_token rows, in a file without a name: gone when this is, or the process.

    Kept as float16 with a scale for each row, a power of two that puts its largest magnitude in
    [1, 2): the relative error of a value is 2^-11 at most down to 2^-14 of that magnitude, and
    neither huge activations nor tiny ones fall out of the format's range.
    """

    def __init__(self, folder: Path, n_tokens: int, shape: tuple[int, int]) -> None:
        """shape: (per_token, row length). Raises ConfigError where the disk has no room."""
        self.per_token, width = shape
        n_rows = n_tokens * self.per_token
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.truncate(self.n_bytes(n_tokens, shape))
                if hasattr(os, "posix_fallocate"):
                    # A disk that is full later would end the process, not raise.
                    os.posix_fallocate(file.fileno(), 0, self.n_bytes(n_tokens, shape))
                self._values = np.memmap(file, np.float16, "r+", shape=(n_rows, width))
        except OSError as error:
            raise ConfigError(
                f"{folder}: no room for activations: {error.strerror or error}: name another"
                " folder by TMPDIR"
            ) from error
        self._exponents = np.zeros(n_rows, np.int16)

    @staticmethod
    def n_bytes(n_tokens: int, shape: tuple[int, int]) -> int:
        """Bytes of the file."""
        return 2 * n_tokens * shape[0] * shape[1]

    def put(self, token: int, values: np.ndarray) -> None:
        """Stores finite float32 [n, per_token, width] from a token on."""
        rows = values.reshape(-1, values.shape[-1])
        exponents = np.frexp(np.abs(rows).max(axis=1))[1] - 1
        at = slice(token * self.per_token, token * self.per_token + len(rows))
        self._exponents[at] = exponents
        self._values[at] = np.ldexp(rows, -exponents[:, None])

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Rows by number (token * per_token + place), float32 [n, width]."""
        values = self._values[rows].astype(np.float32)
        found: np.ndarray = np.ldexp(values, self._exponents[rows, None].astype(np.int32))
        return found
