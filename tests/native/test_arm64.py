"""ARM64: our sources and llama.cpp, cross-compiled, and test programs under an emulator.

The emulator shows neither speed nor the memory ordering of a real ARM CPU.
"""

import os
import shutil
import subprocess

import pytest
from real_cache import REAL_CACHE

from patches import build
from patches.upstream import locked

from . import emulated
from .conftest import HERE, LINKED, compile_program, run_program

TARGET = "aarch64-linux-gnu"
FLAGS = (
    *build.BASE_FLAGS,
    "GGML_NATIVE=OFF",
    "CMAKE_SYSTEM_NAME=Linux",
    "CMAKE_SYSTEM_PROCESSOR=aarch64",
    f"CMAKE_C_COMPILER={TARGET}-gcc",
    f"CMAKE_CXX_COMPILER={TARGET}-g++",
    "CMAKE_INSTALL_RPATH=$ORIGIN",
)


@pytest.fixture(scope="module")
def by():
    """The emulator's command."""
    if not os.environ.get("MOE_EDGE_SLOW"):
        pytest.skip("compiles llama.cpp for ARM64: set MOE_EDGE_SLOW=1")
    return emulated.emulator("qemu-aarch64", "-L", f"/usr/{TARGET}")


@pytest.fixture(scope="module")
def libraries(by, llama_source):
    """Folder of libllama and its companions for ARM64. Existing build files are reused."""
    for tool, package in ((f"{TARGET}-g++", f"g++-{TARGET}"), ("cmake",) * 2, ("ninja",) * 2):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: `sudo apt install {package}`")
    folder = REAL_CACHE / "arm64"
    definitions = [f"-D{each}" for each in FLAGS]
    if shutil.which("ccache"):
        definitions += [f"-DCMAKE_{each}_COMPILER_LAUNCHER=ccache" for each in ("C", "CXX")]
    command = ["cmake", "-S", str(llama_source), "-B", str(folder), "-G", "Ninja", *definitions]
    with locked(REAL_CACHE / "lock"):
        for each in (command, ["cmake", "--build", str(folder), "--target", build.TARGET]):
            done = subprocess.run(each, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            assert done.returncode == 0, done.stdout[-3000:]
    return folder / "bin"


@pytest.mark.parametrize("name", emulated.PROGRAMS)
def test_programs(name, by, libraries, llama_source, tmp_path):
    def library(each):
        return libraries / f"lib{each}.so"

    emulated.check(name, by, f"{TARGET}-g++", (), library, llama_source, tmp_path)


def test_a_model_decodes(by, libraries, llama_source, one, tmp_path):
    """A C program decodes 8 tokens with experts on disk, and the slots stay within the budget."""
    linked = [libraries / f"lib{each}.so" for each in LINKED]
    sources = [HERE / "plain_c.c"]
    program = tmp_path / "plain_c"
    compile_program(f"{TARGET}-gcc", program, sources, ("-std=c11",), linked, llama_source)
    tokens, memory = run_program(program, one, 2, 8, 5, 6, 7, 8, by=by).splitlines()
    peak, budget = map(int, memory.split())
    assert len(tokens.split()) == 8 and peak <= budget
