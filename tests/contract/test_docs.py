"""Docs are executed: what README and ARCHITECTURE name exists, and help blocks are current.

`python tests/contract/test_docs.py --write` rewrites the help blocks:

    <!-- help: moe-edge chat -->
    (generated)
    <!-- end help -->
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

REPO = Path(__file__).resolve().parents[2]
DOCS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "EXPERIMENTS.md", "CHANGELOG.md")
HELP = re.compile(r"<!-- help: moe-edge ?(.*?) -->\n(.*?)<!-- end help -->", re.DOTALL)
ROOMS = r"(?:gguf_tools|orchestrator|patches|models|tests|\.ci)"
HELP_WIDTH = 88


def text_of(name: str) -> str:
    path = REPO / name
    assert path.exists(), f"{name} is missing"
    return path.read_text()


def commands() -> click.Group:
    from orchestrator import cli

    return next(value for value in vars(cli).values() if isinstance(value, click.Group))


def help_block(words: str) -> str:
    arguments = [*words.split(), "--help"]
    runner = CliRunner()
    result = runner.invoke(
        commands(),
        arguments,
        prog_name="moe-edge",
        terminal_width=HELP_WIDTH,
        max_content_width=HELP_WIDTH,
    )
    if result.exit_code != 0:
        raise ValueError(f"moe-edge {' '.join(arguments)}: {result.output}")
    return f"```\n{result.output.rstrip()}\n```\n"


def code_of(text: str) -> list[str]:
    """Lines of fenced blocks and inline code spans, without the generated help blocks."""
    text = HELP.sub("", text)
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"(?:^    \S.*\n)+", text, re.MULTILINE)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line.strip() for line in [*lines, *re.findall(r"`([^`\n]+)`", rest)]]


def exists(pattern: str) -> bool:
    pattern = re.sub(r"\{[^}]*\}", "*", pattern.rstrip("/."))
    return any(True for _ in REPO.glob(pattern))


@pytest.mark.parametrize("name", DOCS)
def test_named_paths_exist(name: str) -> None:
    text = HELP.sub("", text_of(name))
    named = set(re.findall(rf"(?<![\w/.-]){ROOMS}/[\w./*{{}},-]*", text))
    named |= set(re.findall(r"(?<![\w/.-])[A-Z]{4,}\.md\b", text))
    named |= {link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) if "://" not in link}
    missing = sorted(path for path in named if not exists(path))
    assert not missing, f"{name} names {', '.join(missing)}"


def test_every_native_source_has_its_line() -> None:
    text = text_of("ARCHITECTURE.md")
    sources = sorted((REPO / "patches" / "native").glob("*.c*"))
    missing = [path.name for path in sources if f"`{path.name}`" not in text]
    assert sources and not missing, f"ARCHITECTURE.md does not name {', '.join(missing)}"


@pytest.mark.parametrize("name", DOCS)
def test_named_commands_exist(name: str) -> None:
    targets = re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE)
    for line in code_of(text_of(name)):
        for target in re.findall(r"^(?:\$ )?make ([a-z-]+)", line):
            assert target in targets, f"{name}: make {target}"
        for module in re.findall(r"python3? -m ([\w.]+)", line):
            assert importlib.util.find_spec(module), f"{name}: python -m {module}"
        for word in re.findall(r"patches/tool\.py ([a-z][a-z-]*)", line):
            done = subprocess.run(
                [sys.executable, "patches/tool.py", word, "--help"], cwd=REPO, capture_output=True
            )
            assert done.returncode == 0, f"{name}: patches/tool.py {word}"


def check_call(line: str) -> None:
    """Raises ValueError when a line calls moe-edge with a command or option that is not there."""
    line = line.removeprefix("$ ").split(" #")[0].split(" | ")[-1]
    words = shlex.split(line)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if not words or words[0] != "moe-edge" or len(words) < 2:
        return
    group = commands()
    if words[1].startswith("-"):
        command: click.Command = group
        rest = words[1:]
    elif words[1] in group.commands:
        command, rest = group.commands[words[1]], words[2:]
    else:
        raise ValueError(f"no command {words[1]!r}")
    if rest and isinstance(command, click.Group) and rest[0] in command.commands:
        command, rest = command.commands[rest[0]], rest[1:]
    known = {"--help"}
    for parameter in command.get_params(click.Context(command, help_option_names=[])):
        known.update(parameter.opts + parameter.secondary_opts)
    for word in rest:
        option = word.split("=")[0]
        if re.match(r"--?[A-Za-z]", option) and option not in known:
            raise ValueError(f"{command.name} has no {option}")


@pytest.mark.parametrize("name", DOCS)
def test_named_moe_edge_calls_exist(name: str) -> None:
    for line in code_of(text_of(name)):
        if re.match(r"(\$ )?([A-Z_]+=\S+ )*moe-edge( |$)", line) or "| moe-edge " in line:
            try:
                check_call(line)
            except ValueError as error:
                pytest.fail(f"{name}: {line}: {error}")


def test_calls_are_really_checked() -> None:
    check_call("$ moe-edge chat --help")
    for wrong in (
        "moe-edge chatter",
        "moe-edge chat --no-such 3",
        "moe-edge bench ablation --no-such",
    ):
        with pytest.raises(ValueError):
            check_call(wrong)


def test_help_blocks_are_current() -> None:
    blocks = HELP.findall(text_of("README.md"))
    assert blocks, "README.md has no help block"
    for words, block in blocks:
        assert block == help_block(words), (
            f"moe-edge {words}: run `python tests/contract/test_docs.py --write`"
        )


def test_help_runs_without_a_terminal() -> None:
    environment = {**os.environ, "TERM": "dumb", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "--help"],
        cwd=REPO,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "chat" in done.stdout


def write_help_blocks() -> None:
    path = REPO / "README.md"
    text = path.read_text()
    path.write_text(
        HELP.sub(
            lambda match: (
                f"<!-- help: moe-edge {match[1]} -->\n".replace("edge  -->", "edge -->")
                + help_block(match[1])
                + "<!-- end help -->"
            ),
            text,
        )
    )


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/contract/test_docs.py --write")
    write_help_blocks()
