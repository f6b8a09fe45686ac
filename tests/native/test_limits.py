"""What is refused, and the promise about memory, kept by a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gguf_tools import synthetic
from orchestrator.errors import BudgetError, NativeError
from patches.upstream import REPO

from .conftest import opened
from .copies import copied


@pytest.mark.parametrize(
    ("arch", "policy", "said"),
    [
        # it has qwen3moe's tensors, so llama.cpp loads it; its experts are not managed
        ("rnd1", "lru", r"architecture rnd1 .*cannot be managed"),
        # llama.cpp's last line only says that it failed: its first one is the reason
        ("no-such-one", "plain", r"cannot load it \(.*unknown model architecture"),
    ],
)
def test_an_architecture_outside_the_list_is_refused_by_name(
    arch: str, policy: str, said: str, one: Path, tmp_path: Path
) -> None:
    model = copied(one, tmp_path / "other.gguf", arch=arch)
    with pytest.raises(NativeError, match=said):
        opened(model, policy=policy, expert_ram=None if policy == "plain" else 1 << 20)


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
        opened(model, ram=1 << 20, ctx=512)
    ram = refused.value.needed_bytes + (8 << 20)
    for policy in ("lru", "dymoe"):
        stats = chat(model, f"--policy={policy}", f"--ram={ram}")
        assert stats["mode"].startswith(f"managed: {policy}")
        assert stats["bytes_read"] > 32 << 20
        assert stats["peak_rss_bytes"] <= ram
    resident = chat(model, "--policy=plain", "--ram=1GiB")
    assert resident["peak_rss_bytes"] > ram
