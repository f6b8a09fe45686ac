"""Memory, copies and tickets of the CUDA device, and the grouping of experts into launches."""

from ..conftest import run_program
from .conftest import HERE


def test_device(device):
    """device_test.cpp: order of lanes, pageable copies, refused pinning, and full memory."""
    assert device.run("device_test", types=("q4_k", "q2_k")).endswith("fine\n")


def test_launches_and_tables(compile_native):
    """launch_test.cpp: types, pools at odd distances, 32-bit offsets, 256 experts, 8 classes."""
    sources = [HERE / "launch_test.cpp"]
    program = compile_native("launch_test", sources, "-std=c++17", libraries=("ggml-base",))
    assert run_program(program) == "fine\n"
