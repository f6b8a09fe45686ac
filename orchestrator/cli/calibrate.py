"""The command line of `moe-edge calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gguf_tools import interrupts
from orchestrator.chat.console import Console, progress_bar, strip_controls
from orchestrator.cli.files import (
    FILE,
    FORCE,
    NEW_FILE,
    THREADS,
    names_of,
    print_notes,
    refuse_taken,
)
from orchestrator.cli.options import CALIB_TOKENS, RAM, chosen_method

TYPES = "q4_k,q3_k,q2_k,q1_0"


@click.command()
@click.argument("file", metavar="FILE", type=FILE)
@click.option("--calib", required=True, type=FILE, metavar="TEXT", help="The text to read.")
@CALIB_TOKENS
@click.option(
    "--reference",
    type=FILE,
    metavar="FILE",
    help="The same model in full precision, as F16.  [default: the best tier]",
)
@click.option(
    "--types",
    default=TYPES,
    metavar="LIST",
    help=f"Precisions to measure beside the file's, quantized from the reference.  "
    f"[default: {TYPES}]",
)
@click.option(
    "--method",
    metavar="NAME",
    help="How those are quantized: rtn, imatrix, gptq.  [default: rtn]",
)
@click.option("--out", type=NEW_FILE, metavar="FILE", help="The table.  [default: FILE.calib.json]")
@click.option(
    "--save-imatrix",
    type=NEW_FILE,
    metavar="FILE",
    help="Write an importance matrix of the text, and no table.",
)
@RAM
@THREADS
@FORCE
@click.pass_context
def calibrate(
    ctx: click.Context,
    /,
    file: Path,
    reference: Path | None,
    types: str,
    out: Path | None,
    save_imatrix: Path | None,
    threads: int | None,
    **options: Any,
) -> None:
    """Measure what each expert's output loses in each precision, on a text.

    The table of mean squared errors stands beside the file, where policies that choose
    precisions find it.
    """
    from orchestrator.cache.files import check_target
    from orchestrator.cost.losses import default_path
    from orchestrator.lab.calibrate import methods

    if save_imatrix is not None and (out is not None or options["method"] is not None):
        unused = "--method" if out is None else "--out"
        raise click.UsageError(f"{unused} is for the table, which --save-imatrix leaves out")
    method = chosen_method(threads, options)
    target = save_imatrix or out or default_path(file)
    refuse_taken(target, ctx)
    check_target(target)
    interrupts.ends_with(target)
    if save_imatrix is not None:
        with progress_bar("Calibrating") as progress:
            weak = methods.save_imatrix(method, reference or file, save_imatrix, progress)
        print_notes([weak] if weak else [])
        click.echo(strip_controls(str(save_imatrix)))
        return
    console = Console()
    notes: list[str] = []
    try:
        table = methods.measure_losses(
            method, file, reference, names_of(types), target, console.bar, notes.append
        )
    finally:
        console.end_bar()
    print_notes(notes)
    click.echo(strip_controls(f"{target}: {table.calibration}"))
    click.echo(strip_controls(table.render()))
