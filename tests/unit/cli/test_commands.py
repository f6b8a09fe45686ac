"""Command lines and their output, run in this process or in a separate one."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import fake_runtime
import pytest
from command_line import python, run
from pictures import black
from tables import cases

from gguf_tools.experts import ExpertModel
from orchestrator.cli import options as module
from orchestrator.errors import MoeEdgeError
from orchestrator.lab.registry import BENCHMARKS, load
from orchestrator.lab.table import Report
from orchestrator.plan.records import PlanRequest


@pytest.fixture
def opened(monkeypatch):
    """Runtimes that the commands of this test open."""
    runtimes = []
    monkeypatch.setitem(sys.modules, "orchestrator.runtime.runtime", fake_runtime.module())
    real_open = fake_runtime.FakeRuntime.open

    def open_runtime(*args, **options):
        runtimes.append(real_open(*args, **options))
        return runtimes[-1]

    monkeypatch.setattr(fake_runtime.FakeRuntime, "open", open_runtime)
    return runtimes


NAMES = "lru, dymoe, dynaexq, firm, context, floor, mixed or plain"


# (arguments, stdin, exit status, stdout, part of stderr)
@cases(
    "args, stdin, status, stdout, stderr",
    (["-p", "hello"], None, 0, "Hi there!\n", ""),
    (["--prompt", " hello "], None, 0, "Hi there!\n", ""),
    ([], "hello\n", 0, "Hi there!\n", ""),
    (["-p", "what is it?"], "a text\n", 0, "<a text\n\nwhat is it?>\n", ""),
    (["-p", "hello"], " \n", 0, "Hi there!\n", ""),
    (["-p", "x", "--stop", ""], None, 2, "", "'--stop': must be a list of non-empty texts"),
    (["-p", "sampling", "--stop", "a", "--stop", "b"], None, 0, "0.7 ('a', 'b')\n", ""),
    (["-p", "hello", "--threads", "1000"], None, 0, "Hi there!\n", "1000 is capped at"),
    (["-p", "two\nlines"], None, 0, "<two\nlines>\n", ""),
    (["-p", "silence"], None, 0, "\n", ""),
    # A pipe gets the model's text unchanged.
    (["-p", "loud"], None, 0, fake_runtime.HOSTILE + "\n", ""),
    (["-p", "fail"], None, 1, "half an", "Error: model.gguf: read error at offset 4096\n"),
    (["-p", "fail", "--json"], None, 1, "", "Error: model.gguf: read error at offset 4096\n"),
    (
        [],
        "",
        2,
        "",
        "Error: there is no prompt: give -p TEXT or text on stdin, or use a terminal\n",
    ),
    (["-p", " "], None, 2, "", "Error: the prompt is empty\n"),
    (["-p", "x", "--ram", "much"], None, 2, "", "'much' is not a size: write 6GiB"),
    (["-p", "x", "--ram", "5"], None, 2, "", "the size '5' has no unit: write 5GiB"),
    ([], "\ufeffhello\n", 0, "Hi there!\n", ""),
    (["-p", "caf\udce9"], None, 2, "", "the prompt of -p is not UTF-8"),
    (["-p", "x", "--ctx", "many"], None, 2, "", "not a valid int"),
    (["-p", "x", "--ram", "9" * 30], None, 2, "", "larger than the memory of any machine"),
    (["-p", "x", "--retention", "2"], None, 2, "", "'--retention': must be 0.0 to 1.0, not 2.0"),
    (["-p", "x", "--max-tokens", "0"], None, 2, "", "'--max-tokens': must be 1 to"),
    (["-p", "x", "--low", ""], None, 2, "", "'--low': the name is empty"),
    (["-p", "x", "--policy", "lur"], None, 2, "", f"'--policy': must be {NAMES}, not 'lur'"),
    (["-p", "x", "--nonsense"], None, 2, "", "No such option"),
    (["-p", "x", "extra"], None, 2, "", "the model is given twice, as extra and -m x.gguf"),
)
def test_one_answer(opened, args, stdin, status, stdout, stderr):
    result = run("chat", "-m", "x.gguf", *args, stdin=stdin)
    assert (result.exit_code, result.stdout) == (status, stdout)
    if stderr:
        assert stderr in result.stderr
    else:
        assert result.stderr == ""
    assert all(each.closed for each in opened)


def test_a_prompt_with_images(opened, tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(black())
    both = ("--image", tmp_path / "a.png", "--image", tmp_path / "b.png")
    result = run("chat", "-m", "x.gguf", "-p", "shown", *map(str, both))
    assert (result.exit_code, result.stdout) == (0, "I see 2 images\n")
    result = run("chat", "-m", "blind.gguf", "-p", "shown", *map(str, both))
    assert result.exit_code == 1 and "this model reads text only" in result.stderr
    n_opened = len(opened)
    (tmp_path / "a.gif").write_bytes(b"GIF89a")
    for name, says in (("a.gif", "this is a GIF image"), ("gone.png", "No such file")):
        result = run("chat", "-m", "x.gguf", "-p", "shown", "--image", str(tmp_path / name))
        assert result.exit_code == 1 and says in result.stderr
    assert len(opened) == n_opened  # they are found before the model is loaded


ON_ONE_MODEL = {
    "chat": ("-p", "x"),
    "serve": (),
    "plan": (),
    "doctor": (),
    "check": (),
    "eval": ("--text", __file__),
    "trace": ("-p", "x", "--out", "t.npz"),
    "inspect": (),
    "verify": (),
    "calibrate": ("--calib", __file__),
}


@pytest.mark.parametrize("command", ON_ONE_MODEL)
def test_a_model_is_an_argument_or_an_option(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = command, *ON_ONE_MODEL[command]
    said = [run(*words, *named) for named in (["no.gguf"], ["-m", "no.gguf"])]
    assert {each.exit_code for each in said} == {1}
    assert len({each.output.splitlines()[-1] for each in said}) == 1
    assert "no.gguf" in said[0].output
    twice = run(*words, "no.gguf", "-m", "other.gguf")
    assert twice.exit_code == 2 and "the model is given twice" in twice.stderr


def test_plan_and_check_use_the_configuration_of_chat(monkeypatch):
    asked = []

    def takes(given, *_args, **_options):
        asked.append(given.config if isinstance(given, PlanRequest) else given)
        raise MoeEdgeError("seen")

    for name in ("cli.chat.open_runtime", "cli.machine.examine", "lab.check.examine"):
        monkeypatch.setattr(f"orchestrator.{name}", takes)
    monkeypatch.setattr(ExpertModel, "open", lambda *_: nullcontext())
    for command in (["chat", "-p", "x"], ["plan"], ["doctor"], ["check"]):
        assert run(*command, "-m", "x.gguf", "--ram", "120MB").stderr.endswith("Error: seen\n")
    first, *others = asked
    assert len(others) == 3 and all(each == first for each in others)


def test_options_reach_the_config(opened):
    """Options that are not given keep the configuration's defaults."""
    options = {
        "low": ("b.gguf", Path("b.gguf")),
        "ram": ("6GiB", 6 * 2**30),
        "policy": ("dymoe", "dymoe"),
        "retention": ("0.5", 0.5),
        "ctx": ("1024", 1024),
        "temp": ("0", 0.0),
        "system": ("Be brief.", "Be brief."),
        "profile": ("hot.json", Path("hot.json")),
    }
    for given in ({}, options):
        words = [
            word
            for name, (text, _) in given.items()
            for word in (f"--{name.replace('_', '-')}", text)
        ]
        assert run("chat", "-m", "a.gguf", "-p", "x", *words).exit_code == 0
        values = {name: value for name, (_, value) in given.items()}
        config = module.Config.build(model=Path("a.gguf"), remember=True, **values)
        assert opened[-1].config == config
    assert opened[-1].seen[0][0] == {"role": "system", "content": "Be brief."}


