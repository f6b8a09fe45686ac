"""`moe-edge chat`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from gguf_tools import interrupts
from gguf_tools.file.texts import decode_text, read_text
from orchestrator.cache.files import user_folder
from orchestrator.chat.console import Console
from orchestrator.cli.help import Command
from orchestrator.cli.options import (
    FILE,
    answer_options,
    chat_config,
    conversation_options,
    model_options,
    model_path,
    open_runtime,
    option,
)
from orchestrator.errors import ConfigError, NoLossTableError
from orchestrator.settings import MORE

if TYPE_CHECKING:
    from orchestrator.chat.session import Session
    from orchestrator.config import Config
    from orchestrator.runtime.runtime import Runtime

# Bytes. No context can hold a longer text.
LONGEST_PROMPT = 1 << 27
_LONGEST_CONSTRAINT = 1 << 20


@click.command(cls=Command)
@model_options
@answer_options
@option(
    "-p --prompt TEXT",
    "Answer this prompt and exit. Text on stdin is put in front of this prompt. Without -p, text "
    "on stdin is the prompt.",
)
@option(
    "--image FILE",
    "Add a PNG or JPEG image to the prompt. Without -p, it is added to the first message. Repeat "
    "the option for several images.",
    type=FILE,
    multiple=True,
)
@option(
    "--json as_json",
    "Print the answer and its statistics as JSON. Needs -p or text on stdin.",
)
@option(
    "--schema FILE",
    "JSON schema that the answer must follow.",
    type=FILE,
    group=MORE,
)
@option(
    "--grammar FILE",
    "GBNF grammar that the answer must follow.",
    type=FILE,
    group=MORE,
)
@conversation_options
@option(
    "--resume",
    "Continue the latest conversation. With --prompt-cache, it is the latest in that folder, "
    "otherwise the last chat on a terminal.",
)
def chat(
    prompt: str | None,
    image: tuple[Path, ...],
    as_json: bool,
    resume: bool,
    schema: Path | None,
    grammar: Path | None,
    **options: Any,
) -> None:
    """Chat with a model."""
    from orchestrator.chat.chat import Chat, one_shot
    from orchestrator.chat.session import (
        Session,
        latest_conversation,
        new_conversation,
        read_conversation,
    )
    from orchestrator.runtime.answering import Answering
    from orchestrator.runtime.images import ImageLimits, read_image

    console = Console()
    prompt = with_stdin(prompt, console)
    if prompt is None and as_json:
        raise click.UsageError("--json needs a prompt: give -p TEXT, or text on stdin")
    if prompt is None and (schema or grammar):
        raise click.UsageError("--schema and --grammar need a prompt: give -p TEXT")
    constraint = constraint_of(schema, grammar)
    for path in image:  # before the model is loaded, which may take minutes
        read_image(path, ImageLimits())
    config = chat_config(options)
    if config.prompt_cache:
        folder = config.prompt_cache
        kept: Path | None = folder / "last.jsonl"
        last = kept if kept and kept.exists() else None
    else:
        folder = user_folder("cache") / "conversations"
        last = latest_conversation(folder)
        kept = None
        if prompt is None and config.keep_messages:
            kept = last if resume else new_conversation(folder)
    if resume and last is None:
        raise ConfigError(f"--resume: there is no saved conversation in {folder}")
    messages = read_conversation(last) if resume and last else None
    notes: list[str] = []

    def tell() -> None:
        while notes:
            console.note(notes.pop(0))

    def opened() -> Runtime:
        with console.quiet_keys():
            answering = Answering(grammars=bool(constraint), images=True)
            return open_runtime(config, console, answering, say=notes.append)

    try:
        runtime = opened()
    except NoLossTableError as error:
        if prompt is not None:
            raise
        offer_table(error, config, console)
        runtime = opened()
    with Session(runtime, config, constraint) as session:
        if config.ctx and session.n_ctx > config.ctx:
            console.note(f"--ctx {config.ctx} is rounded up to {session.n_ctx}.")
        session.kept = kept
        if messages:
            session.load(messages)
            console.note(f"The conversation continues after {len(messages)} messages.")
        elif kept and not folder.exists():
            console.note(
                f"Chats are saved for --resume in {folder}, where only you can read them. "
                "--no-keep-messages turns this off."
            )
        # A step of a large model can take minutes, and some operations cannot be cancelled.
        with interrupts.leaving(partial(_leave, runtime)):
            if prompt is None:
                terminal = Chat(session, console, partial(change_model, session, console), tell)
                terminal.attach(image)
                terminal.run()
            elif not one_shot(session, console, prompt, as_json, image):
                raise KeyboardInterrupt
    tell()


def offer_table(error: NoLossTableError, config: Config, console: Console) -> None:
    """Show an error about a missing loss table, and ask the user whether to make the table now.

    If the user accepts, make the table and return. Otherwise, the process ends with exit status 1.
    """
    from orchestrator.cli.measure import make_table
    from orchestrator.cost.calibrating import TOKENS
    from orchestrator.lab.calibrate.methods import Method

    console.note(f"{error}.")
    answer = console.ask("Run it now? [Y/n]")
    if answer is None or answer.strip().lower() not in ("", "y", "yes"):
        click.get_current_context().exit(1)
    make_table(console, Method(tokens=TOKENS, threads=config.threads, ram=config.ram), config.model)


def _leave(runtime: Runtime) -> None:
    """Save the usage history of the experts, without waiting for the step that is running.

    It is called when the process ends during a step.
    """
    runtime.close(monotonic())


def with_stdin(prompt: str | None, console: Console) -> str | None:
    """Return the prompt of the command: the text on stdin, followed by the text of -p.

    Stdin is read only if it is not a terminal. The result is None if the user gave no prompt, which
    starts a conversation. Raises UsageError for an empty or too long prompt, and TextFileError if
    stdin is not UTF-8.
    """
    parts = [prompt or ""]
    try:
        parts[0].encode()
    except UnicodeEncodeError:  # Python turns bytes that are not UTF-8 into lone surrogates
        raise click.UsageError("the prompt of -p is not UTF-8: convert it first") from None
    if not console.in_tty:
        data = sys.stdin.buffer.read(LONGEST_PROMPT + 1) if sys.stdin else b""
        if len(data) > LONGEST_PROMPT:
            raise click.UsageError(
                f"the text on stdin is longer than {LONGEST_PROMPT} bytes: no context can hold it"
            )
        parts.insert(0, decode_text(data, "stdin"))
    elif prompt is None:
        return None
    whole = "\n\n".join(part.strip() for part in parts if part.strip())
    if whole:
        return whole
    if prompt is not None:
        raise click.UsageError("the prompt is empty")
    raise click.UsageError("there is no prompt: give -p TEXT or text on stdin, or use a terminal")


def constraint_of(schema: Path | None, grammar: Path | None) -> dict[str, Any]:
    """Return the request fields that make an answer follow a JSON schema or a grammar.

    schema, grammar: files, of which at most one is given. The result is empty without a file.
    Raises ConfigError if the constraint is not valid or cannot be enforced, and TextFileError if
    the file cannot be read.
    """
    if schema is None and grammar is None:
        return {}
    if schema is not None and grammar is not None:
        raise click.UsageError("--schema and --grammar exclude each other: give only one")
    from orchestrator.native import server_library
    from orchestrator.native.llama import Bindings
    from orchestrator.runtime.answering import fault_of_constraint
    from orchestrator.serve.constraints import rewritten

    if schema is not None:
        name = f"--schema {schema}"
        try:
            found = json.loads(read_text(schema, _LONGEST_CONSTRAINT))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}: the file is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{name}: a JSON schema must be an object")
        made, lost = rewritten(found, "schema")
        if lost:
            raise ConfigError(f"{name}: {lost[0]}")
        form = {"type": "json_schema", "json_schema": {"schema": made}}
        fields: dict[str, Any] = {"response_format": form}
    else:
        assert grammar is not None
        name = f"--grammar {grammar}"
        fields = {"grammar": read_text(grammar, _LONGEST_CONSTRAINT)}
    fault = fault_of_constraint(server_library(Bindings.load()), fields)
    if fault:
        raise ConfigError(f"{name}: {fault.strip()}")
    return fields


def change_model(session: Session, console: Console, name: str) -> None:
    """Continue the conversation of a chat with another model.

    The file of the new model is checked first, so that after a wrong name the current model
    continues to run.
    """
    from gguf_tools.experts import ExpertModel

    path = model_path(name)
    ExpertModel.open(path).close()
    with console.bars():
        session.change_model(path)
