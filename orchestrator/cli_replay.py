"""The command line of `moe-edge replay`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from orchestrator.config import parse_size
from orchestrator.console import strip_controls
from orchestrator.errors import MoeEdgeError

FILE = click.Path(path_type=Path)


def size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    """The bytes of an option that is written as 6GiB or 500MB."""
    try:
        return None if value is None else parse_size(value)
    except MoeEdgeError as error:
        raise click.BadParameter(str(error)) from error


@click.command()
@click.argument("file", metavar="FILE", type=FILE)
@click.option("--policy", metavar="NAME", help="Who decides: lru, dymoe.  [default: as recorded]")
@click.option(
    "--expert-ram",
    callback=size,
    metavar="SIZE",
    help="Cap on the expert slots.  [default: as recorded]",
)
@click.option(
    "--retention",
    type=click.FloatRange(0, 1),
    metavar="R",
    help="Average share of critical experts.  [default: as recorded]",
)
@click.option("--high-tier", metavar="TIER", help="As q4_k.  [default: as recorded]")
@click.option("--low-tier", metavar="TIER", help="As q2_k, or skip.  [default: as recorded]")
@click.option(
    "--schedule",
    type=click.Choice(["cosine", "linear", "flat"]),
    help="How the share of critical experts falls with depth.  [default: as recorded]",
)
@click.option(
    "--prefetch",
    type=click.Choice(["auto", "on", "off"]),
    help="Auto stops it while it does not pay.  [default: as recorded]",
)
@click.option(
    "--n-ahead",
    type=click.IntRange(0, 4),
    metavar="N",
    help="Look-ahead in layers; 0: no prefetch.  [default: as recorded]",
)
@click.option(
    "--bandwidth",
    callback=size,
    metavar="SIZE",
    help="Reads in bytes a second, as 2GB.  [default: measured when recorded]",
)
@click.option(
    "--latency-us",
    type=click.IntRange(0, 10**7),
    metavar="N",
    help="Of a read, in microseconds.  [default: 0]",
)
@click.option(
    "--io-threads",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Reads at once.  [default: as recorded]",
)
@click.option(
    "--compute-ms",
    type=click.FloatRange(0, 10**6),
    metavar="MS",
    help="Computing a decoded token, without waits.  [default: measured when recorded]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay(file: Path, as_json: bool, **options: Any) -> None:
    """Play a trace with another policy, memory or disk: no model needed."""
    from orchestrator.llama import Bindings
    from orchestrator.replay import ReplayOptions, read_trace, render
    from orchestrator.replay import replay as run

    given = {name: value for name, value in options.items() if value is not None}
    recorded = read_trace(file)
    result = run(Bindings.load().library(), recorded, ReplayOptions(**given))
    click.echo(json.dumps(result) if as_json else strip_controls(render(result)))
