"""The command line of `moe-edge pack` and `moe-edge export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gguf_tools import interrupts
from orchestrator.chat.console import progress_bar
from orchestrator.cli import files as cli_files
from orchestrator.cli.files import FILE, FORCE, NEW_FILE, THREADS, print_notes
from orchestrator.cli.options import method_options, quantizer, size


@click.command()
@click.argument("source", metavar="IN", type=FILE)
@click.argument("target", metavar="OUT", type=NEW_FILE)
@click.option(
    "--tiers",
    metavar="LIST",
    help="Precisions to store, best first, as q8_0,q4_k,q2_k.  [default: those for --for-ram]",
)
@click.option(
    "--for-ram",
    metavar="SIZE",
    callback=size,
    help="In the place of --tiers: the precisions for a memory of this size, as 12GiB; by imatrix "
    "with --calib.",
)
@click.option(
    "--dense",
    type=click.Choice(["q8_0"]),
    help="Also quantize the F16 and F32 matrices that are not experts.",
)
@method_options
@THREADS
@FORCE
def pack(
    source: Path,
    target: Path,
    tiers: str | None,
    for_ram: int | None,
    dense: str | None,
    threads: int | None,
    **options: Any,
) -> None:
    """Write the experts of a GGUF in several precisions into one file."""
    from gguf_tools.pack import pack as run

    if (tiers is None) == (for_ram is None):
        raise click.UsageError(
            "which precisions? Give --tiers LIST, or --for-ram SIZE for those that suit a memory"
        )
    names = _names_for(source, for_ram or 0) if tiers is None else cli_files.tier_names(tiers)
    if for_ram is not None and options["method"] is None and options["calib"] is not None:
        options["method"] = "imatrix"
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


def _names_for(source: Path, ram_bytes: int) -> list[str]:
    """The precisions for a memory; says which, and why."""
    from gguf_tools.experts import ExpertModel
    from orchestrator.memory.tiers_for import tiers_for

    with ExpertModel.open(source) as model:
        names, why = tiers_for(model, ram_bytes)
    print_notes([f"--tiers {','.join(names)}: {why}"])
    return names


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
