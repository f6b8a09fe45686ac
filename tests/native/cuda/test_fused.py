"""gate and up in one launch, and tables that stay on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..conftest import run_program

HERE = Path(__file__).parent


def test_gate_up_and_fixed_tables(
    emulated_backend: Callable[..., Path], compile_native: Callable[..., Path]
) -> None:
    """Fused where all types agree, apart where not; CUDA graphs over tables that change."""
    library = emulated_backend(("q4_k", "q2_k", "q8_0"), ("unary.cu",))
    program = compile_native("fused_test", [HERE / "fused_test.cpp"], "-std=c++17", "-ldl")
    output = run_program(program, library, "q4_K+q2_K", "f16+q8_0")
    assert output.count("NMSE") == 2
