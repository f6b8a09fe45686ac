"""The command line of what comes from elsewhere: `moe-edge convert`."""

from __future__ import annotations

from pathlib import Path

import click

from gguf_tools import interrupts
from orchestrator.chat.console import progress_bar
from orchestrator.cli.files import (
    FILE,
    FORCE,
    NEW_FILE,
    THREADS,
    TIERS,
    note,
    print_report,
    tier_names,
)
from orchestrator.cli.options import quantizer


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="OUT", type=NEW_FILE)
@TIERS
@click.option(
    "--dense",
    type=click.Choice(["f16", "bf16", "q8_0"]),
    help="Type of the matrices that are not experts.  [default: the checkpoint's]",
)
@click.option(
    "--imatrix",
    type=FILE,
    metavar="FILE",
    help="Weigh the columns of experts by this importance matrix of llama.cpp.",
)
@click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Run code that the checkpoint brings for its tokenizer.",
)
@THREADS
@FORCE
def convert(
    source: str,
    target: Path,
    tiers: str,
    dense: str | None,
    imatrix: Path | None,
    trust_remote_code: bool,
    threads: int | None,
) -> None:
    """Write the experts of a checkpoint in several precisions into one file.

    SRC is a folder of Hugging Face's transformers, or hf:OWNER/NAME[@REVISION]. A GGUF is packed
    as `moe-edge pack` does. Methods that read a text need a model that runs: convert to f16 first,
    then pack that.
    """
    from gguf_tools.convert import convert as run
    from gguf_tools.convert.converting import check_arguments
    from gguf_tools.hub import PREFIX, resolve_checkpoint
    from gguf_tools.pack import pack

    names = tier_names(tiers)
    interrupts.ends_with(target)
    path, title = Path(source), None
    if source.startswith(PREFIX):
        # What can be refused shall be, before gigabytes are downloaded.
        check_arguments(target, names, imatrix is not None)
        path, title = resolve_checkpoint(source, note, lambda: progress_bar("Downloading"))
    with progress_bar("Converting") as progress:
        if path.is_file() and path.suffix == ".gguf":
            with quantizer(path, threads, {"imatrix": imatrix}) as chosen:
                report = pack(
                    path,
                    target,
                    names,
                    dense=dense,
                    quantizer=chosen,
                    progress=progress,
                    threads=threads,
                )
        else:
            report = run(
                path,
                target,
                names,
                title=title,
                dense=dense,
                imatrix=imatrix,
                trust_remote_code=trust_remote_code,
                on_header=say_support,
                progress=progress,
                threads=threads,
            )
    print_report(report)


def say_support(header: Path, architecture: str) -> None:
    """Says how a model of this header will run, before its weights are computed. Raises
    ConvertError where it will not."""
    from gguf_tools.errors import ConvertError
    from orchestrator.engine.support import NOT, support_of

    found = support_of(header, architecture)
    if found is None or not found.reason:
        return
    if found.runs == NOT:
        raise ConvertError(f"what llama.cpp's converter makes of it cannot run: {found.reason}")
    note(f"Note: {found.sentence}")
