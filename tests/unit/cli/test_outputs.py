"""No command replaces an output that exists, unless it is told to."""

import os
import stat

import click
import pytest
from command_line import run

from gguf_tools import synthetic
from orchestrator.cli.main import COMMANDS, cli
from orchestrator.cli.options import NEW_FILE


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    return synthetic.write(path, "tiny-qwen3moe", tiers=("q4_k", "q2_k"))


# Arguments with IN for a model, TEXT for a text and OUT for an output.
CALLS = [
    "pack --tiers q2_k IN OUT",
    "export --tier q4_k IN OUT",
    "convert --tiers q2_k IN OUT",
    "inspect IN --plot OUT",
    "check -m IN --out OUT",
    "plan -m IN --plot OUT",
    "trace -m IN -p x --out OUT",
    "calibrate IN --calib TEXT --out OUT",
    "calibrate IN --calib TEXT --save-imatrix OUT",
]


@pytest.mark.parametrize("is_pipe", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_an_output_that_exists_is_kept(call, is_pipe, model, tmp_path):
    """A pipe is never replaced, by --force neither."""
    out, text = tmp_path / "out.png", tmp_path / "text.txt"
    text.write_text("some words")
    if is_pipe:
        os.mkfifo(out)
        words, said = [*call.split(), "--force"], "is not a regular file"
    else:
        out.write_text("mine")
        words, said = call.split(), "exists: choose another name, or replace it with --force"
    places = {"IN": str(model), "OUT": str(out), "TEXT": str(text)}
    result = run(*(places.get(word, word) for word in words))
    assert result.exit_code == 2
    assert f"{out} {said}" in result.stderr
    assert stat.S_ISFIFO(out.lstat().st_mode) if is_pipe else out.read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == [out, text]


def test_stdout_is_no_output(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("export", model, "-", "--tier", "q4_k", "--force")
    assert result.exit_code == 2 and "an output is a file, not stdout" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("before", [True, False])
def test_force_replaces_it(model, tmp_path, before):
    out = tmp_path / "out.gguf"
    out.write_text("old")
    words = ["--tier", "q4_k", str(model), str(out)]
    words.insert(0 if before else len(words), "--force")
    result = run("export", *words)
    assert result.exit_code == 0, result.output
    assert out.read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize(
    ("call", "table"),
    [
        ("calibrate IN --calib TEXT", "m.gguf.calib.json"),
        ("eval -m IN --text TEXT --study depth --out DIR", "depth.md"),
    ],
)
def test_a_table_is_kept(model, tmp_path, call, table):
    """That beside a model, and those of a study."""
    copy, text = tmp_path / "m.gguf", tmp_path / "text.txt"
    copy.symlink_to(model)
    text.write_text("some words")
    (tmp_path / table).write_text("mine")
    places = {"IN": str(copy), "DIR": str(tmp_path), "TEXT": str(text)}
    result = run(*(places.get(word, word) for word in call.split()))
    assert result.exit_code == 2 and f"{tmp_path / table} exists" in result.stderr


def test_every_command_with_an_output_has_force():
    with_output = set()
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        params = command.get_params(click.Context(command, help_option_names=[]))
        if any(param.type is NEW_FILE for param in params):
            with_output.add(command.name)  # doctor is plan
            assert any("--force" in param.opts for param in params), name
    assert with_output == {word.split()[0] for word in CALLS}
