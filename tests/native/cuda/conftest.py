"""CUDA programs run on an emulated GPU everywhere, and on the real one where there is one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from patches import tree
from patches.upstream import PATCHES, cache_dir, cached_sdist, locked, read_upstream

from ..conftest import run_program
from .emulation import build

HERE = Path(__file__).parent

# What a whole model needs beside the core.
ENGINE_SOURCES = (
    *("add-id.cu", "argsort.cu", "binbcast.cu", "concat.cu", "cpy.cu", "fwht.cu", "getrows.cu"),
    *(
        "mmf.cu",
        "mmvf.cu",
        "moe-weighted-reduction.cu",
        "norm.cu",
        "rope.cu",
        "scale.cu",
        "set-rows.cu",
        "softmax.cu",
    ),
    *("sumrows.cu", "topk-moe.cu", "unary.cu"),
)
ENGINE_TYPES = ("q2_k", "q4_k", "q8_0")


def run_python(script: Path, *arguments: object, timeout_s: float = 1800) -> str:
    """Its standard output. A failure shows what it said."""
    command = [sys.executable, str(script), *map(str, arguments)]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="session")
def emulated_backend(library_folder: Path, llama_source: Path) -> Callable[..., Path]:
    """emulated_backend(types, more): libggml-cuda.so for the emulated GPU, cached by content.

    types: those whose MMQ kernels are compiled. more: further sources in ggml-cuda/."""
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("the emulated GPU needs g++ and nm")
    upstream = read_upstream()
    sdist = cached_sdist(upstream)
    assert sdist is not None
    with locked(cache_dir() / "lock"):
        tree.sync_tree(sdist, upstream)
        texts = build.read_tree(llama_source)
    store = cache_dir() / "emulation"

    def make(types: tuple[str, ...], more: tuple[str, ...] = ()) -> Path:
        sources = [*build.CORE, *build.mmq_instances(types), *more]
        return build.build_backend(compiler, texts, llama_source, library_folder, sources, store)

    return make


@dataclass(frozen=True)
class Device:
    """Where a program of this folder runs."""

    emulated: bool
    compile: Callable[..., Path]
    backend: Callable[..., Path]
    monkeypatch: pytest.MonkeyPatch

    @property
    def library(self) -> Path | str:
        """What engine_driver.py loads, with all that a whole model needs."""
        return self.backend(ENGINE_TYPES, ENGINE_SOURCES) if self.emulated else "-"

    def run(
        self,
        name: str,
        *arguments: object,
        types: tuple[str, ...] = (),
        more: tuple[str, ...] = (),
        delay_us: int = 0,
    ) -> str:
        """NAME.cpp with a CUDA backend; delay_us: at most, of each task of the emulated GPU."""
        sources = [HERE / f"{name}.cpp", PATCHES / "native/moe-edge-workers.cpp"]
        program = self.compile(name, sources, "-std=c++17", "-ldl")
        library = self.backend(types, more) if self.emulated else "-"
        self.monkeypatch.setenv("MOE_EMU_DELAY_US", str(delay_us))
        return run_program(program, library, *arguments, timeout_s=1800)


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(
    request: pytest.FixtureRequest,
    library_folder: Path,
    compile_native: Callable[..., Path],
    emulated_backend: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Device:
    emulated = request.param == "emulated"
    if not emulated and not (library_folder / "libggml-cuda.so").exists():
        pytest.skip("the library was built without CUDA: run `make build GPU=cuda`")
    return Device(emulated, compile_native, emulated_backend, monkeypatch)