def test_a_note_of_the_runtime_is_shown(opened):
    result = run("chat", "-m", "odd.gguf", "-p", "x")
    assert result.exit_code == 0
    assert "The expert usage of earlier runs is not used" in result.stderr
    assert result.stdout == "<x>\n"


def test_json_is_one_object(opened):
    result = run("chat", "-m", "x.gguf", "-p", "hello", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    assert list(answer) == ["text", "stats"]
    assert answer["text"] == "Hi there!"
    assert answer["stats"] == fake_runtime.STATS.as_dict()


THINKS = json.dumps({"chat_template_kwargs": {"enable_thinking": True}})
KEEPS = json.dumps(
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}}
)


@cases(
    "options, file, stdout",
    (["-p", "asked"], "", "{}"),
    (["-p", "asked", "--think", "on"], "", THINKS),
    (["-p", "asked", "--repeat-penalty", "1.5"], "", '{"repeat_penalty": 1.5}'),
    (["-p", "asked", "--schema", "f"], '{"type": "object"}', KEEPS),
    (["-p", "asked", "--grammar", "f"], 'root ::= "yes"', r'{"grammar": "root ::= \"yes\""}'),
    # Reasoning is not part of the answer.
    (["-p", "think"], "", "It is."),
)
def test_options_reach_the_request(opened, tmp_path, monkeypatch, options, file, stdout):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").write_text(file)
    result = run("chat", "-m", "x.gguf", *options)
    assert (result.exit_code, result.stdout) == (0, stdout + "\n")


def test_json_has_the_reasoning(opened):
    answer = json.loads(run("chat", "-m", "x.gguf", "-p", "think", "--json").stdout)
    assert (answer["text"], answer["thinking"]) == ("It is.", "Is it so?")


@cases(
    "options, file, said",
    (["-p", "x", "--schema", "f"], "{", "--schema f: the file is not JSON"),
    (["-p", "x", "--schema", "f"], "[]", "--schema f: a JSON schema must be an object"),
    (["-p", "x", "--schema", "f", "--grammar", "f"], "{}", "give only one"),
    (["-p", "x", "--schema", "f"], '{"properties": {"a": {"$ref": "#/b"}}}', "--schema f: "),
    (["-p", "x", "--grammar", "none"], "", "none"),
    (["-p", "x", "--grammar", "f"], 'root ::= "yes', "--grammar f: the grammar is refused"),
)
def test_a_constraint_that_is_wrong_is_refused_before_the_model_loads(
    opened, tmp_path, monkeypatch, options, file, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").write_text(file)
    result = run("chat", "-m", "x.gguf", *options)
    assert result.exit_code != 0 and said in result.stderr and opened == []


def test_the_default_model_is_the_demo(opened, monkeypatch, tmp_path):
    package = tmp_path / "site/orchestrator/cli/options.py"
    monkeypatch.setattr(module, "__file__", str(package))
    monkeypatch.chdir(tmp_path)
    result = run("chat", "-p", "hello")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "models/demo/moe-edge-demo.gguf" in result.stderr
    assert "-m FILE.gguf" in result.stderr
    for folder in (tmp_path, tmp_path / "site"):
        demo = folder / "models/demo/moe-edge-demo.gguf"
        demo.parent.mkdir(parents=True)
        demo.touch()
        assert run("chat", "-p", "hello").exit_code == 0
        assert opened[-1].config.model == demo


@pytest.mark.parametrize(
    "words",
    [
        ("chat", "-p", "hello", "--max-tokens=1"),
        ("trace", "-p", "hello", "--tokens=1", "--out=t.npz"),
        ("eval", "--text=text.txt", "--max-tokens=16"),
        ("check", "--tokens=1", "--no-verify"),
        ("plan", "--policy=lru"),
    ],
)
def test_a_context_beyond_the_model_is_noted(words, library, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("A text that is read. " * 20)
    done = run(*words, "-m", module.demo_model(), "--ctx=5000")
    assert done.exit_code == 0, done.output
    assert "--ctx 5000 is reduced to the model's training context, 1024 tokens." in done.output


def test_a_context_that_is_rounded_up_is_noted(opened, monkeypatch):
    real = fake_runtime.FakeRuntime.__init__

    def short(runtime, config):
        real(runtime, config)
        runtime.about.n_ctx = 256

    monkeypatch.setattr(fake_runtime.FakeRuntime, "__init__", short)
    for asked, said in (
        (["--ctx", "8"], "--ctx 8 is rounded up to 256."),
        (["--ctx", "256"], ""),
        ([], ""),
    ):
        shown = run("chat", "-m", "x.gguf", "-p", "x", *asked).stderr
        assert said in shown and bool(said) == bool(shown)


def test_help_imports_nothing_heavy():
    code = (
        "import sys, orchestrator.cli.main; "
        "heavy = ('numpy', 'llama_cpp', 'jinja2', 'torch', 'huggingface_hub', 'orchestrator.lab'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    assert python("-c", code).stdout == "[]\n"


@pytest.mark.parametrize("name", ["none.gguf", "no\x1b[2Jfile\x9b.gguf"])
def test_an_error_is_one_sentence_and_cannot_control_the_terminal(tmp_path, name):
    result = run("inspect", str(tmp_path / name))
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert name.replace("\x1b", "").replace("\x9b", "") in result.stderr


BELOW = [name for name in BENCHMARKS if name]


@pytest.fixture
def measured(monkeypatch):
    """Function that replaces a benchmark's run and returns the list of options it was called
    with."""

    def replace(name):
        seen, benchmark = [], type(load(name))
        report = Report(["heading"], [], [])
        monkeypatch.setattr(
            benchmark, "run", lambda self, options, note: seen.append(options) or report
        )
        return seen

    return replace


@cases(
    "name, args, options",
    (
        "",
        ["--caps", "50", "--routing", "zipf", "--quick", "--tokens", "9"],
        {"caps": (0.5,), "routing": "zipf", "quick": True, "tokens": 9},
    ),
    *[
        (name, ["--shape", "demo", "--threads", "1"], {"shape": "demo", "threads": 1})
        for name in BELOW
    ],
)
def test_a_benchmark_gets_its_options(measured, name, args, options):
    seen = measured(name)
    result = run("bench", *name.split(), *args)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "heading\n"
    assert seen == [load(name).options(**options)]
    found = json.loads(run("bench", *name.split(), "--json").stdout)
    assert found == {"heading": ["heading"], "tables": [], "notes": []}
