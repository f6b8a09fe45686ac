"""Memory, copies and tickets of the CUDA device, and which experts share a launch."""

from ..conftest import run_program
from .conftest import HERE


def test_device(device):
    """Order between lanes, copies from pageable memory, refused pins, what does not fit."""
    assert device.run("device_test", types=("q4_k", "q2_k")).endswith("fine\n")


def test_launches_and_tables(compile_native):
    """Types, pools that are not whole blocks apart, 32-bit reach, 256 experts, 8 classes."""
    sources = [HERE / "launch_test.cpp"]
    program = compile_native("launch_test", sources, "-std=c++17", libraries=("ggml-base",))
    assert run_program(program) == "fine\n"
