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
    STUDY_OUT,
    as_options,
    check_study,
    given,
    make_config,
    model_options,
    open_runtime,
    option,
    policy_options,
    say_result,
    say_tables,
    together,
)
from orchestrator.config import policy_name
from orchestrator.lab.registry import REPLAY_STUDIES, load
from orchestrator.lab.replay import ReplayOptions, read_trace, render
from orchestrator.lab.replay import replay as run
from orchestrator.lab.replay.near_data import NearData, render_near_data, replay_near_data
from orchestrator.policy import DEFAULT, policy_settings
from orchestrator.settings import flag_of

# Settings of a replay on near-data memory that are not settings of a policy.
NEAR_DATA = {
    name: each for name, each in NearData.declared().items() if name not in policy_settings()
}
# The limit of tokens if neither --tokens nor --ctx is given.
MOST_TOKENS = 1 << 17


@click.command(cls=Command)
@model_options
@option("--out FILE", "Trace to write, such as T.npz.", type=NEW_FILE, required=True)
@FORCE
@option("--text FILE", "Evaluate this text token by token, in decode.")
@option(
    "--prefill N",
    "With --text: read its first N tokens as a prompt.  [default: 0]",
    type=AT_LEAST_0,
    default=0,
)
@option("-p --prompt TEXT", "Answer this prompt, instead of --text.")
@option(
    "--tokens N",
    "Tokens of the text or of the answer.  [default: a full context, or 512]",
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
    """Record the routing of a run, for `moe-edge replay`.

    Without --policy, the run uses the default policy for models that do not fit in memory. This
    policy prefetches experts, and may use all of the memory.
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
            recorded = record_answer(runtime, prompt or "", tokens or 512)
    write_trace(out, recorded)
    steps, nbytes = len(recorded.arrays["step_phase"]), out.stat().st_size
    click.echo(f"{out}: {steps} steps of {recorded.header.model}, {format_size(nbytes)}")


@click.command(cls=Command)
@click.argument("file", metavar="[FILE]", type=FILE, required=False)
@together(*ReplayOptions.declared().values())
@together(*policy_options(recorded=True))
@option("--study NAME", f"Figure of a paper, from this trace: {', '.join(REPLAY_STUDIES)}.")
@STUDY_OUT
@FORCE
@option(
    "--near-data",
    "Replay on a GPU with near-data memory. Layers are repeated up to a large model's shape. "
    "Without FILE the routing is generated.",
)
@together(*(replace(each, group="With --near-data") for each in NEAR_DATA.values()))
@JSON
def replay(
    file: Path | None,
    near_data: bool,
    study: str | None,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Replay a trace with another policy, memory size or disk, without a model.

    The result is compared with the policy lru, with an upper bound for any cache, and with the
    recorded run.
    """
    from orchestrator.native.llama import Bindings

    chosen = given(options)
    if near_data:
        chosen |= given({"study": study, "out": out})
        _replay_near_data(file, chosen, as_json)
        return
    for name in NEAR_DATA.keys() & chosen.keys():
        raise click.UsageError(
            f"{flag_of(name)} needs --near-data: add --near-data, or leave {flag_of(name)} out"
        )
    if file is None:
        raise click.UsageError(
            "Missing argument 'FILE': give a trace from `moe-edge trace`, or --near-data"
        )
    # Policies have a setting `losses` too, but a trace does not record it. Here it is replay's own.
    settings = {
        name: chosen.pop(name)
        for name, declared in policy_settings().items()
        if name in chosen and declared.recorded
    }
    with as_options():
        chosen["policy"] = policy_name(chosen.get("policy"))
        asked = replace(ReplayOptions.of(chosen), settings=settings)
    check_study(study, out)
    recorded, library = read_trace(file), Bindings.load().library()
    if study is None:
        result = run(library, recorded, asked)
        say_result(result, render, as_json)
    else:
        found = load(REPLAY_STUDIES, study)
        say_tables(study, found.publish(library, recorded, asked, out), as_json)


def _replay_near_data(file: Path | None, chosen: dict[str, Any], as_json: bool) -> None:
    """Run `moe-edge replay --near-data` with the given options."""
    for name in chosen:
        if name not in NearData.declared():
            raise click.UsageError(
                f"{flag_of(name)} has no effect with --near-data: leave one of them out"
            )
    with as_options():
        asked = NearData.of(chosen)
    result = replay_near_data(asked, None if file is None else read_trace(file))
    say_result(result, render_near_data, as_json)
