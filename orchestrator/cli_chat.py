"""The command line of `moe-edge chat`."""

from __future__ import annotations

import sys
from typing import Any

import click

from orchestrator.cli_options import (
    answer_options,
    conversation_options,
    make_config,
    model_options,
    open_engine,
)
from orchestrator.console import Console

# Characters: more than the largest context holds of any text.
LONGEST_PROMPT = 1 << 27


@click.command()
@model_options
@answer_options
@conversation_options
@click.option(
    "--resume", is_flag=True, help="Go on with the latest conversation of --prompt-cache."
)
@click.option(
    "-p",
    "--prompt",
    metavar="TEXT",
    help="Answer this, print the answer alone, and exit. So does text on stdin.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="With a prompt: print one JSON object, the text and its statistics.",
)
def chat(prompt: str | None, as_json: bool, resume: bool, **options: Any) -> None:
    """Talk to a model."""
    from orchestrator.chat import Chat, Session, one_shot
    from orchestrator.chat_files import LastConversation

    console = Console()
    if prompt is None and not console.in_tty:
        prompt = sys.stdin.read(LONGEST_PROMPT + 1) if sys.stdin else ""
        if len(prompt) > LONGEST_PROMPT:
            raise click.UsageError("the text on stdin is longer than any context")
        if not prompt.strip():
            raise click.UsageError("no prompt: give -p TEXT, or text on stdin, or a terminal")
    if prompt is None and as_json:
        raise click.UsageError("--json needs a prompt: give -p TEXT, or text on stdin")
    if prompt is not None and not prompt.strip():
        raise click.UsageError("the prompt is empty")
    config = make_config({**options, "remember": True, "conversations": True})
    folder = config.prompt_cache
    last = LastConversation(folder) if folder else None
    if resume and last is None:
        raise click.UsageError("--resume goes on from a folder: give --prompt-cache DIR")
    messages = last.read() if last and resume else None
    with open_engine(config, console) as engine:
        if config.ctx and engine.n_ctx < config.ctx:
            console.note(
                f"--ctx {config.ctx}: it gets {engine.n_ctx}, which the model was made for."
            )
        session = Session(engine, config)
        session.keeper = last
        if messages:
            session.load(messages)
            console.note(f"It goes on behind {len(messages)} messages.")
        if prompt is None:
            Chat(session, console).run()
        elif not one_shot(session, console, prompt.strip(), as_json):
            raise KeyboardInterrupt
