"""The command line of the frontier: `moe-edge plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gguf_tools import interrupts
from orchestrator.chat.console import progress_bar, strip_controls
from orchestrator.cli.options import FORCE, NEW_FILE, chat_config, model_options


@click.command()
@model_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--plot",
    "picture",
    type=NEW_FILE,
    metavar="OUT.png",
    help="Draw time and loss of the plans there (or .svg); needs the extra `plot`.",
)
@FORCE
def plan(as_json: bool, picture: Path | None, **options: Any) -> None:
    """Show what a model can be on this machine: plans by speed and loss, and the one taken.

    Each plan is predicted: milliseconds a token, seconds until the first token, and the KL from the
    file's best precision where `moe-edge calibrate` has fitted it. With --max-loss, `chat` and
    `serve` take the fastest plan within it.
    """
    from gguf_tools.experts import ExpertModel
    from orchestrator.cli import layer_plot
    from orchestrator.cli.frontier_text import draw, render
    from orchestrator.cost.planner import Planner
    from orchestrator.errors import ConfigError

    if picture is not None:
        layer_plot.prepare(picture)
        interrupts.ends_with(picture)
    config = chat_config(options)
    if config.policy is not None:
        raise ConfigError(
            "--policy names the plan already: leave it out, and `moe-edge plan` compares them all"
        )
    with ExpertModel.open(config.model, config.low) as model:
        planner = Planner(config, model)
        with progress_bar("Measuring this machine") as measuring:
            measuring(None)
            found, why_not = planner.frontier(config)
        best = model.tiers[0].name
    if picture is not None:
        draw(found, strip_controls(config.model.name), picture)
    if as_json:
        told = {"candidates": [each.as_dict() for each in found.candidates]}
        taken = found.candidates.index(found.taken)
        more = {"why": found.why, "best_tier": best, "disturbed": found.disturbed}
        click.echo(json.dumps({**told, "taken": taken, **more}))
        return
    click.echo(strip_controls(render(found, best)))
    if why_not:
        click.echo(strip_controls(f"KL is not known: {why_not}"), err=True)
    if planner.note:
        click.echo(strip_controls(planner.note), err=True)
