"""Commands that write models: `moe-edge pack`, `export` and `convert`."""

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
    "Precisions to store, best first, such as q8_0,q4_k,q2_k.  [default: chosen for --for-ram]",
)
@option(
    "--for-ram SIZE",
    "Choose the precisions for this much memory, such as 12GiB, instead of --tiers. If --calib is "
    "also given, experts are quantized with --method imatrix by default.",
)
@option(
    "--dense",
    "Also quantize F16 and F32 matrices that do not belong to experts.",
    type=click.Choice(["q8_0"]),
)
@method_options
@THREADS
@FORCE
def pack(
    source: Path, target: Path, tiers: str | None, for_ram: int | None, **options: Any
) -> None:
    """Store the experts of a GGUF in several precisions in one file."""
    if (tiers is None) == (for_ram is None):
        raise click.UsageError(
            "the precisions are missing: give either --tiers LIST, or --for-ram SIZE to choose them"
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
    """Choose the precisions of a packed file for a memory size, and return their names.

    The reason for the choice is printed.
    """
    from gguf_tools.experts import ExpertModel
    from orchestrator.plan.tiers_for import tiers_for

    with ExpertModel.open(source) as model:
        names, why = tiers_for(model, ram_bytes)
    print_notes([f"--tiers {','.join(names)}: {why}"])
    return names


@click.command(cls=Command)
@click.argument("source", metavar="IN", type=FILE)
@click.argument("target", metavar="OUT", type=NEW_FILE)
@option("--tier NAME", "Precision to export, such as q4_k.", required=True)
@option(
    "--keep-types", "Keep all quantization types, even those that released llama.cpp cannot read."
)
@FORCE
def export(source: Path, target: Path, tier: str, keep_types: bool) -> None:
    """Export one precision of a packed file as a GGUF for any llama.cpp.

    Types that only recent builds of llama.cpp read (such as q2_0) are converted to an older type
    with the same values. --keep-types turns this off.
    """
    from gguf_tools.pack import export as run

    with progress_bar("Exporting") as progress:
        report = run(source, target, tier.lower(), older=not keep_types, progress=progress)
    print_report(report)


@click.command(cls=Command)
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="OUT", type=NEW_FILE)
@option("--tiers LIST", "Precisions to store, best first, such as q8_0,q4_k,q2_k.", required=True)
@option(
    "--dense",
    "Quantization type of the matrices outside the experts.  [default: that of the checkpoint]",
    type=click.Choice(["f16", "bf16", "q8_0"]),
)
@option(
    "--imatrix FILE",
    "File with an importance matrix of llama.cpp, for more precise quantization of the experts.",
)
@option("--trust-remote-code", "Run the Python code of the checkpoint to load its tokenizer.")
@THREADS
@FORCE
def convert(source: str, target: Path, tiers: str, **options: Any) -> None:
    """Convert a checkpoint to a packed file, with experts in the precisions of --tiers.

    SRC is a folder of a transformers checkpoint, or hf:OWNER/NAME[@REVISION]. If SRC is a GGUF, it
    is packed as by `moe-edge pack`. Quantization methods with a calibration text need a GGUF. To
    use them, convert with --tiers f16, and then run `moe-edge pack` on the result.
    """
    from gguf_tools.convert import convert as run
    from gguf_tools.convert.converting import check_arguments
    from gguf_tools.hub import PREFIX, resolve_checkpoint

    names = tier_names(tiers)
    path, title = Path(source), None
    if source.startswith(PREFIX):
        # Check what can be checked before gigabytes are downloaded.
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
    """Print how llama.cpp will run a model that is being converted.

    header: a file that has only the model's header. Raises ConvertError if llama.cpp cannot run the
    model.
    """
    from gguf_tools.errors import ConvertError
    from orchestrator.runtime.support import NOT, support_of

    found = support_of(header)
    if found is None or not found.reason:
        return
    if found.runs == NOT:
        raise ConvertError(f"llama.cpp cannot run the converted model: {found.reason}")
    note(f"Note: {found.sentence}")


def print_report(report: PackReport) -> None:
    """Print a summary of the written file to stdout, and warnings to stderr."""
    tiers = ", ".join(
        f"{name} {bpw:.2f} bits {format_size(nbytes)}" for name, bpw, nbytes in report.tiers
    )
    say(f"{report.path}: {format_size(report.nbytes)}, experts in {tiers}")
    print_notes((*report.fallbacks, *report.warnings))
