"""Whole processes: Ctrl-C, signals, closed pipes, and input that is not text."""

import importlib.util
import os
import re
import signal
import subprocess
import sys

import fake_runtime
import interrupting
import pytest
import small_commands
from tables import cases
from waiting import HANG_S, wait_until

FAKE = [sys.executable, fake_runtime.__file__]
ENDLESS = ("-m", "x.gguf", "-p", "endless")


@cases(
    "args, stdin, stdout",
    (("-m", "x.gguf"), "caf\u00e9".encode(), "<caf\u00e9>\n"),
    # Without escape codes and statistics.
    (("-m", "slow.gguf", "-p", "slow"), b"", "read\n"),
)
def test_a_pipe_gets_only_the_answer(args, stdin, stdout):
    result = subprocess.run([*FAKE, "chat", *args], input=stdin, capture_output=True)
    assert (result.returncode, result.stdout.decode(), result.stderr) == (0, stdout, b"")


def started(*command, **environment):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(command, env=os.environ | environment, **pipes)


def interrupted(log, event, *args):
    """Send Ctrl-C after the fake runtime has logged `event`. Returns (exit status, stdout,
    stderr)."""
    with started(*FAKE, "chat", *args, FAKE_RUNTIME_LOG=str(log)) as process:
        wait_until(lambda: log.exists() and event in log.read_text(), f"{event} was not logged")
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=HANG_S)
    return process.returncode, stdout, stderr


def test_ctrl_c_while_python_loads_shows_nothing(tmp_path):
    """Ctrl-C during an import exits with 130 and prints nothing."""
    (tmp_path / "click.py").write_text("import time; print('loading', flush=True); time.sleep(60)")
    command = [sys.executable, "-m", "orchestrator", "--help"]
    with started(*command, PYTHONPATH=f"{tmp_path}:{fake_runtime.ROOT}") as process:
        assert process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b""
        assert process.wait() == 130


@cases(
    "event, args, said",
    ("endless", ENDLESS, rb"(\d+ )*\n"),
    ("endless", (*ENDLESS, "--json"), b""),
    ("open", ("-m", "endless.gguf", "-p", "hello"), b""),
)
def test_ctrl_c_exits_130(tmp_path, event, args, said):
    status, stdout, stderr = interrupted(tmp_path / "log", event, *args)
    assert (status, stderr) == (130, b"") and re.fullmatch(said, stdout)


def test_a_closed_pipe_ends_it_quietly():
    with started(*FAKE, "chat", *ENDLESS) as process:
        assert process.stdout.read(2) == b"0 "
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=HANG_S) != 0


TIMES = 2
NAMES = ("eval", "trace", "calibrate", "pack", "convert", "replay", "chat", "pull")


@pytest.fixture(scope="module")
def folder(library, tmp_path_factory):
    return tmp_path_factory.mktemp("interrupted")


@cases(
    "name, number",
    *[(name, signal.SIGINT) for name in NAMES],
    *[("pack", signal.SIGTERM), ("chat", signal.SIGHUP), ("trace", signal.SIGTERM)],
)
def test_a_signal_ends_a_command_quietly(folder, name, number):
    if name == "convert" and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs the extra `convert`")
    command = small_commands.commands(folder)[name]()
    ends, wrong = interrupting.interrupt(command, TIMES, seed=name, number=number)
    assert wrong == []
    assert ends[f"status {128 + number}"] >= TIMES - 1
