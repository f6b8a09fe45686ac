"""The emulated GPU computes what a GPU would: upstream's own kernels on it, unpatched paths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..conftest import run_program

HERE = Path(__file__).parent


def test_upstreams_kernels(
    emulated_backend: Callable[..., Path], compile_native: Callable[..., Path]
) -> None:
    """MMVQ and MMQ of one type each, against a dot product in double precision."""
    library = emulated_backend(("q4_k", "q2_k"))
    program = compile_native("kernels_test", [HERE / "kernels_test.cpp"], "-std=c++17")
    output = run_program(program, library, "q4_K", "q2_K", "--", 1, 2, 8, 9, 33)
    assert output.count("worst NMSE") == 2
