"""Wrong command lines: each gets one sentence and leaves no files. Existing outputs are replaced
only with --force."""

import errno
import os
import shlex
import stat
import subprocess
import sys

import click
import fake_runtime
import pytest
from command_line import DEMO, MOE_EDGE, python, run
from tables import cases

from gguf_tools import synthetic
from orchestrator.cli.main import COMMANDS, cli
from orchestrator.cli.options import NEW_FILE

FAKE = [sys.executable, fake_runtime.__file__]


def refused(*args):
    """Run a command that must fail with a single sentence, and return it."""
    result = run(*args)
    assert result.exit_code in (1, 2), result.output
    assert result.stdout == ""
    sentence = result.stderr.splitlines()[-1]
    assert sentence.startswith("Error: ")
    return sentence


LRU = "--policy lru, which runs one precision"
EITHER = "give either --text FILE or -p TEXT"


@cases(
    "words, said",
    *[
        (f"replay T.npz {option} {number}", f"'{option}'")
        for option in ("--retention", "--compute-ms")
        for number in ("nan", "-1", "1e30")
    ],
    *[
        (f"chat -m {DEMO} -p x --policy lru {flag} {value}", f"{flag} has no effect with {LRU}")
        for flag, value in (("--schedule", "flat"), ("--prefetch", "on"))
    ],
    ("chat -m https://huggingface.co/a/b -p x", "hf:OWNER/NAME"),
    ("pack in out --tiers q4_k --calib-tokens 5", "--calib-tokens needs a text"),
    ("calibrate in --calib T --save-imatrix M --out T.json", "which writes no loss table"),
    ("calibrate in --calib T --save-imatrix M --method rtn", "which writes no loss table"),
    # A trained model has its own routing.
    ("bench --shape demo --routing uniform", "--routing has no effect with --shape demo"),
)
def test_options_without_effect_are_refused(words, said):
    assert said in refused(*words.split())


@cases(
    "words, said",
    ("bench --caps much", "'--caps': 'much' is not a list of percentages"),
    ("bench --runs 3 paired", "--runs must follow the subcommand"),
    ("bench --threads 0", "'--threads': must be 1 or more, not 0"),
    ("bench --retention 1.5", "'--retention': must be 0.0 to 1.0, not 1.5"),
    ("pack --tiers q4_k --threads 0 a.gguf b.gguf", "0 is not in the range x>=1"),
    ("pack --tiers= a.gguf b.gguf", "--tiers is empty: give precisions, such as q8_0,q4_k,q2_k"),
    ("pack --tiers , a.gguf b.gguf", "--tiers is empty"),
    ("trace --out t.npz", EITHER),
    ("trace --out t.npz -p x --text y", EITHER),
    ("trace --out t.npz -p x --prefill 3", "--prefill is for --text"),
    ("trace -p x", "Missing option '--out'"),
    ("trace --out t.npz -p ' '", "the prompt is empty"),
    ("trace --out t.npz -p x --tokens 0", "is not in the range"),
    ("replay", "Missing argument 'FILE'"),
    ("replay t.npz --io-threads 0", "'--io-threads': must be 1 to 64, not 0"),
    ("replay t.npz --bandwidth fast", "'fast' is not a size"),
    ("replay t.npz --prefetch maybe", "'--prefetch': must be auto, on or off"),
    ("replay t.npz --policy lur", "'--policy': must be lru, dymoe,"),
    ("replay t.npz --link stopped", "'--link': must be shared or rigid"),
    ("replay t.npz --transition-rate 00", "must be more than zero"),
    ("chta", "did you mean chat?"),
    ("bench piared", "did you mean paired?"),
    ("chat --rma 8GiB", "--ram"),
)
def test_wrong_command_lines_are_refused(words, said):
    result = run(*shlex.split(words))
    assert (result.exit_code, result.stdout) == (2, "") and said in result.stderr


def test_a_folder_is_no_model(tmp_path):
    assert "give the path of a GGUF file in this folder" in refused(
        "chat", "-m", str(tmp_path), "-p", "x"
    )
    (tmp_path / "config.json").touch()
    assert "moe-edge convert" in refused("chat", "-m", str(tmp_path), "-p", "x")


@pytest.mark.parametrize("command", ["inspect", "verify", "replay"])
def test_a_pipe_without_a_writer_is_no_file(tmp_path, command):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = python(*MOE_EDGE, command, pipe)
    assert result.returncode == 1
    assert str(pipe) in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


@cases(
    "args, name, why",
    ("calibrate in.gguf --calib T.txt --out", "", "Is a directory"),
    ("calibrate in.gguf --calib T.txt --out", "a/b", "No such file or directory"),
    ("chat -m x.gguf -p x --policy dynaexq --profile", "", "Is a directory"),
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path, args, name, why):
    assert refused(*args.split(), str(tmp_path / name)) == f"Error: {tmp_path / name}: {why}"
    assert not list(tmp_path.iterdir())


