"""Tests that need a real GPU."""

import shutil
import subprocess

import pytest

from patches.upstream import PATCHES

from ..conftest import run_program
from .conftest import HERE

pytestmark = pytest.mark.gpu

# All operator tests take over ten minutes. These have batches for each path and types of each kind.
OPERATORS = "type_a=(f16|q8_0|q4_K|q2_K|iq4_nl|iq2_xs),type_b=f32,n_mats=(4|8),.*,n=(1|4|32|129),"


@pytest.fixture(scope="session")
def cuda_library(library_folder):
    path = library_folder / "libggml-cuda.so"
    if not path.exists():
        pytest.skip("the library was built without CUDA: run `make build GPU=cuda`")
    return path


def test_no_bad_access_and_no_leak(cuda_library, compile_native):
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed (it comes with the CUDA toolkit)")
    sources = [HERE / "managed_test.cpp", PATCHES / "native/moe-edge-workers.cpp"]
    program = compile_native("managed_test", sources, "-std=c++17", "-ldl")
    command = [tool, "--tool", "memcheck", "--leak-check", "full", "--error-exitcode", "9"]
    command += ["--report-api-errors", "no"]  # a query for running work is not an error
    command += [str(program), "-", "random", "40", "q4_K+q2_K", "f16+q8_0"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "40 steps, no wrong row" in done.stdout


def test_upstreams_operator_tests(cuda_library, operator_tests):
    """Upstream's operator on the GPU is unchanged."""
    command = ("test", "-o", "MUL_MAT_ID", "-b", "CUDA0", "-p", OPERATORS)
    output = run_program(operator_tests, *command, timeout_s=1800)
    print(output[-2000:])
    assert "tests passed" in output and "FAIL" not in output
