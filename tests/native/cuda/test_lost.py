"""Cards that are too small, full, or lost in the middle: one sentence, and nothing wrong."""

import pytest

from .conftest import Runs
from .test_engine import POLICIES, assert_same_answer

LOST = (
    "The GPU has failed (an illegal memory access was encountered): "
    "start the program again, or use --device cpu."
)
FULL = "The GPU's memory is full: end what else uses it, or give a smaller --vram."


@pytest.fixture
def runs(emulated, both):
    return Runs(emulated, both)


def last_words(run, at_end):
    """What a run says that ends early, as an error of the engine or as at_end, the program's only
    line."""
    if "failed" in run:
        assert run["failed"] == at_end
    said = run.get("failed") or run["error"]
    assert len(said.splitlines()) == 1
    return said


@pytest.mark.parametrize("kernel", [1, 40, 400])
@pytest.mark.parametrize("name", ["lru", "dynaexq"])
def test_a_card_that_is_lost(runs, monkeypatch, name, kernel):
    """From some kernel on every call of CUDA fails, in upstream's code or in ours."""
    monkeypatch.setenv("MOE_EMU_FAIL", str(kernel))
    said = last_words(runs.on_gpu(6, **POLICIES[name], misses="copy"), LOST)
    # or our own copies met it first, or what times them: the engine raised, and freed all
    assert ("does not answer" if kernel == 1 else "start the program again") in said


@pytest.mark.parametrize("allocation", [1, 4, 8, 12])
def test_a_card_that_another_program_fills(runs, monkeypatch, allocation):
    """From some allocation on there is no memory, though it was there when the plan was made."""
    monkeypatch.setenv("MOE_EMU_FULL", str(allocation))
    said = last_words(runs.on_gpu(6, **POLICIES["lru"], misses="copy"), FULL)
    assert "memory" in said or "full" in said


@pytest.mark.parametrize("refused", [1, 2, 3, 4])
def test_a_piece_that_is_not_pinned(runs, refused):
    """The driver refuses one piece of host memory, whichever: what the link is timed with, the
    cache of experts, rows for the host's threads, tables. The answer is the host's."""
    wanted = runs.on_host(3, **POLICIES["lru"])
    options = {**POLICIES["lru"], "answer": wanted["tokens"], "misses": "compute"}
    found = runs.on_gpu(3, **options, refuse_pin=refused)
    assert_same_answer(found, wanted)
    assert found["host_computed"] > 0
    assert ("host memory not pinned" in found["mode"]) == (refused == 2)


def test_a_card_that_is_too_small(runs, monkeypatch):
    """--vram asks for more than the card has, which is too little for anything."""
    monkeypatch.setenv("MOE_EMU_VRAM", str(8 << 20))
    said = last_words(runs.on_gpu(0, policy="lru", vram=1 << 34), "")
    assert said.startswith("free memory of cuda0, 8 MiB, is too little: the smallest --vram")
