"""`moe-edge serve`."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from orchestrator.chat.console import Console
from orchestrator.cli.help import Command
from orchestrator.cli.options import (
    as_options,
    given,
    make_config,
    model_options,
    together,
)
from orchestrator.errors import MoeEdgeError
from orchestrator.serve.settings import ServeSettings, answer_settings

_OPTIONS = ServeSettings.declared()


@click.command(cls=Command)
@together(*_OPTIONS.values())
@model_options
@together(*answer_settings())
def serve(**options: Any) -> None:
    """Serve a model over HTTP, with the APIs of OpenAI, Anthropic and Ollama. Options for
    answers are the defaults for requests that do not set them.
    """  # noqa: D205 -- the help fits 40 lines only as one paragraph
    try:
        from orchestrator.serve.run import Running
    except ImportError as error:
        raise MoeEdgeError(f"the server needs package {error.name}: run `make build`") from error

    console = Console()
    own = {name: options.pop(name) for name in _OPTIONS}
    with as_options():
        settings = ServeSettings.of(own)
    config = make_config({"remember": True, **given(options)})
    if not Running(config, settings, console.note, console.bar).run():
        sys.stderr.flush()
        os._exit(0)  # a normal exit would wait for the thread that is still in llama.cpp
