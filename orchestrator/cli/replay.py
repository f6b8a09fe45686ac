"""`moe-edge trace` and `moe-edge replay`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gguf_tools.units import format_size
from orchestrator.chat.console import Console
from orchestrator.cli.help import Command
from orchestrator.cli.options import (
    AT_LEAST_0,
    FILE,
    FORCE,
    JSON,
    NEW_FILE,
    as_options,
    given,
    make_config,
    model_options,
    open_runtime,
    option,
    policy_options,
    say_result,
    together,
)
from orchestrator.config import policy_name
from orchestrator.lab.replay import ReplayOptions, read_trace, render
from orchestrator.lab.replay import replay as run
from orchestrator.policy import DEFAULT, policy_settings

# The limit of tokens if neither --tokens nor --ctx is given.
MOST_TOKENS = 1 << 17


@click.command(cls=Command)
@model_options
@option("--out FILE", "File to write the trace to, such as T.npz.", type=NEW_FILE, required=True)
@FORCE
@option("--text FILE", "Text file to evaluate token by token, in decode.")
@option(
    "--prefill N",
    "With --text: read the first N tokens of the text as a prompt.  [default: 0]",
    type=AT_LEAST_0,
    default=0,
)
@option("-p --prompt TEXT", "Prompt that the model answers, instead of --text.")
@option(
    "--tokens N",
    "Maximum tokens to read with --text or generate with -p.  [default: as the context allows; "
    "512 with -p]",
)
@option("--seed N", "Seed of the answer.", type=AT_LEAST_0)
def trace(
    out: Path,
    text: Path | None,
    prefill: int,
    prompt: str | None,
    tokens: int | None,
    **options: Any,
) -> None:
    """Record the experts that each token of a run uses, for `moe-edge replay`.

    The run evaluates the text of --text, or answers the prompt of -p. --tokens limits its length.
    The first --prefill tokens of a text are read as a prompt. Without --policy, the run uses the
    default policy for models that do not fit in memory.
    """
    from orchestrator.lab.eval.text import read_text
    from orchestrator.lab.replay.file import check_trace_target, write_trace
    from orchestrator.lab.replay.record import record_answer, record_text
    from orchestrator.runtime.answering import Answering

    if (text is None) == (prompt is None):
        raise click.UsageError("the input is missing: give either --text FILE or -p TEXT")
    if prompt is not None and not prompt.strip():
        raise click.UsageError("the prompt is empty")
    if prefill and text is None:
        raise click.UsageError(
            "--prefill is for --text, because the prompt of -p is always read in prefill: "
            "leave --prefill out"
        )
    check_trace_target(out)
    options["policy"] = options["policy"] or DEFAULT
    config = make_config(options)
    words = None if text is None else read_text(text, tokens or config.ctx or MOST_TOKENS)
    if words is not None:
        with open_runtime(config, Console()) as runtime, runtime.evaluator() as evaluator:
            recorded = record_text(evaluator, words, tokens, prefill)
    else:
        with open_runtime(config, Console(), Answering(reads_ahead=False)) as runtime:
            recorded = record_answer(runtime, prompt or "", tokens)
    write_trace(out, recorded)
    steps, nbytes = len(recorded.arrays["step_phase"]), out.stat().st_size
    model = recorded.header.model
    click.echo(f"{out}: trace of {model} with {steps} steps, {format_size(nbytes)}")


@click.command(cls=Command)
@click.argument("file", metavar="FILE", type=FILE)
@together(*ReplayOptions.declared().values())
@together(*policy_options(recorded=True))
@JSON
def replay(file: Path, as_json: bool, **options: Any) -> None:
    """Replay a trace with another policy, memory size or disk, without a model.

    The hit rates and times are compared with those of the policy lru, of the recorded run, and of
    an optimal cache. The optimal cache knows all later requests. Its hit rate is an upper bound for
    caches that load experts on demand.
    """
    from orchestrator.native.llama import Bindings

    chosen = given(options)
    # Policies have a setting `losses` too, but a trace does not record it. Here it is replay's own.
    settings = {
        name: chosen.pop(name)
        for name, declared in policy_settings().items()
        if name in chosen and declared.recorded
    }
    with as_options():
        chosen["policy"] = policy_name(chosen.get("policy"))
        asked = replace(ReplayOptions.of(chosen), settings=settings)
    recorded, library = read_trace(file), Bindings.load().library()
    say_result(run(library, recorded, asked), render, as_json)
