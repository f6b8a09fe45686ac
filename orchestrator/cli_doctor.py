"""The command line of the machine: `moe-edge doctor`."""

from __future__ import annotations

import json
from typing import Any

import click

from orchestrator.cli_options import chat_config, model_options
from orchestrator.console import Console, strip_controls


@click.command()
@model_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool, **options: Any) -> None:
    """Measure this machine, and say how a model would run on it."""
    from orchestrator.doctor import examine, render

    console = Console()
    try:
        health = examine(chat_config(options), lambda what: console.bar(what, None))
    finally:
        console.end_bar()
    click.echo(json.dumps(health.as_dict()) if as_json else strip_controls(render(health)))
