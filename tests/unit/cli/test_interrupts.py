"""The whole process: Ctrl-C, pipes that are closed, input that is no text."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_engine

FAKE = [sys.executable, fake_engine.__file__]
ENDLESS = ("-m", "x.gguf", "-p", "endless")

HANG_S = 600  # only what hangs takes so long


def test_an_unreadable_stdin_byte_is_no_crash():
    result = subprocess.run(
        [*FAKE, "chat", "-m", "x.gguf"], input=b"caf\xe9", capture_output=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.decode() == "<caf\ufffd>\n"


def test_a_pipe_sees_no_escape_code_and_no_statistics():
    result = subprocess.run(
        [*FAKE, "chat", "-m", "slow.gguf", "-p", "slow"], capture_output=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, b"read\n", b"")


def interrupted(log: Path, event: str, *args: str) -> tuple[int, bytes, bytes]:
    """Ctrl-C once the fake engine has said `event`: exit status, stdout, stderr."""
    with subprocess.Popen(
        [*FAKE, "chat", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "FAKE_ENGINE_LOG": str(log)},
    ) as process:
        deadline = time.monotonic() + HANG_S
        while not log.exists() or event not in log.read_text():
            assert time.monotonic() < deadline, f"it never came to {event}"
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=HANG_S)
    return process.returncode, stdout, stderr


def test_ctrl_c_while_python_loads_shows_nothing(tmp_path):
    """A module of the command line stands still until the key is pressed."""
    (tmp_path / "click.py").write_text("import time; print('loading', flush=True); time.sleep(60)")
    with subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "--help"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{fake_engine.ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b""
        assert process.wait() == 130


def test_ctrl_c_in_one_shot_exits_130(tmp_path):
    status, stdout, stderr = interrupted(tmp_path / "log", "endless", *ENDLESS)
    assert (status, stderr) == (130, b"")
    assert stdout.endswith(b"\n")


def test_ctrl_c_with_json_prints_no_object(tmp_path):
    args = (*ENDLESS, "--json")
    assert interrupted(tmp_path / "log", "endless", *args) == (130, b"", b"")


def test_ctrl_c_while_loading_exits_130(tmp_path):
    args = ("-m", "endless.gguf", "-p", "hello")
    assert interrupted(tmp_path / "log", "open", *args) == (130, b"", b"")


def test_a_closed_pipe_ends_it_quietly():
    with subprocess.Popen(
        [*FAKE, "chat", *ENDLESS],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.read(2) == b"0 "
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=HANG_S) != 0