def test_an_unwritable_table_next_to_a_model_suggests_out(tmp_path, monkeypatch):
    def read_only(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("orchestrator.cache.files.check_target", read_only)
    said = refused("calibrate", DEMO.with_name("other.gguf"), "--calib", __file__)
    assert said.endswith(
        "other.gguf.calib.json cannot be written: Read-only file system. Run `moe-edge calibrate "
        f"-m {DEMO.with_name('other.gguf')}` with --out FILE, and then the model with --losses FILE"
    )
    named = refused("calibrate", DEMO, "--calib", __file__, "--out", tmp_path / "t.json")
    assert named == f"Error: {tmp_path / 't.json'}: Read-only file system"


def test_an_endless_stdin_is_refused(monkeypatch):
    monkeypatch.setattr("orchestrator.cli.chat.LONGEST_PROMPT", 10)
    result = run("chat", "-m", "x.gguf", stdin="x" * 11)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no context can hold it" in result.stderr


@cases(
    "data, status, stdout, said",
    ("hello".encode("utf-8-sig"), 0, "Hi there!\n", ""),
    ("hello".encode("utf-16"), 1, "", "Error: stdin: the text is in UTF-16: save it as UTF-8"),
    (b"h\xf6llo", 1, "", "Error: stdin: not UTF-8 text (byte 0xf6 at offset 1)"),
)
def test_stdin_is_utf8(data, status, stdout, said):
    result = subprocess.run([*FAKE, "chat", "-m", "odd.gguf"], input=data, capture_output=True)
    assert (result.returncode, result.stdout.decode()) == (status, stdout)
    assert said in result.stderr.decode() and "Traceback" not in result.stderr.decode()


TEMPLATES = {
    "Latin-1": (
        lambda path: path.write_bytes(b"{{ 'w\xf6' }}"),
        "not UTF-8 text (byte 0xf6 at offset 5)",
    ),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "a pipe": (os.mkfifo, "not a regular file"),
    "nothing in it": (lambda path: path.touch(), "the file is empty"),
    "too long": (lambda path: path.write_text("x" * (1 << 20)), "maximum of 524,288 bytes"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_that_is_no_text_is_refused_before_the_model_is_loaded(tmp_path, name):
    make, said = TEMPLATES[name]
    path = tmp_path / "chat.jinja"
    make(path)
    result = run("serve", "-m", DEMO, "--chat-template", path)
    assert result.exit_code in (1, 2)
    assert str(path) in result.stderr and said in result.stderr


@cases(
    "closing, model, status, stdout, stderr",
    (">&-", "x.gguf", 1, "", "Error: stdout is closed: redirect it to a file or to /dev/null\n"),
    ("2>&-", "odd.gguf", 0, "Hi there!\n", ""),  # only notes are lost
)
def test_a_closed_stream(closing, model, status, stdout, stderr):
    command = ["sh", "-c", f'exec "$@" {closing}', "sh", *FAKE, "chat", "-m", model, "-p", "hello"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (status, stdout, stderr)


def test_files_do_not_get_the_number_of_a_closed_stream(tmp_path):
    code = (
        "import sys; from orchestrator.cli.main import hold_closed_streams; hold_closed_streams();"
        "sys.exit(open('file', 'w').fileno())"
    )
    command = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(fake_runtime.ROOT)}
    assert subprocess.run(command, cwd=tmp_path, env=environment).returncode > 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    return synthetic.write(path, "tiny-qwen3moe", tiers=("q4_k", "q2_k"))


# Arguments. IN is a model, TEXT a text file, and OUT an output.
CALLS = (
    *("pack --tiers q2_k IN OUT", "export --tier q4_k IN OUT", "convert --tiers q2_k IN OUT"),
    *("inspect IN --plot OUT", "check -m IN --out OUT", "plan -m IN --plot OUT"),
    *("trace -m IN -p x --out OUT", "calibrate IN --calib TEXT --out OUT"),
    "calibrate IN --calib TEXT --save-imatrix OUT",
)


@pytest.mark.parametrize("is_pipe", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_an_output_that_exists_is_kept(call, is_pipe, model, tmp_path):
    """An existing file is kept without --force. A pipe is kept even with --force."""
    out, text = tmp_path / "out.png", tmp_path / "text.txt"
    text.write_text("some words")
    if is_pipe:
        os.mkfifo(out)
        words, said = [*call.split(), "--force"], "is not a regular file"
    else:
        out.write_text("mine")
        words, said = call.split(), "exists: choose another name, or give --force to replace it"
    places = {"IN": str(model), "OUT": str(out), "TEXT": str(text)}
    result = run(*(places.get(word, word) for word in words))
    assert result.exit_code == 2
    assert f"{out} {said}" in result.stderr
    assert stat.S_ISFIFO(out.lstat().st_mode) if is_pipe else out.read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == [out, text]


def test_stdout_is_no_output(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("export", model, "-", "--tier", "q4_k", "--force")
    assert result.exit_code == 2 and "an output must be a file, not stdout" in result.stderr
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


def test_a_table_is_kept(model, tmp_path):
    """An existing loss table next to a model is not overwritten."""
    table = "m.gguf.calib.json"
    copy, text = tmp_path / "m.gguf", tmp_path / "text.txt"
    copy.symlink_to(model)
    text.write_text("some words")
    (tmp_path / table).write_text("mine")
    result = run("calibrate", str(copy), "--calib", str(text))
    assert result.exit_code == 2 and f"{tmp_path / table} exists" in result.stderr


def test_every_command_with_an_output_has_force():
    with_output = set()
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        params = command.get_params(click.Context(command, help_option_names=[]))
        if any(param.type is NEW_FILE for param in params):
            with_output.add(command.name)  # doctor is an alias of plan
            assert any("--force" in param.opts for param in params), name
    assert with_output == {word.split()[0] for word in CALLS}
