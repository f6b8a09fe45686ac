"""Fixtures of the native tests, and helpers that several tests use with a model.

The fixtures are the patched library and upstream's headers of the same source.
"""

import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from asking import needs_in

from gguf_tools import synthetic
from gguf_tools.built import instruction_set
from gguf_tools.experts import ExpertModel
from gguf_tools.pack import pack
from orchestrator.config import Config
from orchestrator.cost import losses
from orchestrator.native.llama import Bindings
from orchestrator.plan.records import PlanRequest
from orchestrator.runtime.runtime import Runtime
from patches import portable, tree
from patches.upstream import (
    PATCHES,
    cache_dir,
    cached_sdist,
    is_pinned,
    locked,
    read_upstream,
)

HERE = Path(__file__).parent
# Memory of the slots: the host's, or that of a test device. The device delays copies by up to 100
# us and poisons their destinations first.
DEVICES = (None, "host:100")
HANG_S = 600  # no correct test waits this long
LINKED = ("llama", "ggml", "ggml-cpu", "ggml-base")


@pytest.fixture(autouse=True)
def built(library):
    """Skip every test in this folder if the library is not built."""


@pytest.fixture(scope="session")
def library_folder(library):
    """Folder of the patched libllama.so and its companions."""
    return Path(Bindings.load().api._lib._name).parent


@pytest.fixture(scope="session")
def library_files(library_folder):
    """Paths of libllama.so and its companions, by the names that `make build` gives them.

    A wheel has other names, and the library that computes is in a folder for its instruction set.
    """
    own = {new: old for old, new in portable.NAMES.items()}
    paths = [*library_folder.glob("*.so"), *(library_folder / instruction_set()).glob("*.so")]
    return {own.get(path.name.encode(), path.name.encode()).decode(): path for path in paths}


@pytest.fixture(scope="session")
def llama_source(tmp_path_factory):
    """The patched llama.cpp source tree that `make build` keeps in the user cache."""
    upstream = read_upstream()
    sdist = cached_sdist(upstream)
    if sdist is None:
        pytest.skip("the pinned source is not in the cache: run `make build`")
    if not is_pinned(sdist, upstream):
        pytest.skip(f"{sdist} is not the pinned source: run `make build`")
    with locked(cache_dir() / "lock"):
        return tree.sync_tree(sdist, upstream) / upstream.source


@pytest.fixture(scope="session")
def compile_native(library_files, llama_source, tmp_path_factory):
    """compile_native(name, sources, flags): compile a program with the patched library."""
    folder = tmp_path_factory.mktemp("native")

    def compile_here(name, sources, *flags, libraries=LINKED):
        compiler = os.environ.get("CC", "cc") if sources[0].suffix == ".c" else "c++"
        linked = [library_files[f"lib{each}.so"] for each in libraries]
        return compile_program(compiler, folder / name, sources, flags, linked, llama_source)

    return compile_here


def compile_program(compiler, program, sources, flags, linked, llama_source):
    """Compile a program that finds its shared libraries at their current paths."""
    headers = (PATCHES / "native", llama_source / "ggml/include", llama_source / "include")
    command = [
        compiler,
        *("-Wall", "-Wextra", "-Werror", "-O1", "-g"),
        *flags,
        *(f"-I{path}" for path in headers),
        *map(str, sources),
        *map(str, linked),
        *(f"-Wl,-rpath,{folder}" for folder in {path.parent for path in linked}),
        "-pthread",
        "-o",
        str(program),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="session")
def operator_tests(compile_native, llama_source):
    """Upstream's own operator tests, compiled without optimisation to save time."""
    sources = [llama_source / "tests/test-backend-ops.cpp"]
    flags = ("-std=c++17", "-w", "-O0", "-g0", f"-I{llama_source / 'src'}")
    return compile_native("test-backend-ops", sources, *flags)


@pytest.fixture(params=DEVICES)
def device(request):
    """The memory of the slots: None for the host's, or a test device with late copies."""
    return request.param


@pytest.fixture
def one(tiny_model):
    """A model with random weights in one tier."""
    return tiny_model("qwen3moe", "q4_k")


@pytest.fixture
def both(tiny_model):
    return tiny_model("qwen3moe", "q4_k", "q2_k")


@pytest.fixture
def three(tiny_model):
    return tiny_model("qwen3moe", "q8_0", "q4_k", "q2_k")


@pytest.fixture(scope="session")
def packed(tmp_path_factory):
    """packed(*tiers): the same random model in these tiers, packed from its f16 weights."""
    folder = tmp_path_factory.mktemp("packed")
    source = synthetic.write(folder / "source.gguf", "tiny-qwen3moe", tiers=("f16",))

    def make(*tiers):
        path = folder / f"{'-'.join(tiers)}.gguf"
        if not path.exists():
            pack(source, path, tiers)
        return path

    return make


def drawn(n, seed=0):
    """Return n random tokens."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, 250, n)]


def build(model, share=0, **options):
    """Build a configuration.

    share: slots for this fraction of the experts in the best tier. 0: default budget.
    """
    if share:
        with ExpertModel.open(model) as file:
            options["expert_ram"] = int(share * file.tier_bytes[0])
    return Config.build(model=model, **({"ctx": 256, "threads": 1} | options))


def opened(model, share=0, **options):
    needs = needs_in(options)
    return Runtime.open(PlanRequest(build(model, share, **options), needs))


def save_losses(path, model, lost, power=1.0, gates=None, fit=None, **ranges):
    """Write a loss table for a model.

    lost: loss of one use of an expert in each of the best tiers, shape [..., n_tiers]. power: loss
    of a skipped expert. fit: the factor of each layer, and the number of tokens of the fit. ranges:
    spread and routing of `Fit`.
    """
    with ExpertModel.open(model) as file:
        size = file.n_layers, file.n_expert
        tiers = file.tiers[: np.shape(lost)[-1]]
        table = losses.LossTable(
            [losses.TablePrecision(tier.name, tier.bpw, True) for tier in tiers],
            np.broadcast_to(lost, (*size, len(tiers))).copy(),
            np.broadcast_to(power, size).copy(),
            np.ones(size, np.int64),
            *("none", "rtn", "text", 9),
            None if gates is None else np.full(size, gates),
            None if fit is None else losses.Fit((fit[0],) * size[0], fit[1], "text", 1.0, **ranges),
        )
        losses.save(path, file, table)


def until(is_so, meanwhile=None):
    """Wait until is_so() is true. Fail after HANG_S seconds. meanwhile: called repeatedly."""
    end = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < end, "timed out"
        if meanwhile is None:
            time.sleep(0.001)
        else:
            meanwhile()


def greedy(e, prompt, n_decode):
    """Logits [1 + n_decode, n_vocab] after a prompt and after each greedily chosen token."""
    rows = [e.eval(prompt, 0)[-1]]
    for i in range(n_decode):
        rows.append(e.eval([int(rows[-1].argmax())], len(prompt) + i)[-1])
    return np.stack(rows)


def run_program(program, *arguments, by=(), timeout_s=1200):
    """Run a program and return its standard output. A failure shows its output.

    by: a command that runs the program, such as an emulator. The timeout only ends a hanging
    program.
    """
    command = ["timeout", "--signal=KILL", str(timeout_s), *by, str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout
