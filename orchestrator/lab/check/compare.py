"""Logits of two runs over the same tokens: bits equal, or where not and by how much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def compare_rows(rows: Path, reference: Path, n_vocab: int) -> dict[str, Any]:
    """Both files hold float32 [n, n_vocab]. first: the first row that differs in a bit, None for
    none; first_error, most: the largest difference in that row and in any, None where it is no
    number; choices: in how many rows the likeliest token is another one; finite: whether all is a
    number.

    One row at a time is in memory.
    """
    size = 4 * n_vocab
    n, n_reference = rows.stat().st_size // size, reference.stat().st_size // size
    first, choices, finite = None, 0, True
    errors: list[float | None] = []
    with rows.open("rb") as ours, reference.open("rb") as theirs:
        for row in range(min(n, n_reference)):
            mine = ours.read(size)
            other = theirs.read(size)
            a, b = np.frombuffer(mine, np.float32), np.frombuffer(other, np.float32)
            finite = finite and bool(np.isfinite(a).all())
            if mine == other:
                continue
            if first is None:
                first = row
            errors.append(largest(a, b))
            choices += int(a.argmax() != b.argmax())
    if first is None and n != n_reference:
        first = min(n, n_reference)
    return {
        "rows": n,
        "equal": first is None,
        "first": first,
        "first_error": errors[0] if errors else 0.0,
        "most": None if None in errors else max((e for e in errors if e is not None), default=0.0),
        "choices": choices,
        "finite": finite,
    }


def largest(a: np.ndarray, b: np.ndarray) -> float | None:
    """The largest difference, None where it is no number."""
    error = float(np.abs(a.astype(np.float64) - b).max())
    return error if np.isfinite(error) else None


def first_layer(ours: Path, reference: Path) -> tuple[int, float | None] | None:
    """The first layer whose experts give something else, and the largest difference there; None
    where they agree in all layers."""
    with np.load(ours) as mine, np.load(reference) as other:
        for name in sorted(set(mine.files) & set(other.files), key=int):
            a, b = mine[name], other[name]
            if a.tobytes() != b.tobytes():
                return int(name), largest(a, b)
    return None
