"""Which experts share a launch of the CUDA executor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..conftest import run_program

HERE = Path(__file__).parent


def test_launches_and_tables(compile_native: Callable[..., Path]) -> None:
    """Types, pools that are not whole blocks apart, 32-bit reach, 256 experts, 8 classes."""
    sources = [HERE / "launch_test.cpp"]
    program = compile_native("launch_test", sources, "-std=c++17", libraries=("ggml-base",))
    assert run_program(program) == "fine\n"
