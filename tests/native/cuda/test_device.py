"""Memory, copies and tickets of the CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..conftest import run_program

HERE = Path(__file__).parent


def test_device(emulated_backend: Callable[..., Path], compile_native: Callable[..., Path]) -> None:
    """Order between lanes, copies from pageable memory, refused pins, what does not fit."""
    library = emulated_backend(("q4_k", "q2_k"))
    program = compile_native("device_test", [HERE / "device_test.cpp"], "-std=c++17", "-ldl")
    assert run_program(program, library) == "fine\n"
