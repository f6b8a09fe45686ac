"""The command line of `moe-edge pack` and `moe-edge export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gguf_tools import interrupts
from orchestrator import cli_files
from orchestrator.cli_files import FILE, FORCE, NEW_FILE, THREADS, TIERS
from orchestrator.cli_options import method_options, quantizer
from orchestrator.console import progress_bar


@click.command()
@click.argument("source", metavar="IN", type=FILE)
@click.argument("target", metavar="OUT", type=NEW_FILE)
@TIERS
@click.option(
    "--dense",
    type=click.Choice(["q8_0"]),
    help="Also quantize the F16 and F32 matrices that are not experts.",
)
@method_options
@THREADS
@FORCE
def pack(
    source: Path, target: Path, tiers: str, dense: str | None, threads: int | None, **options: Any
) -> None:
    """Write the experts of a GGUF in several precisions into one file."""
    from gguf_tools.pack import pack as run

    names = cli_files.tier_names(tiers)
    interrupts.ends_with(target)
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


@click.command()
@click.argument("source", metavar="IN", type=FILE)
@click.argument("target", metavar="OUT", type=NEW_FILE)
@click.option("--tier", required=True, metavar="TIER", help="The precision to keep, as q4_k.")
@click.option(
    "--keep-types",
    is_flag=True,
    help="Leave types as they are, also those that released llama.cpp does not read.",
)
@FORCE
def export(source: Path, target: Path, tier: str, keep_types: bool) -> None:
    """Write one precision of a packed file as a GGUF for any llama.cpp.

    A type that only recent builds read (q2_0, of rows that are no multiple of 256) is written as an
    older one that holds the same numbers."""
    from gguf_tools.pack import export as run

    interrupts.ends_with(target)
    with progress_bar("Exporting") as progress:
        report = run(source, target, tier.lower(), older=not keep_types, progress=progress)
    cli_files.print_report(report)
