"""Cards that are too small, full, or lost in the middle: one sentence, and nothing wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import HERE, Device
from .test_engine import POLICIES, PROMPT, assert_same_answer, engine

LOST = (
    "The GPU has failed (an illegal memory access was encountered): "
    "start the program again, or use --device cpu."
)
FULL = "The GPU's memory is full: end what else uses it, or give a smaller --vram."


def last_words(
    device: Device, model: Path, name: str, at_end: str, **environment: str
) -> str | None:
    """What a run says that ends early, as an error of the engine or as at_end, the program's only
    line; None for one that does not."""
    options = {**POLICIES[name], "model": str(model)}
    options |= {"ctx": 128, "ubatch": 16, "threads": 1, "device": "cuda0", "misses": "copy"}
    job = {"prompt": PROMPT, "n_decode": 6, "warm": False, "watch": False}
    job |= {"routes": False, "options": options}
    command = [sys.executable, str(HERE / "engine_driver.py"), str(device.library), json.dumps(job)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | environment,
        cwd=HERE.parents[2],
        timeout=900,
    )
    if done.returncode:
        assert (done.returncode, done.stderr.strip()) == (1, at_end)
        return at_end
    said: str | None = json.loads(done.stdout.splitlines()[-1]).get("error")
    assert said is None or len(said.splitlines()) == 1
    return said


@pytest.mark.parametrize("kernel", [1, 40, 400])
@pytest.mark.parametrize("name", ["lru", "dynaexq"])
def test_a_card_that_is_lost(
    device: Device, tiny_model: Callable[..., Path], name: str, kernel: int
) -> None:
    """From some kernel on every call of CUDA fails, in upstream's code or in ours."""
    if not device.emulated:
        pytest.skip("a card that fails when it is told to is at hand in the emulation only")
    model = tiny_model("qwen3moe", "q4_k", "q2_k")
    said = last_words(device, model, name, LOST, MOE_EMU_FAIL=str(kernel))
    # or our own copies met it first, or what times them: the engine raised, and freed all
    assert said is not None
    assert ("does not answer" if kernel == 1 else "start the program again") in said


@pytest.mark.parametrize("allocation", [1, 4, 8, 12])
def test_a_card_that_another_program_fills(
    device: Device, tiny_model: Callable[..., Path], allocation: int
) -> None:
    """From some allocation on there is no memory, though it was there when the plan was made."""
    if not device.emulated:
        pytest.skip("a card that fills when it is told to is at hand in the emulation only")
    model = tiny_model("qwen3moe", "q4_k", "q2_k")
    said = last_words(device, model, "lru", FULL, MOE_EMU_FULL=str(allocation))
    assert said is not None and ("memory" in said or "full" in said)


@pytest.mark.parametrize("refused", [1, 2, 3, 4])
def test_a_piece_that_is_not_pinned(
    device: Device, tiny_model: Callable[..., Path], refused: int
) -> None:
    """The driver refuses one piece of host memory, whichever: what the link is timed with, the
    cache of experts, rows for the host's threads, tables. The answer is the host's."""
    if not device.emulated:
        pytest.skip("a driver that refuses is at hand in the emulation only")
    options = {**POLICIES["lru"], "model": str(tiny_model("qwen3moe", "q4_k", "q2_k"))}
    wanted = engine("-", 3, **options, device="host")
    options |= {"answer": wanted["tokens"], "misses": "compute", "device": "cuda0"}
    found = engine(device.library, 3, **options, refuse_pin=refused)
    assert_same_answer(found, wanted)
    assert found["host_computed"] > 0
    assert ("host memory not pinned" in found["mode"]) == (refused == 2)


def test_a_card_that_is_too_small(
    device: Device, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--vram asks for more than the card has, which is too little for anything."""
    if not device.emulated:
        pytest.skip("as small a card as wanted is at hand in the emulation only")
    monkeypatch.setenv("MOE_EMU_VRAM", str(8 << 20))
    options = {**POLICIES["lru"], "model": str(tiny_model("qwen3moe", "q4_k", "q2_k"))}
    options.pop("expert_ram")
    said = engine(device.library, 0, **options, device="cuda0", vram=1 << 34)["error"]
    assert said.startswith("free memory of cuda0, 8 MiB, is too little: the smallest --vram")
    assert len(said.splitlines()) == 1
