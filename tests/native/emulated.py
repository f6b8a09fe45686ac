"""Run test programs on an emulated processor."""

import shutil

import pytest

from .conftest import HERE, LINKED, compile_program, run_program
from .test_executor import STORE

# For each program: further sources, linked libraries, arguments after the folder, and its output on
# success.
PROGRAMS = {
    "executor_test": ([], LINKED, (), "180 cases"),
    "store_stress": (STORE, ("ggml-cpu", "ggml-base"), (0.5, 7), "store recovered"),
}


def emulator(name, *options):
    """Return the emulator's command. Skip the test if it is not installed."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is missing: `sudo apt install qemu-user`")
    return (name, *options)


def check(name, by, compiler, flags, library, llama_source, folder):
    """Compile and run one of the programs. library(name): path of a library such as ggml-cpu."""
    more, libraries, arguments, said = PROGRAMS[name]
    sources, linked = [HERE / f"{name}.cpp", *more], [library(each) for each in libraries]
    flags = ("-std=c++17", "-DMOE_EDGE_PART_BYTES=4096", *flags)
    program = compile_program(compiler, folder / name, sources, flags, linked, llama_source)
    assert said in run_program(program, folder, *arguments, by=by)
