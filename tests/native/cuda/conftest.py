"""CUDA programs on an emulated GPU, and on a real one if there is one."""

import json
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


@pytest.fixture(scope="session")
def emulated_backend(library_folder, llama_source):
    """emulated_backend(types, more): libggml-cuda.so for the emulated GPU, cached by content.

    types: types whose MMQ kernels are compiled. more: further sources in ggml-cuda/.
    """
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("the emulated GPU needs g++ and nm")
    upstream = read_upstream()
    sdist = cached_sdist(upstream)
    with locked(cache_dir() / "lock"):
        tree.sync_tree(sdist, upstream)
        texts = build.read_tree(llama_source)
    store = cache_dir() / "emulation"

    def make(types, more=()):
        sources = [*build.CORE, *build.mmq_instances(types), *more]
        return build.build_backend(compiler, texts, llama_source, library_folder, sources, store)

    return make


@dataclass(frozen=True)
class Device:
    """The GPU on which a program of this folder runs."""

    emulated: bool
    compile: Callable[..., Path]
    backend: Callable[..., Path]
    monkeypatch: pytest.MonkeyPatch

    @property
    def library(self):
        """The backend that engine_driver.py loads, with all sources that a model needs."""
        return self.backend(build.MODEL_TYPES, build.MODEL_SOURCES) if self.emulated else "-"

    def run(self, name, *arguments, types=(), more=(), delay_us=0):
        """Run NAME.cpp with a CUDA backend.

        delay_us: maximum delay of each task of the emulated GPU.
        """
        sources = [HERE / f"{name}.cpp", PATCHES / "native/moe-edge-workers.cpp"]
        program = self.compile(name, sources, "-std=c++17", "-ldl")
        library = self.backend(types, more) if self.emulated else "-"
        self.monkeypatch.setenv("MOE_EMU_DELAY_US", str(delay_us))
        return run_program(program, library, *arguments, timeout_s=1800)


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request, library_folder, compile_native, emulated_backend, monkeypatch):
    emulated = request.param == "emulated"
    if not emulated and not (library_folder / "libggml-cuda.so").exists():
        pytest.skip("the library was built without CUDA: run `make build GPU=cuda`")
    return Device(emulated, compile_native, emulated_backend, monkeypatch)


@pytest.fixture
def emulated(device):
    if not device.emulated:
        pytest.skip("only the emulated GPU can be controlled")
    return device


@dataclass(frozen=True)
class Runs:
    """Answers of a model, each computed by engine_driver.py in a separate process."""

    device: Device
    model: Path

    def on_host(self, n_decode, **options):
        return self._run("-", n_decode, {"device": "host"} | options)

    def on_gpu(self, n_decode, **options):
        return self._run(self.device.library, n_decode, {"device": "cuda0"} | options)

    def _run(self, library, n_decode, options):
        """Return the driver's results, or {"failed": last message} if it ended early."""
        job = {"prompt": list(range(5, 17)), "n_decode": n_decode}
        job |= {"warm": False, "watch": False, "routes": False}
        given = (*job, "pinned_limit", "refuse_pin", "answer")
        job |= {key: options.pop(key) for key in given if key in options}
        # the micro-batch is computed after a model is loaded
        usual = {"model": str(self.model), "ctx": 128, "threads": 1, "ubatch": 16}
        job["options"] = usual | options
        command = [sys.executable, str(HERE / "engine_driver.py"), str(library), json.dumps(job)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=1800, cwd=HERE.parents[2]
        )
        found = {"emulated": library != "-"}
        if done.returncode == 1 and "Traceback" not in done.stderr:
            return found | {"failed": done.stderr.strip()}
        assert done.returncode == 0, done.stdout + done.stderr
        return found | json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def runs(device, both):
    return Runs(device, both)
