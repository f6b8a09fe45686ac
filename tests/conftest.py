"""What every test gets: a user folder of its own, and GPU tests that say why they skip."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from patches import probe
from patches.upstream import cache_dir

# A runner started in the background ignores Ctrl-C, and what it starts inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Folders of the real user: a build or a download that is there already may be read, never
# written, by the tests that check it.
REAL_CACHE = cache_dir()


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    found, why = probe.find_gpu()
    if not found:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {why}"))
