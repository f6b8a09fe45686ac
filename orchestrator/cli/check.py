"""The command line of `moe-edge check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gguf_tools import interrupts
from orchestrator.chat.console import Console, strip_controls
from orchestrator.cli.files import AT_LEAST_1, FORCE, NEW_FILE
from orchestrator.cli.options import chat_config, model_options


@click.command()
@model_options
@click.option(
    "--tokens",
    type=AT_LEAST_1,
    default=64,
    metavar="N",
    help="Decode N tokens in each run.  [default: 64]",
)
@click.option(
    "--all-tiers",
    is_flag=True,
    help="Compare the lower precisions as well; those of a packed file are exported to the folder "
    "of temporary files first.",
)
@click.option("--no-verify", is_flag=True, help="Do not read every block of the file first.")
@click.option("--out", type=NEW_FILE, metavar="FILE", help="Write the report there, too.")
@FORCE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(
    tokens: int,
    all_tiers: bool,
    no_verify: bool,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Try a model: its file, tokenizer and template; its bits against llama.cpp's own path; its
    memory against what was promised, at three budgets; and its speed. The report names the file,
    this machine and its processor. The exit status is 0 where all is good."""
    from orchestrator.cache.files import check_target, write_whole
    from orchestrator.lab.check import CheckOptions, examine, render

    if out is not None:
        check_target(out)
        interrupts.ends_with(out)
    console = Console()
    asked = CheckOptions(tokens=tokens, all_tiers=all_tiers, verify=not no_verify)
    try:
        report = examine(chat_config(options), asked, console.bar)
    finally:
        console.end_bar()
    text = json.dumps(report) if as_json else strip_controls(render(report))
    if out is not None:
        write_whole(out, text + "\n")
    click.echo(text)
    if not report["ok"]:
        click.get_current_context().exit(1)
