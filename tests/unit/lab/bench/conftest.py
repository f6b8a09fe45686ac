"""Fixtures for benchmarks with real processes or without a disk."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def real_engine(library, monkeypatch, tmp_path):
    """Let child processes import this checkout."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))


@pytest.fixture
def no_disk(monkeypatch, tmp_path):
    """A disk of 1 GB/s and an empty cache folder."""
    from orchestrator.cost import disk

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        disk, "read_bandwidth", lambda *args, **kwargs: disk.Bandwidth(1e9, True, 4096)
    )
