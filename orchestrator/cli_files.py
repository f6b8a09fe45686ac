"""The command line of files as such: `moe-edge verify` and `moe-edge pull`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gguf_tools.units import format_size
from orchestrator.console import progress_bar, strip_controls

AT_LEAST_1 = click.IntRange(min=1)


@click.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--threads", type=AT_LEAST_1, metavar="N", help="Threads.  [default: the cores]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def verify(ctx: click.Context, file: Path, threads: int | None, as_json: bool) -> None:
    """Check every block of a model file, and its metadata."""
    from gguf_tools.verify import verify as run

    with progress_bar("Verifying") as progress:
        report = run(file, progress=progress, threads=threads)
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    elif report.problems:
        for problem in report.problems:
            click.echo(strip_controls(problem.text))
    else:
        more = f" and {len(report.files) - 1} more" if len(report.files) > 1 else ""
        click.echo(
            strip_controls(
                f"{report.files[0]}{more}: good: {report.n_tensors} tensors,"
                f" {format_size(report.nbytes)}, experts in {', '.join(report.tiers)}"
            )
        )
    if report.problems:
        ctx.exit(1)
