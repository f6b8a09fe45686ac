"""The command line: parse, build the config, call one function.

A command is imported when it runs, and what it needs inside of it, so that --help answers at once.
"""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from typing import Any, NamedTuple

import click

from gguf_tools import interrupts
from gguf_tools.columns import explained
from orchestrator.chat.console import strip_controls
from orchestrator.cli.help import Group
from orchestrator.errors import MoeEdgeError


class Where(NamedTuple):
    """Where a command is: a module of this package, and its name there; and what it does."""

    module: str
    name: str
    help: str


# By what they are for, as `moe-edge --help` lists them.
GROUPS = {
    "Use": {
        "chat": Where("chat", "chat", "Talk to a model."),
        "serve": Where("serve", "serve", "Answer other programs over HTTP, and on a page."),
        "plan": Where(
            "plan", "plan", "Show what this machine can run, or what one model can be here."
        ),
        "check": Where("measure", "check", "Try a model: its bits, its memory and its speed."),
        "doctor": Where("plan", "plan", "Another name of plan."),
    },
    "Models": {
        "pull": Where("files", "pull", "Download a model from the Hugging Face Hub."),
        "list": Where("files", "list_models", "List the models that were pulled."),
        "rm": Where("files", "remove_models", "Remove models that were pulled."),
        "cache": Where("files", "cache", "List or delete what lies in the user cache."),
        "inspect": Where("files", "inspect", "Show what a file holds, and what fits which budget."),
        "verify": Where("files", "verify", "Check every block of a model file, and its metadata."),
        "pack": Where("pack", "pack", "Write experts in several precisions into one file."),
        "calibrate": Where("measure", "calibrate", "Measure what experts lose in each precision."),
        "convert": Where("pack", "convert", "Make a packed file of a checkpoint of transformers."),
        "export": Where("pack", "export", "Write one precision of a packed file, for llama.cpp."),
        "architectures": Where("files", "architectures", "List the architectures that are tested."),
    },
    "Research": {
        "bench": Where("measure", "bench", "Measure upstream and every policy on this machine."),
        "eval": Where("measure", "evaluate", "Measure quality: perplexity, KL, choices; studies."),
        "trace": Where("replay", "trace", "Record the routing of a run, for `moe-edge replay`."),
        "replay": Where("replay", "replay", "Play a trace with another policy, memory or disk."),
        "gpu-check": Where("measure", "gpu_check", "Try all that needs a GPU, with a report."),
    },
}
COMMANDS = {name: where for commands in GROUPS.values() for name, where in commands.items()}


class Commands(Group):
    """The commands, and the edge where an error becomes one sentence and an exit status."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported when it is asked for."""
        if cmd_name not in COMMANDS:
            return None
        where = COMMANDS[cmd_name]
        found: click.Command = getattr(
            import_module(f"orchestrator.cli.{where.module}"), where.name
        )
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing one."""
        rows = {
            heading: [(name, where.help) for name, where in commands.items()]
            for heading, commands in GROUPS.items()
        }
        formatter.write(f"\n{explained(rows, formatter.width)}\n")

    def invoke(self, ctx: click.Context) -> Any:
        try:
            if sys.stdout is None:
                raise _sentence("stdout is closed: send it to a file, or to /dev/null")
            with interrupts.listening():
                return super().invoke(ctx)
        except MoeEdgeError as error:
            raise _sentence(str(error)) from error
        except KeyboardInterrupt:
            ctx.exit(interrupts.STATUS)
        except OSError as error:
            if error.errno == errno.EPIPE or not error.strerror:
                raise
            where = f"{error.filename}: " if error.filename else ""
            raise _sentence(f"{where}{error.strerror}") from error


def _sentence(text: str) -> click.ClickException:
    """An error for the user; what a file or its name smuggled into it stays harmless."""
    return click.ClickException(strip_controls(text))


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = f"moe-edge {version('moe-edge')}"
    except PackageNotFoundError:
        found = "moe-edge (not installed)"
    click.echo(f"{found}, {_llama_version()}")
    ctx.exit()


def _llama_version() -> str:
    """The version of the built llama.cpp, and the set of instructions that computes."""
    from gguf_tools import built

    try:
        version = built.stamp().get("version", "of another make")
        return f"llama_cpp_python {version} ({built.instruction_set()})"
    except built.NotBuilt as error:
        return str(error)


@click.group(
    name="moe-edge",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the versions and exit.",
)
def cli() -> None:
    """Run Mixture-of-Experts models that do not fit the memory: experts stay on
    disk in several precisions, and come into RAM within a budget."""


def main() -> None:
    """The entry point `moe-edge`."""
    hold_closed_streams()
    cli(prog_name=cli.name)


def hold_closed_streams() -> None:
    """Makes stdin, stdout and stderr of a process that was started without them /dev/null, so
    that no file which is opened later gets their number, and what is written there."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")
