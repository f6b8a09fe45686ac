"""The plans of a model on this machine, as a table: `moe-edge plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gguf_tools import interrupts
from gguf_tools.columns import aligned
from gguf_tools.experts import ExpertModel
from gguf_tools.units import format_size
from orchestrator.chat.console import progress_bar, strip_controls
from orchestrator.cli.help import Command
from orchestrator.cli.options import (
    FORCE,
    JSON,
    NEW_FILE,
    chat_config,
    model_options,
    note,
    say_result,
)
from orchestrator.cost.planner import Planner
from orchestrator.cost.plans import Candidate, Frontier, behind_text
from orchestrator.cost.speeds import DISTURBED
from orchestrator.cost.time import PROMPT_TOKENS
from orchestrator.errors import ConfigError

_HEAD = ("", "plan", "tiers", "experts", "ms/token", "tok/s", "first prompt", "prompt", "KL, nats")


def render(found: Frontier, best: str) -> str:
    """The plans, the fastest first. best: the tier that KL is counted from."""
    rows = [
        (
            "*" if each is found.taken else "+" if each.best else "",
            each.label,
            "/".join(each.tiers),
            format_size(each.expert_bytes),
            f"{1e3 * each.token_s:.1f}",
            f"{1 / each.token_s:.1f}",
            f"{each.first_prompt_s:.1f} s",
            f"{each.prompt_s:.1f} s",
            _kl(each),
        )
        for each in found.candidates
    ]
    return "\n".join(
        [
            *aligned([list(_HEAD), *map(list, rows)]),
            f"Prompts have {PROMPT_TOKENS} tokens, and KL is the mean from {best}; 0 is lossless. "
            f"+: no other plan is both faster and closer; *: taken.",
            f"`chat` and `serve` take {found.why}",
            *filter(None, [behind_text(found.taken.as_dict()["token_ms_behind"])]),
            *([DISTURBED] if found.disturbed else []),
        ]
    )


def _kl(each: Candidate) -> str:
    if each.kl is None:
        return "?"
    return "<= " * each.at_most + (f"{each.kl:.2g}" if each.kl else "0")


@click.command(cls=Command)
@model_options
@JSON
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
    from orchestrator.cli import pictures

    if picture is not None:
        pictures.prepare(picture)
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
            found = planner.frontier(config)
        best = model.tiers[0].name
        on_disk = model.lookup_text and f"{model.lookup_text} stays on disk in managed plans"
    if picture is not None:
        pictures.draw_plans(found, strip_controls(config.model.name), picture)
    told = {
        "candidates": [each.as_dict() for each in found.candidates],
        "taken": found.candidates.index(found.taken),
        "why": found.why,
        "best_tier": best,
        "disturbed": found.disturbed,
        "lookup": model.lookup_text,
    }
    say_result(told, lambda _: render(found, best), as_json)
    if not as_json:
        unknown = f"KL is not known: {found.why_not}" if found.why_not else None
        for sentence in filter(None, (unknown, planner.note, on_disk)):
            note(sentence)
