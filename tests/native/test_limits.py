"""Refused models, and the memory limit of `--ram`, tested in a separate process."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from repacking import repack

from gguf_tools import synthetic
from gguf_tools.file.reader import GGUFFile
from orchestrator.errors import BudgetError, NativeError
from orchestrator.native import Store, llama
from patches.upstream import REPO

from .conftest import opened


def test_an_unknown_architecture_is_refused_by_name(one, tmp_path):
    """The error contains llama.cpp's first log line, which has the reason.

    Its last line only says that loading failed.
    """
    with GGUFFile.open(one) as file:
        own = {key: value for key, value in file.metadata.items() if key.startswith("qwen3moe.")}
    renamed = {key.replace("qwen3moe", "no-such-one"): value for key, value in own.items()}
    renamed["general.architecture"] = "no-such-one"
    model = repack(one, tmp_path / "other.gguf", meta=renamed)
    with pytest.raises(NativeError, match=r"cannot load the model \(.*unknown model architecture"):
        opened(model, policy="plain")


def test_expert_tensors_read_by_another_op_are_refused(one, monkeypatch):
    """A model whose expert tensors another op reads is refused before a store is created.

    No known model has such tensors, so the pattern for expert tensors is extended to the router.
    """
    monkeypatch.setattr(llama, "EXPERT_PATTERN", rb"blk\.\d+\.ffn_(gate_inp|.*_exps)\.weight")
    monkeypatch.setattr(Store, "create", None)
    with pytest.raises(NativeError, match=r"blk\.0\.ffn_gate_inp\.weight is read by MUL_MAT, and "):
        opened(one, policy="lru", expert_ram=1 << 20)


def chat(model, *words):
    """Return the statistics of one answer by a separate process. The prompt uses most experts."""
    prompt = " ".join(f"{i * i:x}" for i in range(1, 70))
    command = [sys.executable, "-m", "orchestrator", "chat", "-m", str(model), "--json"]
    command += ["--ctx=512", "--threads=1", "--max-tokens=24", "-p", prompt, *words]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    stats = json.loads(done.stdout)["stats"]
    return stats


def test_a_process_stays_below_ram(tmp_path):
    """The peak RSS stays below --ram with lru and dymoe, while `plain` exceeds the same limit."""
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
