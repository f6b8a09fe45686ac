"""What every test gets: a user folder of its own, and GPU tests that say why they skip; and what
many want: the built library, and models of random weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from real_cache import REAL_CACHE

from patches import probe

if TYPE_CHECKING:
    from orchestrator.native import Library

# ggml's threads are OpenMP's, which spin while they wait: on cores that others use, too, that takes
# several times the time of the work. Read when the library is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# How long an example takes says something of the machine alone. All else stays, CI's own choice of
# examples among it.
settings.register_profile(
    "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

# A runner started in the background ignores Ctrl-C, and what it starts inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def user_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary home: no test reads or writes the user's own files."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    for name in ("CACHE", "CONFIG", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(home / name.lower()))
    for name in list(os.environ):
        if name.startswith("MOE_EDGE_"):
            monkeypatch.delenv(name)
    return home


@pytest.fixture
def real_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's own moe-edge cache folder, for tests of what `make build` left there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(REAL_CACHE.parent))
    yield REAL_CACHE


@pytest.fixture(scope="session")
def library() -> Library:
    """The patched llama.cpp that is installed."""
    from orchestrator.errors import NativeError
    from orchestrator.native.llama import Bindings

    try:
        return Bindings.load().library()
    except NativeError as error:
        pytest.skip(f"no built llama.cpp: {error}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_model(shape, *tiers, seed=0): a random-weight GGUF, written once a session."""
    from gguf_tools import synthetic

    folder = tmp_path_factory.mktemp("models")

    def make(shape: str, *tiers: str, seed: int = 0) -> Path:
        path = folder / f"{shape}-{'-'.join(tiers)}-{seed}.gguf"
        if not path.exists():
            synthetic.write(path, f"tiny-{shape}", tiers=tiers, seed=seed)
        return path

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    found, why = probe.find_gpu()
    if not found:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {why}"))
