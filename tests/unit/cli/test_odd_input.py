"""What a newcomer does to the command line: one sentence each, and nothing left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import fake_engine
import pytest
from click.testing import CliRunner

from orchestrator.cli.main import cli
from orchestrator.lab.plotting import save_figure

FAKE = [sys.executable, fake_engine.__file__]
DEMO = Path(__file__).resolve().parents[3] / "models/demo/moe-edge-demo.gguf"


def refused(*args: str) -> str:
    """What a command says that ends with a sentence, which is all that it says."""
    result = CliRunner().invoke(cli, list(args))
    assert result.exit_code in (1, 2), result.output
    assert result.stdout == ""
    sentence = result.stderr.splitlines()[-1]
    assert sentence.startswith("Error: ")
    return sentence


@pytest.mark.parametrize("number", ["nan", "-1", "1e30"])
@pytest.mark.parametrize("option", ["--retention", "--compute-ms"])
def test_numbers_of_a_replay_are_numbers(option: str, number: str) -> None:
    assert f"'{option}'" in refused("replay", "T.npz", option, number)


def test_nan_is_no_retention_of_a_benchmark() -> None:
    said = refused("bench", "--retention", "nan")
    assert "'--retention': must be 0.0 to 1.0, not nan" in said


@pytest.mark.parametrize("option", [("--schedule", "flat"), ("--prefetch", "on")])
def test_what_dymoe_alone_does_is_refused_with_another_policy(option: tuple[str, str]) -> None:
    args = ("chat", "-m", str(DEMO), "-p", "x", "--policy", "lru", *option)
    assert f"{option[0]} has no effect with --policy lru, which runs one precision" in refused(
        *args
    )


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    assert "name a GGUF in it" in refused("chat", "-m", str(tmp_path), "-p", "x")
    (tmp_path / "config.json").touch()
    assert "moe-edge convert" in refused("chat", "-m", str(tmp_path), "-p", "x")


def test_an_address_of_the_hub_is_no_file() -> None:
    assert "hf:OWNER/NAME" in refused("chat", "-m", "https://huggingface.co/a/b", "-p", "x")


@pytest.mark.parametrize("command", ["inspect", "verify", "replay"])
def test_a_pipe_without_a_writer_is_no_file(tmp_path: Path, command: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = subprocess.run(
        [sys.executable, "-m", "orchestrator", command, str(pipe)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=fake_engine.ROOT,
    )
    assert result.returncode == 1
    assert str(pipe) in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_tokens_to_calibrate_on_need_a_text(tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    args = ("pack", "in.gguf", str(target), "--tiers", "q4_k", "--calib-tokens", "5")
    assert "--calib-tokens is for a text" in refused(*args)


def test_a_table_that_cannot_be_written_is_refused_before_calibrating(tmp_path: Path) -> None:
    said = refused("calibrate", "in.gguf", "--calib", "T.txt", "--out", str(tmp_path))
    assert said == f"Error: {tmp_path}: Is a directory"
    said = refused("calibrate", "in.gguf", "--calib", "T.txt", "--out", str(tmp_path / "a" / "b"))
    assert said == f"Error: {tmp_path / 'a' / 'b'}: No such file or directory"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("option", "value"), [("--out", "T.json"), ("--method", "rtn")])
def test_an_importance_matrix_takes_no_option_of_the_table(option: str, value: str) -> None:
    args = ("--calib", "T.txt", "--save-imatrix", "M.gguf")
    assert f"{option} is for the table" in refused("calibrate", "in.gguf", *args, option, value)


def test_a_profile_that_cannot_be_kept_is_refused_before_the_chat(tmp_path: Path) -> None:
    args = ("chat", "-m", "x.gguf", "-p", "x", "--policy", "dynaexq", "--profile", str(tmp_path))
    assert refused(*args) == f"Error: {tmp_path}: Is a directory"


def test_an_endless_stdin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.cli.chat.LONGEST_PROMPT", 10)
    result = CliRunner().invoke(cli, ["chat", "-m", "x.gguf"], input="x" * 11)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "longer than any context" in result.stderr


def test_a_plot_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    class Figure:
        def savefig(self, file, **_options) -> None:
            file.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space") as caught:
        save_figure(Figure(), tmp_path / "plot.png")
    assert caught.value.filename == str(tmp_path / "plot.png")
    assert not list(tmp_path.iterdir())


def test_a_closed_stdout_is_one_sentence() -> None:
    result = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *FAKE, "chat", "-m", "x.gguf", "-p", "hello"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert result.returncode == 1
    assert result.stderr == "Error: stdout is closed: send it to a file, or to /dev/null\n"


def test_a_closed_stderr_loses_notes_alone() -> None:
    result = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *FAKE, "chat", "-m", "odd.gguf", "-p", "hello"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert (result.returncode, result.stdout) == (0, "Hi there!\n")


def test_files_do_not_get_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    code = (
        "import sys; from orchestrator.cli.main import hold_closed_streams; hold_closed_streams();"
        "sys.exit(open('file', 'w').fileno())"
    )
    command = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(fake_engine.ROOT)}
    assert subprocess.run(command, cwd=tmp_path, env=environment).returncode > 2
