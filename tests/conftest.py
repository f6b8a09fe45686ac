"""Shared fixtures, and the list of tests that `make test` skips (`REST`).

Each test gets a temporary home folder. GPU tests are skipped with a reason if there is no GPU. The
fixtures provide the built library and models with random weights.
"""

import os
import re
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from real_cache import REAL_CACHE

from patches import probe

HERE = Path(__file__).parent
# Tests that `make test` skips and `make test-all` runs. Key: the reason. Values: regular
# expressions that match the start of a test id. `pytest PATH` runs every test in the path.
REST = {
    "further families: one of each kind of attention, router and tokenizer is in `make test`": (
        r"tests/unit/convert/test_families\.py::.*\["
        r"(?!mixtral|qwen3-moe|qwen3-next|deepseek-v3|gpt-oss|ernie4\.5-moe)",
        r"tests/unit/convert/test_check\.py",
    ),
    "further architectures: one of each kind of expert layer is in `make test`": (
        r"tests/native/test_architectures\.py::test_bit_for_bit\["
        r"(?!(gemma4|llama4|nemotron_h_moe|qwen4exp|deepseek32|minimax-m3|step35|grovemoe)\])",
        r"tests/native/test_architectures\.py::test_(two_precisions|a_prompt)\w*\[(?!gemma4)",
    ),
    "the emulated GPU: correct results and the VRAM limit are in `make test`; shapes, "
    "lost GPUs and the checks of the emulation itself are left out": (
        r"tests/native/cuda/test_(bench|counts|fused|lost|near_host)\.py::.*\[emulated",
        r"tests/native/cuda/test_strictness\.py",
        r"tests/native/cuda/test_kernels\.py::.*\[emulated",
        r"tests/native/cuda/test_engine\.py::test_(?!decodes|one_tier|vram).*\[emulated",
        r"tests/native/cuda/test_engine\.py::test_(decodes|vram).*\[emulated.*(dymoe-skip|dynaexq|firm)",
        r"tests/native/cuda/test_engine\.py::test_vram.*\[emulated-(0-dymoe|4194304-lru)\]",
    ),
    "the store under ThreadSanitizer: `make test` runs it under AddressSanitizer": (
        r"tests/native/test_executor\.py::.*\[thread\]",
        r"tests/native/test_executor\.py::test_a_part_alone\[.*-thread-",
        r"tests/native/test_threads\.py::test_barrier\[-fsanitize",
    ),
    "upstream's own tests of the operator that we replace: a large program to compile": (
        r"tests/native/test_executor\.py::test_upstreams_own_operator_tests",
    ),
    "a fleet on Ray: its options and which replica gets a request are in `make test`": (
        r"tests/unit/serve/test_fleet\.py::test_live",
    ),
    "benchmarks and studies from end to end: nothing that runs a model needs them": (
        r"tests/unit/lab/bench/test_bench\.py",
        r"tests/unit/lab/bench/test_\w+\.py::.*(end_to_end|test_a_small_run|on_the_host_device)",
        r"tests/unit/lab/study/test_(every_study|placed_rows|recorder|votes_study|uniform_types)\.py",
        r"tests/unit/lab/papers/test_every_paper\.py",
        r"tests/unit/eval/test_(lm_eval|within_memory)\.py",
    ),
    "how the demo model and the model of real weights are made: nothing that runs needs it": (
        r"tests/unit/test_(demo|real)_",
    ),
    "soaks: the same requests for longer, and signals at random moments of every command": (
        r"tests/unit/serve/test_serving\.py::test_(clients_at_once|memory_does_not)",
        r"tests/unit/cli/test_interrupts\.py::test_a_signal_ends_a_command_quietly",
    ),
    "further programs against the server: OpenAI's and Anthropic's are in `make test`": (
        r"tests/unit/serve/test_clients\.py::test_(langchain_openai|llm)",
        r"tests/unit/serve/test_openapi\.py::test_schemathesis",
    ),
    "the whole wheel, compiled for each set of instructions: its parts are in `make test`": (
        r"tests/native/test_wheel\.py",
    ),
    "the build tool, killed and raced: that it builds, and every edit with it, is in `make test`": (
        r"tests/contract/test_build\.py::test_(an_interrupted|half_written|a_killed|two_builds|make_)",
        r"tests/unit/lab/test_gpu_check\.py",
    ),
}

# OpenMP threads spin while they wait. On cores that other processes use too, that takes several
# times the time of the work itself. OpenMP reads the variable when the library is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The duration of an example depends only on the machine, so there is no deadline. All other
# settings stay, including Hypothesis' own profile for CI.
settings.register_profile(
    "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

# A test runner in the background ignores Ctrl-C, and the programs that it starts inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def user_folder(tmp_path_factory, monkeypatch):
    """Set a temporary home folder, so that no test reads or writes the user's files."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    for name in ("CACHE", "CONFIG", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(home / name.lower()))
    for name in list(os.environ):
        if name.startswith("MOE_EDGE_"):
            monkeypatch.delenv(name)
    return home


@pytest.fixture
def real_cache(monkeypatch):
    """The user's own moe-edge cache folder, for tests of the files that `make build` left there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(REAL_CACHE.parent))
    yield REAL_CACHE


@pytest.fixture(scope="session")
def library():
    """The installed patched llama.cpp."""
    from orchestrator.errors import NativeError
    from orchestrator.native.llama import Bindings

    try:
        return Bindings.load().library()
    except NativeError as error:
        pytest.skip(f"no built llama.cpp: {error}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Return the function tiny_model(shape, *tiers, seed=0).

    It returns the path of a GGUF file with random weights, which is written once per session.
    """
    from gguf_tools import synthetic

    folder = tmp_path_factory.mktemp("models")

    def make(shape, *tiers, seed=0):
        path = folder / f"{shape}-{'-'.join(tiers)}-{seed}.gguf"
        if not path.exists():
            synthetic.write(path, f"tiny-{shape}", tiers=tiers, seed=seed)
        return path

    return make


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by mark
def pytest_collection_modifyitems(config, items):
    rest = [each for patterns in REST.values() for each in patterns]
    for item in items:
        if any(re.match(each, item.nodeid) for each in rest):
            item.add_marker("rest")
    files = [path.relative_to(config.rootpath).as_posix() for path in HERE.rglob("test_*.py")]
    for each in rest:
        if not any(re.match(each.partition("::")[0], file) for file in files):
            raise pytest.UsageError(f"REST in tests/conftest.py: {each} matches no test file")
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    found, why = probe.find_gpu()
    if not found:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {why}"))


def pytest_terminal_summary(terminalreporter, config):
    """Print the reasons for which tests were skipped, or run in addition."""
    if "rest" in config.option.markexpr:
        left = config.option.markexpr == "not rest"
        terminalreporter.section("left to `make test-all`" if left else "beyond `make test`")
        for reason in REST:
            terminalreporter.line(reason)
