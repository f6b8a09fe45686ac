"""The commands that write models: `moe-edge pack`, `export` and `convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gguf_tools.units import format_size
from orchestrator.chat.console import progress_bar
from orchestrator.cli.help import Command
from orchestrator.cli.options import (
    FILE,
    FORCE,
    NEW_FILE,
    THREADS,
    method_options,
    note,
    option,
    print_notes,
    quantizer,
    say,
    tier_names,
)

if TYPE_CHECKING:
    from gguf_tools.pack import PackReport


@click.command(cls=Command)
@click.argument("source", metavar="IN", type=FILE)
@click.argument("target", metavar="OUT", type=NEW_FILE)
@option(
    "--tiers LIST",
    "Precisions to store, best first, as q8_0,q4_k,q2_k.  [default: those for --for-ram]",
)
@option(
    "--for-ram SIZE",
    "In the place of --tiers: the precisions for a memory of this size, as 12GiB; by imatrix with "
    "--calib.",
)
@option(
    "--dense",
    "Also quantize the F16 and F32 matrices that are not experts.",
    type=click.Choice(["q8_0"]),
)
@method_options
@THREADS
@FORCE
def pack(
    source: Path, target: Path, tiers: str | None, for_ram: int | None, **options: Any
) -> None:
    """Write the experts of a GGUF in several precisions into one file."""
    if (tiers is None) == (for_ram is None):
        raise click.UsageError(
            "which precisions? Give --tiers LIST, or --for-ram SIZE for those that suit a memory"
        )
    names = _names_for(source, for_ram or 0) if tiers is None else tier_names(tiers)
    if for_ram is not None and options["method"] is None and options["calib"] is not None:
        options["method"] = "imatrix"
    _pack(source, target, names, "Packing", options)


def _pack(
    source: Path, target: Path, names: list[str], label: str, options: dict[str, Any]
) -> None:
    from gguf_tools.pack import pack as run

    more = {"dense": options["dense"], "threads": options["threads"]}
    with quantizer(source, options) as chosen, progress_bar(label) as progress:
        report = run(source, target, names, quantizer=chosen, progress=progress, **more)
    print_report(report)


def _names_for(source: Path, ram_bytes: int) -> list[str]:
    """The precisions for a memory; says which, and why."""
    from gguf_tools.experts import ExpertModel
    from orchestrator.memory.tiers_for import tiers_for

    with ExpertModel.open(source) as model:
        names, why = tiers_for(model, ram_bytes)
    print_notes([f"--tiers {','.join(names)}: {why}"])
    return names


@click.command(cls=Command)
@click.argument("source", metavar="IN", type=FILE)
@click.argument("target", metavar="OUT", type=NEW_FILE)
@option("--tier NAME", "The precision to keep, as q4_k.", required=True)
@option(
    "--keep-types", "Leave types as they are, also those that released llama.cpp does not read."
)
@FORCE
def export(source: Path, target: Path, tier: str, keep_types: bool) -> None:
    """Write one precision of a packed file as a GGUF for any llama.cpp.

    A type that only recent builds read (q2_0, of rows that are no multiple of 256) is written as an
    older one that holds the same numbers."""
    from gguf_tools.pack import export as run

    with progress_bar("Exporting") as progress:
        report = run(source, target, tier.lower(), older=not keep_types, progress=progress)
    print_report(report)


@click.command(cls=Command)
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="OUT", type=NEW_FILE)
@option("--tiers LIST", "Precisions to store, best first, as q8_0,q4_k,q2_k.", required=True)
@option(
    "--dense",
    "Type of the matrices that are not experts.  [default: the checkpoint's]",
    type=click.Choice(["f16", "bf16", "q8_0"]),
)
@option("--imatrix FILE", "Weigh the columns of experts by this importance matrix of llama.cpp.")
@option("--trust-remote-code", "Run code that the checkpoint brings for its tokenizer.")
@THREADS
@FORCE
def convert(source: str, target: Path, tiers: str, **options: Any) -> None:
    """Write the experts of a checkpoint in several precisions into one file.

    SRC is a folder of Hugging Face's transformers, or hf:OWNER/NAME[@REVISION]. A GGUF is packed
    as `moe-edge pack` does. Methods that read a text need a model that runs: convert to f16 first,
    then pack that.
    """
    from gguf_tools.convert import convert as run
    from gguf_tools.convert.converting import check_arguments
    from gguf_tools.hub import PREFIX, resolve_checkpoint

    names = tier_names(tiers)
    path, title = Path(source), None
    if source.startswith(PREFIX):
        # What can be refused shall be, before gigabytes are downloaded.
        check_arguments(target, names, options["imatrix"] is not None)
        path, title = resolve_checkpoint(source, note, lambda: progress_bar("Downloading"))
    if path.is_file() and path.suffix == ".gguf":
        _pack(path, target, names, "Converting", options)
        return
    with progress_bar("Converting") as progress:
        options |= {"title": title, "on_header": say_support, "progress": progress}
        report = run(path, target, names, **options)
    print_report(report)


def say_support(header: Path) -> None:
    """Says how a model of this header will run, before its weights are computed. Raises
    ConvertError where it will not."""
    from gguf_tools.errors import ConvertError
    from orchestrator.runtime.support import NOT, support_of

    found = support_of(header)
    if found is None or not found.reason:
        return
    if found.runs == NOT:
        raise ConvertError(f"what llama.cpp's converter makes of it cannot run: {found.reason}")
    note(f"Note: {found.sentence}")


def print_report(report: PackReport) -> None:
    """What was written on stdout, what is odd about it on stderr."""
    tiers = ", ".join(
        f"{name} {bpw:.2f} bits {format_size(nbytes)}" for name, bpw, nbytes in report.tiers
    )
    say(f"{report.path}: {format_size(report.nbytes)}, experts in {tiers}")
    print_notes((*report.fallbacks, *report.warnings))
