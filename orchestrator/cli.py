"""The command line: parse, build the config, call one function.

Everything heavy is imported inside the commands, so that --help answers at once.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import click

from orchestrator import (
    cli_bench,
    cli_calibrate,
    cli_convert,
    cli_doctor,
    cli_eval,
    cli_files,
    cli_replay,
)
from orchestrator.cli_files import FILE, THREADS, TIERS
from orchestrator.cli_options import (
    answer_options,
    make_config,
    method_options,
    model_options,
    open_engine,
    quantizer,
)
from orchestrator.console import Console, progress_bar, strip_controls
from orchestrator.errors import MoeEdgeError

# Characters: more than the largest context holds of any text.
LONGEST_PROMPT = 1 << 27


class Commands(click.Group):
    """The commands, and the edge where an error becomes one sentence and an exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            if sys.stdout is None:
                raise _sentence("stdout is closed: send it to a file, or to /dev/null")
            return super().invoke(ctx)
        except MoeEdgeError as error:
            raise _sentence(str(error)) from error
        except KeyboardInterrupt:
            ctx.exit(130)
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

    found = []
    for package in ("moe-edge", "llama_cpp_python"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} (not installed)")
    click.echo(", ".join(found))
    ctx.exit()


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


@cli.command()
@model_options
@answer_options
@click.option(
    "-p",
    "--prompt",
    metavar="TEXT",
    help="Answer this, print the answer alone, and exit. So does text on stdin.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="With a prompt: print one JSON object, the text and its statistics.",
)
def chat(prompt: str | None, as_json: bool, **options: Any) -> None:
    """Talk to a model."""
    from orchestrator.chat import Chat, Session, one_shot

    console = Console()
    if prompt is None and not console.in_tty:
        prompt = sys.stdin.read(LONGEST_PROMPT + 1) if sys.stdin else ""
        if len(prompt) > LONGEST_PROMPT:
            raise click.UsageError("the text on stdin is longer than any context")
        if not prompt.strip():
            raise click.UsageError("no prompt: give -p TEXT, or text on stdin, or a terminal")
    if prompt is None and as_json:
        raise click.UsageError("--json needs a prompt: give -p TEXT, or text on stdin")
    if prompt is not None and not prompt.strip():
        raise click.UsageError("the prompt is empty")
    config = make_config({**options, "remember": True})
    with open_engine(config, console) as engine:
        if options["ctx"] and engine.n_ctx < config.ctx:
            console.note(
                f"--ctx {config.ctx}: it gets {engine.n_ctx}, which the model was made for."
            )
        session = Session(engine, config)
        if prompt is None:
            Chat(session, console).run()
        elif not one_shot(session, console, prompt.strip(), as_json):
            raise KeyboardInterrupt


@cli.command(short_help="Write a GGUF's experts in several precisions into one file.")
@click.argument("source", metavar="IN", type=FILE)
@click.argument("target", metavar="OUT", type=FILE)
@TIERS
@click.option(
    "--dense",
    type=click.Choice(["q8_0"]),
    help="Also quantize the F16 and F32 matrices that are not experts.",
)
@method_options
@THREADS
def pack(
    source: Path, target: Path, tiers: str, dense: str | None, threads: int | None, **options: Any
) -> None:
    """Write the experts of a GGUF in several precisions into one file."""
    from gguf_tools.pack import pack as run

    names = cli_files.tier_names(tiers)
    with quantizer(source, threads, options) as chosen, progress_bar("Packing") as progress:
        report = run(
            source,
            target,
            names,
            dense=dense,
            quantizer=chosen,
            progress=progress,
            threads=threads,
        )
    cli_files.print_report(report)


@cli.command(short_help="Write one precision of a packed file, for any llama.cpp.")
@click.argument("source", metavar="IN", type=FILE)
@click.argument("target", metavar="OUT", type=FILE)
@click.option("--tier", required=True, metavar="TIER", help="The precision to keep, as q4_k.")
def export(source: Path, target: Path, tier: str) -> None:
    """Write one precision of a packed file as a GGUF for any llama.cpp."""
    from gguf_tools.pack import export as run

    with progress_bar("Exporting") as progress:
        report = run(source, target, tier.lower(), progress=progress)
    cli_files.print_report(report)


cli.add_command(cli_convert.convert)
cli.add_command(cli_files.inspect)
cli.add_command(cli_files.pull)
cli.add_command(cli_files.verify)
cli.add_command(cli_doctor.doctor)
cli.add_command(cli_bench.bench)
cli.add_command(cli_calibrate.calibrate)
cli.add_command(cli_eval.evaluate)
cli.add_command(cli_replay.trace)
cli.add_command(cli_replay.replay)


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
