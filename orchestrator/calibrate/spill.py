"""Rows of activations in a file, in half the bytes of float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np


class Rows:
    """n_tokens x per_token rows, in a file that must not exist yet.

    Kept as float16 with a scale for each row, a power of two that puts its largest magnitude in
    [1, 2): the relative error of a value is 2^-11 at most down to 2^-14 of that magnitude, and
    neither huge activations nor tiny ones fall out of the format's range.
    """

    def __init__(self, path: Path, n_tokens: int, shape: tuple[int, ...]) -> None:
        """shape: (per_token, row length)."""
        self.per_token, width = shape
        n_rows = n_tokens * self.per_token
        self._values = np.memmap(path, np.float16, "w+", shape=(n_rows, width))
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
