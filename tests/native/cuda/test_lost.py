"""Cards that are smaller than asked, or are lost in the middle: one sentence, and nothing wrong."""

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

SENTENCE = (
    "The GPU has failed (an illegal memory access was encountered): "
    "start the program again, or use --device cpu."
)


@pytest.mark.parametrize("kernel", [40, 400])
@pytest.mark.parametrize("name", ["lru", "dynaexq"])
def test_a_card_that_is_lost(
    device: Device, tiny_model: Callable[..., Path], name: str, kernel: int
) -> None:
    """From some kernel on every call of CUDA fails, in upstream's code or in ours."""
    if not device.emulated:
        pytest.skip("a card that fails when it is told to is at hand in the emulation only")
    options = {**POLICIES[name], "model": str(tiny_model("qwen3moe", "q4_k", "q2_k"))}
    options |= {"ctx": 128, "ubatch": 16, "threads": 1, "device": "cuda0", "misses": "copy"}
    job = {"prompt": PROMPT, "n_decode": 6, "warm": False, "watch": False}
    job |= {"routes": False, "options": options}
    command = [sys.executable, str(HERE / "engine_driver.py"), str(device.library), json.dumps(job)]
    environment = os.environ | {"MOE_EMU_FAIL": str(kernel)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=HERE.parents[2], timeout=900
    )
    said = done.stderr.strip()
    if done.returncode == 0:  # our own copies met it first: the engine raised, and freed all
        said = json.loads(done.stdout.splitlines()[-1])["error"]
        assert "start the program again" in said
    else:
        assert (done.returncode, said) == (1, SENTENCE)
    assert len(said.splitlines()) == 1


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
    assert "is too little" in said and "smallest" in said and len(said.splitlines()) == 1
