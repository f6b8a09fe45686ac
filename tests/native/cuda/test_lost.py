"""GPUs that are too small, full, or lost during a run: one message, and no wrong result."""

import pytest

from .conftest import Runs
from .test_engine import POLICIES, assert_same_answer

LOST = (
    "The GPU has failed (an illegal memory access was encountered): "
    "start the program again, or use --device cpu."
)
FULL = "The GPU's memory is full: end other programs that use it, or give a smaller --vram."


@pytest.fixture
def runs(emulated, both):
    return Runs(emulated, both)


def last_message(run, at_end):
    """Return the message of a run that ended early: one line.

    It is the error, or at_end if the process failed.
    """
    if "failed" in run:
        assert run["failed"] == at_end
    said = run.get("failed") or run["error"]
    assert len(said.splitlines()) == 1
    return said


@pytest.mark.parametrize("kernel", [1, 40, 400])
@pytest.mark.parametrize("name", ["lru", "dynaexq"])
def test_a_lost_gpu(runs, monkeypatch, name, kernel):
    """From a given kernel on, every CUDA call fails, in upstream's code or in ours."""
    monkeypatch.setenv("MOE_EMU_FAIL", str(kernel))
    said = last_message(runs.on_gpu(6, **POLICIES[name], misses="copy"), LOST)
    assert "start the program again" in said


@pytest.mark.parametrize("allocation", [1, 4, 8, 12])
def test_a_gpu_that_another_program_fills(runs, monkeypatch, allocation):
    """From a given allocation on there is no memory, although there was when the plan was made."""
    monkeypatch.setenv("MOE_EMU_FULL", str(allocation))
    said = last_message(runs.on_gpu(6, **POLICIES["lru"], misses="copy"), FULL)
    assert "memory" in said or "full" in said


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_a_refused_pin(runs, refused):
    """If the driver refuses to pin one piece of host memory, the answer equals the host's.

    The piece is the host cache, the rows for the host's threads, or the tables.
    """
    wanted = runs.on_host(3, **POLICIES["lru"])
    options = {**POLICIES["lru"], "answer": wanted["tokens"], "misses": "compute"}
    found = runs.on_gpu(3, **options, refuse_pin=refused)
    assert_same_answer(found, wanted)
    assert found["host_computed"] > 0
    assert ("host memory not pinned" in found["mode"]) == (refused == 1)


def test_a_gpu_that_is_too_small(runs, monkeypatch):
    """--vram exceeds the GPU's memory, which is too small for any plan."""
    monkeypatch.setenv("MOE_EMU_VRAM", str(8 << 20))
    said = last_message(runs.on_gpu(0, policy="lru", vram=1 << 34), "")
    assert said.startswith("free memory of cuda0, 8 MiB, is too little: the smallest --vram")
