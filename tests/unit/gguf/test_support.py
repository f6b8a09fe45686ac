"""How a model can run is reported before long work: with a store, on llama.cpp's own path, or not
at all."""

import json
import os
import signal
import sys
import time

import pytest
from command_line import run
from repacking import repack
from tables import cases

from gguf_tools.experts import PROVEN
from orchestrator.cli.files import CANNOT_RUN
from orchestrator.errors import NativeError
from orchestrator.native import llama
from orchestrator.native.llama import Bindings
from orchestrator.runtime import support
from orchestrator.runtime.support import MANAGED, NOT, PLAIN, support_of

pytestmark = pytest.mark.usefixtures("library")
QUERIES = "blk.0.attn_q.weight"


@pytest.fixture
def lacking(packed, tmp_path):
    """A good file that lacks a tensor which llama.cpp needs."""
    return repack(packed, tmp_path / "odd.gguf", drop=[QUERIES])


def test_a_packed_model_can_be_managed(packed):
    assert support_of(packed).runs == MANAGED
    assert json.loads(run("inspect", packed, "--json").stdout)["support"]["runs"] == MANAGED
    assert "moe-edge can manage its experts" in run("inspect", packed).stdout


def test_a_graph_with_unknown_uses_of_experts_runs_plain(packed, monkeypatch):
    """If an operation other than MUL_MAT_ID reads an expert tensor, the model runs only on
    llama.cpp's own path. No real model does this, so a router is treated as an expert matrix."""
    monkeypatch.setattr(llama, "EXPERT_PATTERN", rb"blk\.\d+\.ffn_gate_inp\.weight")
    result = run("verify", packed)
    assert result.exit_code == 0
    said = (
        "cannot manage its experts: blk.0.ffn_gate_inp.weight is read by MUL_MAT, and not only by "
    )
    assert said in result.stderr
    assert json.loads(run("verify", packed, "--json").stdout)["support"]["runs"] == PLAIN


@cases(
    "changes, reasons",
    ({"meta": {"qwen3moe.attention.head_count": 0}}, ["has wrong shape"]),
    ({"drop": [QUERIES]}, [f"tensor '{QUERIES}' not found"]),
    ({"meta": {"general.architecture": "qwen3moe2"}}, ["unknown model architecture: 'qwen3moe2'"]),
    (
        {"meta": {"qwen3moe.expert_used_count": 99}},
        ["llama.cpp aborts when it reads the header of the file (", "GGML_ASSERT("],
    ),
)
def test_models_that_llama_cpp_does_not_load_cannot_run(packed, tmp_path, changes, reasons):
    path = repack(packed, tmp_path / "odd.gguf", **changes)
    found = support_of(path)
    assert found.runs == NOT and all(each in found.reason for each in reasons)
    assert str(path) not in found.reason


def test_the_reason_is_found_even_if_the_log_callback_was_replaced(lacking):
    """Other code, such as llama_cpp's logger or a benchmark of upstream, may replace the log
    callback."""
    bindings = Bindings.load()
    silent = bindings.api.llama_log_callback(lambda *_: None)
    bindings.api.llama_log_set(silent, None)
    try:
        with pytest.raises(NativeError, match=f"tensor '{QUERIES}' not found"):
            support.try_load(lacking, managed=False)
    finally:
        bindings.listen()


def test_a_good_file_that_cannot_run_has_its_own_exit_status(lacking):
    result = run("verify", lacking)
    assert result.exit_code == CANNOT_RUN
    assert ": no problems found; " in result.stdout
    assert "the model cannot run: " in result.stderr and QUERIES in result.stderr
    assert json.loads(run("verify", lacking, "--json").stdout)["support"]["runs"] == NOT
    assert run("inspect", lacking).exit_code == 0


def test_the_architectures_are_a_command():
    names = run("architectures").stdout.split()
    assert names == sorted(PROVEN)
    assert json.loads(run("architectures", "--json").stdout) == {"managed": names}


def test_a_process_without_an_answer_gives_no_result(packed, monkeypatch):
    monkeypatch.setattr(support, "_found", lambda *_: time.sleep(60))
    monkeypatch.setattr(support, "_TIMEOUT_S", 0.05)
    assert support_of(packed) is None
    monkeypatch.setattr(support, "_found", lambda *_: sys.exit(1))
    monkeypatch.setattr(support, "_TIMEOUT_S", 300)
    assert support_of(packed) is None


def test_the_trial_leaves_the_caller_as_it_was(packed):
    """The child process changes neither signal handlers nor stderr of its parent."""
    before = signal.getsignal(signal.SIGINT), os.stat(2).st_ino, dict(os.environ)
    assert support_of(packed).runs == MANAGED
    assert (signal.getsignal(signal.SIGINT), os.stat(2).st_ino, dict(os.environ)) == before
