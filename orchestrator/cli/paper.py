"""`moe-edge paper`: the tables and figures of a paper, measured on a model."""

from __future__ import annotations

import json
from pathlib import Path

import click

from orchestrator.chat.console import Console, strip_controls
from orchestrator.cli.help import Command
from orchestrator.cli.options import (
    FILE,
    JSON,
    LOW,
    THREADS,
    make_config,
    note,
    option,
)
from orchestrator.lab.registry import PAPERS, load_paper


@click.command(cls=Command)
@click.argument("name", metavar="|".join(PAPERS), type=click.Choice(list(PAPERS)))
@option(
    "-m --model FILE",
    "MoE model to measure, with several precisions in this file or by --low (firm needs only one). "
    " [default: the demo]",
    type=str,
)
@LOW
@option(
    "--out DIR",
    "Folder of the results. A repeated command measures only the missing tables and figures.  "
    "[default: paper-NAME]",
)
@option(
    "--data DIR",
    "Folder of texts to measure on. Each .jsonl or .txt file in it is one domain, and may be "
    "compressed (.xz).  [default: the demo's conversations]",
    type=FILE,
)
@option(
    "--only LIST",
    'Measure only these tables and figures, such as "Table 3,Figure 10".  [default: all]',
)
@option(
    "--max-tokens N",
    "Use at most N tokens of the text for each measurement, for slow models.  [default: all]",
    type=click.IntRange(min=1),
)
@THREADS
@JSON
def paper(
    name: str,
    out: Path | None,
    data: Path | None,
    only: str | None,
    max_tokens: int | None,
    as_json: bool,
    **options: object,
) -> None:
    """Measure the tables and figures of a paper and compare them with the paper.

    Each line has the value in the paper's text, our result, and why they differ.
    Tables and figures are written to a folder as text, JSON and pictures.
    """
    from orchestrator.lab.papers.measured import Source
    from orchestrator.lab.papers.paper import publish, render

    config, source = make_config(options), Source(data, max_tokens)
    folder = Path(f"paper-{name}") if out is None else out
    with Console().bars() as console:
        result = publish(load_paper(name), config, folder, source, only, console.bar, console.note)
    click.echo(json.dumps(result) if as_json else strip_controls(render(result)))
    note(f"The tables and pictures are in {folder}")
