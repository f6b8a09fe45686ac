"""The entry point of the command line, and the list of commands.

The module of a command is imported when the command runs, so that `--help` answers fast.
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
    """The place of a command's code: its module in this package, and its name in the module.

    help: the line about the command in the help.
    """

    module: str
    name: str
    help: str


# Key in a click context: how many faults of installed policies were printed.
_N_PRINTED = "moe-edge.faults"
# {heading of `moe-edge --help`: {command: its place}}
GROUPS = {
    "Use": {
        "chat": Where("chat", "chat", "Chat with a model."),
        "serve": Where("serve", "serve", "Serve a model over HTTP, with a web page."),
        "plan": Where(
            "plan", "plan", "Show which models can run here, or how one model would run."
        ),
        "check": Where("measure", "check", "Test a model: correctness, memory use and speed."),
        "doctor": Where("plan", "plan", "Alias of plan."),
    },
    "Models": {
        "pull": Where("files", "pull", "Download a model from the Hugging Face Hub."),
        "list": Where("files", "list_models", "List the downloaded models."),
        "rm": Where("files", "remove_models", "Delete downloaded models."),
        "cache": Where("files", "cache", "List or delete the files that moe-edge caches."),
        "inspect": Where("files", "inspect", "Show the contents of a model file."),
        "verify": Where("files", "verify", "Check a model file for damage."),
        "pack": Where("pack", "pack", "Store experts in several precisions in one file."),
        "calibrate": Where(
            "measure", "calibrate", "Measure the quality loss of each expert and precision."
        ),
        "convert": Where(
            "pack", "convert", "Convert a checkpoint to a GGUF with several precisions."
        ),
        "export": Where("pack", "export", "Export one precision of a packed file for llama.cpp."),
        "architectures": Where("files", "architectures", "List the tested architectures."),
    },
    "Research": {
        "bench": Where("measure", "bench", "Compare the speed of llama.cpp and of all policies."),
        "paper": Where("paper", "paper", "Repeat the measurements of a research paper."),
        "eval": Where("measure", "evaluate", "Measure quality: perplexity, KL, choices."),
        "trace": Where("replay", "trace", "Record the routing of a run, for `moe-edge replay`."),
        "replay": Where(
            "replay", "replay", "Replay a recorded run with another policy, memory or disk."
        ),
        "gpu-check": Where("measure", "gpu_check", "Test everything that needs a GPU."),
    },
}
COMMANDS = {name: where for commands in GROUPS.values() for name, where in commands.items()}


class Commands(Group):
    """The top-level command. It turns errors into one sentence and an exit status."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command, and return the command.

        The result is None for an unknown name.
        """
        if cmd_name not in COMMANDS:
            return None
        where = COMMANDS[cmd_name]
        found: click.Command = getattr(
            import_module(f"orchestrator.cli.{where.module}"), where.name
        )
        _print_faults(ctx)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, with one line for each, without importing their modules."""
        rows = {
            heading: [(name, where.help) for name, where in commands.items()]
            for heading, commands in GROUPS.items()
        }
        formatter.write(f"\n{explained(rows, formatter.width)}\n")

    def invoke(self, ctx: click.Context) -> Any:
        try:
            if sys.stdout is None:
                raise _sentence("stdout is closed: redirect it to a file or to /dev/null")
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


def _print_faults(ctx: click.Context) -> None:
    """Print a sentence to stderr about each installed policy that cannot be used.

    Each sentence is printed once.
    """
    policies = sys.modules.get("orchestrator.policy")
    if policies is not None:
        faults, n_printed = policies.POLICIES.faults, ctx.meta.get(_N_PRINTED, 0)
        ctx.meta[_N_PRINTED] = len(faults)
        for each in faults[n_printed:]:
            click.echo(strip_controls(f"Note: {each}"), err=True)


def _sentence(text: str) -> click.ClickException:
    """Return an error that click prints as one sentence.

    Control characters, for example of a file name, are removed.
    """
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
    """Return the version of the built llama.cpp and the CPU instruction set of its library.

    If llama.cpp was not built, return a sentence that says so.
    """
    from gguf_tools import built

    try:
        version = built.stamp().get("version", "of an unknown version")
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
    """Run Mixture-of-Experts models that are larger than memory.

    Experts stay on disk in several precisions and are loaded into RAM within a budget.
    """


def main() -> None:
    """Run the command `moe-edge`."""
    hold_closed_streams()
    cli(prog_name=cli.name)


def hold_closed_streams() -> None:
    """Open /dev/null as stdin, stdout or stderr if the process was started without this stream.

    Otherwise a file that is opened later could get the number of the closed stream, and output
    would be written to that file.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # uses the lowest free number
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")
