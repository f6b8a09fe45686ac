"""Programs of these tests on a processor that an emulator stands for."""

import shutil

import pytest

from .conftest import HERE, LINKED, compile_program, run_program
from .test_executor import STORE

# Of each what it consists of besides, what it is linked with, its arguments behind a folder, and
# what it says where all is well.
PROGRAMS = {
    "executor_test": ([], LINKED, (), "180 cases"),
    "store_stress": (STORE, ("ggml-cpu", "ggml-base"), (0.5, 7), "store recovered"),
}


def emulator(name, *options):
    """Its command, or the test is skipped."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is missing: `sudo apt install qemu-user`")
    return (name, *options)


def check(name, by, compiler, flags, library, llama_source, folder):
    """Compiles one of the programs and runs it. library(name): where ggml-cpu, say, is."""
    more, libraries, arguments, said = PROGRAMS[name]
    sources, linked = [HERE / f"{name}.cpp", *more], [library(each) for each in libraries]
    flags = ("-std=c++17", "-DMOE_EDGE_PART_BYTES=4096", *flags)
    program = compile_program(compiler, folder / name, sources, flags, linked, llama_source)
    assert said in run_program(program, folder, *arguments, by=by)
