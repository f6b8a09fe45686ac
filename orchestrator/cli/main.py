"""The command line: parse, build the config, call one function.

A command is imported when it runs, and what it needs inside of it, so that --help answers at once.
"""

from __future__ import annotations

import difflib
import errno
import os
import sys
from importlib import import_module
from typing import Any, NamedTuple

import click

from gguf_tools import interrupts
from orchestrator.chat.console import strip_controls
from orchestrator.errors import MoeEdgeError


class Where(NamedTuple):
    """Where a command is: a module of this package, and its name there; and what it does."""

    module: str
    name: str
    help: str


COMMANDS = {
    "chat": Where("chat", "chat", "Talk to a model."),
    "serve": Where("serve", "serve", "Answer other programs over HTTP."),
    "inspect": Where(
        "files", "inspect", "Show what a model file holds, and what fits which budget."
    ),
    "pull": Where("files", "pull", "Download a model from the Hugging Face Hub."),
    "architectures": Where(
        "files", "architectures", "List the architectures whose managed experts are tested."
    ),
    "list": Where("files", "list_models", "List the models that were pulled."),
    "rm": Where("files", "remove_models", "Remove models that were pulled."),
    "cache": Where("files", "cache", "List or delete what lies in the user cache."),
    "pack": Where("pack", "pack", "Write a GGUF's experts in several precisions into one file."),
    "export": Where("pack", "export", "Write one precision of a packed file, for any llama.cpp."),
    "convert": Where("pack", "convert", "Make a packed file of a checkpoint of transformers."),
    "verify": Where("files", "verify", "Check every block of a model file, and its metadata."),
    "check": Where(
        "measure", "check", "Try a model: its bits, its memory and its speed, as one report."
    ),
    "calibrate": Where("measure", "calibrate", "Measure what each expert loses in each precision."),
    "doctor": Where("plan", "plan", "Another name of plan."),
    "plan": Where("plan", "plan", "Show what this machine can run, or what one model can be here."),
    "bench": Where("measure", "bench", "Measure upstream and every policy on this machine."),
    "eval": Where("measure", "evaluate", "Measure quality: perplexity, KL divergence, choices."),
    "trace": Where("replay", "trace", "Record the routing of a run, for `moe-edge replay`."),
    "replay": Where("replay", "replay", "Play a trace with another policy, memory or disk."),
}


class Commands(click.Group):
    """The commands, and the edge where an error becomes one sentence and an exit status."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported when it is asked for."""
        if cmd_name not in COMMANDS:
            return None
        where = COMMANDS[cmd_name]
        found: click.Command = getattr(
            import_module(f"orchestrator.cli.{where.module}"), where.name
        )
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, with the nearest name where there is no such command."""
        near = difflib.get_close_matches(args[0], COMMANDS, 1)
        if near and args[0] not in COMMANDS and not ctx.resilient_parsing:
            ctx.fail(f"No such command '{args[0]}': did you mean {near[0]}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing one."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].help) for name in self.list_commands(ctx)])

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
        return f"llama_cpp_python {version} ({built.instructions()})"
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
