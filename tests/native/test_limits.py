"""What is refused, and the promise about memory, kept by a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gguf_tools import synthetic
from orchestrator.config import Config
from orchestrator.engine.engine import Engine
from orchestrator.errors import BudgetError, NativeError
from patches.upstream import REPO

from .copies import copied

pytestmark = pytest.mark.usefixtures("library_folder")


def test_an_architecture_outside_the_list_is_refused_by_name(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """rnd1 has qwen3moe's tensors, so llama.cpp loads it; its experts are not managed."""
    model = copied(tiny_model("qwen3moe", "q4_k"), tmp_path / "other.gguf", arch="rnd1")
    config = Config.build(model=model, ctx=64, threads=1, expert_ram=1 << 20)
    with pytest.raises(NativeError, match=r"architecture rnd1 .*cannot be managed"):
        Engine.open(config)


def test_what_llama_cpp_says_first_is_the_reason(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Its last line only says that it failed."""
    model = copied(tiny_model("qwen3moe", "q4_k"), tmp_path / "other.gguf", arch="no-such-one")
    config = Config.build(model=model, ctx=64, threads=1, policy="plain")
    with pytest.raises(NativeError, match=r"cannot load it \(.*unknown model architecture"):
        Engine.open(config)


def chat(model: Path, *words: str) -> dict[str, Any]:
    """Statistics of one answer by a process of its own; the prompt meets most experts."""
    prompt = " ".join(f"{i * i:x}" for i in range(1, 70))
    command = [sys.executable, "-m", "orchestrator", "chat", "-m", str(model), "--json"]
    command += ["--ctx=512", "--threads=1", "--max-tokens=24", "-p", prompt, *words]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    stats: dict[str, Any] = json.loads(done.stdout)["stats"]
    return stats


def test_a_process_stays_below_ram(tmp_path: Path) -> None:
    """Under a cap that the same model breaks where its experts stay in memory."""
    tiny = synthetic.preset("tiny-qwen3moe")
    shape = replace(tiny, n_layer=3, n_embd=512, n_ff_exp=512, n_expert=64)
    model = synthetic.write(tmp_path / "large.gguf", shape, tiers=("q8_0",))
    with pytest.raises(BudgetError) as refused:
        Engine.open(Config.build(model=model, ram=1 << 20, ctx=512))
    ram = refused.value.needed_bytes + (8 << 20)
    for policy in ("lru", "dymoe"):
        stats = chat(model, f"--policy={policy}", f"--ram={ram}")
        assert stats["mode"].startswith(f"managed: {policy}")
        assert stats["bytes_read"] > 32 << 20
        assert stats["peak_rss_bytes"] <= ram
    resident = chat(model, "--policy=plain", "--ram=1GiB")
    assert resident["peak_rss_bytes"] > ram
