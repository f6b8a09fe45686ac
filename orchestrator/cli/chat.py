"""The command line of `moe-edge chat`."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from orchestrator.chat.console import Console
from orchestrator.cli.help import Command
from orchestrator.cli.options import (
    answer_options,
    chat_config,
    conversation_options,
    model_options,
    model_path,
    open_engine,
    option,
)
from orchestrator.errors import ConfigError

if TYPE_CHECKING:
    from orchestrator.chat.session import Session

# Bytes: more than the largest context holds of any text.
LONGEST_PROMPT = 1 << 27


@click.command(cls=Command)
@model_options
@answer_options
@option(
    "-p --prompt TEXT",
    "Answer this alone, and exit. Text on stdin goes before it, or is the prompt.",
)
@option(
    "--json as_json",
    "Print one JSON object, with -p or stdin. It has the answer and its statistics.",
)
@conversation_options
@option("--resume", "Go on with the latest conversation of --prompt-cache.")
def chat(prompt: str | None, as_json: bool, resume: bool, **options: Any) -> None:
    """Talk to a model."""
    from orchestrator.chat.chat import Chat, one_shot
    from orchestrator.chat.session import Session, read_conversation

    console = Console()
    prompt = with_stdin(prompt, console)
    if prompt is None and as_json:
        raise click.UsageError("--json needs a prompt: give -p TEXT, or text on stdin")
    config = chat_config(options)
    folder, messages = config.prompt_cache, None
    last = folder / "last.jsonl" if folder else None
    if resume and last is None:
        raise click.UsageError("--resume goes on from a folder: give --prompt-cache DIR")
    if resume and last is not None:
        if not last.exists():
            raise ConfigError(f"--resume: no conversation is kept in {folder}")
        messages = read_conversation(last)
    with console.quiet_keys():
        engine = open_engine(config, console)
    with Session(engine, config) as session:
        if config.ctx and engine.n_ctx > config.ctx:
            console.note(f"--ctx {config.ctx}: it gets {engine.n_ctx}, the next size.")
        session.kept = last
        if messages:
            session.load(messages)
            console.note(f"It goes on behind {len(messages)} messages.")
        if prompt is None:
            Chat(session, console, partial(change_model, session, console)).run()
        elif not one_shot(session, console, prompt, as_json):
            raise KeyboardInterrupt
    for note in session.engine.prompt_notes():
        console.note(note)


def with_stdin(prompt: str | None, console: Console) -> str | None:
    """Return the text on stdin, if stdin is not a terminal, followed by the prompt; None if an
    interactive conversation is to begin. Raises UsageError for an empty prompt, and as read_stdin
    does."""
    parts = [prompt or ""]
    try:
        parts[0].encode()
    except UnicodeEncodeError:  # Python makes lone surrogates of bytes that are not UTF-8
        raise click.UsageError("the prompt of -p is not UTF-8: convert it first") from None
    if not console.in_tty:
        parts.insert(0, read_stdin())
    elif prompt is None:
        return None
    whole = "\n\n".join(part.strip() for part in parts if part.strip())
    if whole:
        return whole
    if prompt is not None:
        raise click.UsageError("the prompt is empty")
    raise click.UsageError("no prompt: give -p TEXT, or text on stdin, or a terminal")


def read_stdin() -> str:
    """Return the text on stdin, without a byte order mark. Raises UsageError if it is longer than
    any context or is not UTF-8."""
    data = sys.stdin.buffer.read(LONGEST_PROMPT + 1) if sys.stdin else b""
    if len(data) > LONGEST_PROMPT:
        raise click.UsageError("the text on stdin is longer than any context")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise click.UsageError(
            f"the text on stdin is not UTF-8: byte 0x{data[error.start]:02x} at offset "
            f"{error.start}. Convert it first, as `iconv -f latin1 -t utf-8` does"
        ) from None


def change_model(session: Session, console: Console, name: str) -> None:
    """Goes on with another model; one that cannot be read is refused before the one that runs
    is closed."""
    from gguf_tools.experts import ExpertModel

    path = model_path(name)
    ExpertModel.open(path).close()
    session.change_model(path, lambda config: open_engine(config, console))
