"""`moe-edge plan`: which models this machine can run, and the plans for one model, as tables."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import click

from gguf_tools.columns import aligned
from gguf_tools.units import format_size
from orchestrator.chat.console import Console, strip_controls
from orchestrator.cli.compared import (
    COLUMNS,
    HERE,
    RANGE,
    compare_here,
    legend_lines,
    machine_text,
    number,
    render_compared,
    up_to,
)
from orchestrator.cli.help import Command
from orchestrator.cli.options import (
    FORCE,
    JSON,
    NEW_FILE,
    chat_config,
    given,
    make_config,
    model_options_with,
    note,
    one_name,
    option,
    say_result,
)
from orchestrator.cost.known import Known, Row, known_here
from orchestrator.cost.outlook import LONG, NO_ROOM, WELL
from orchestrator.errors import ConfigError, HubUnreachableError
from orchestrator.plan.records import Needs, PlanRequest

if TYPE_CHECKING:
    from gguf_tools.hub import Listing
    from orchestrator.cost.plans import Candidate, Frontier

_KNOWN_HEAD = (
    *("model", "parameters", "precision", "here", "tok/s", "at 8k", "first"),
    *("RAM GiB", "disk GiB"),
)
_HEAD = (
    *("", "plan", "precision", "experts", "ms/token", "tok/s"),
    *("first prompt", "prompt", "loss, nats"),
)
_UNKNOWN = (
    "This model has no usage history on this machine, so tok/s can be a range. The lower speed "
    "assumes that all experts are used equally, and the higher speed that few experts get most of "
    "the tokens."
)

# The numbers of docs/policies.md, "Choosing one".
_USUAL = (
    "For comparison, losses of the demo model relative to Q8_0: 0.012 nats per token with all "
    "experts in Q4_K, and 0.14 with all experts in Q2_K."
)


def render(found: Frontier, best: str) -> str:
    """Format the ways to run a model (plans) as a table, the fastest first.

    Each row has the policy, the predicted speed and the quality loss of a plan. best: name of the
    precision against which quality loss (KL) is measured.
    """
    from orchestrator.cost.plans import context_speeds_text
    from orchestrator.cost.speeds import DISTURBED
    from orchestrator.cost.time import PROMPT_TOKENS

    rows = [
        (
            "*" if each is found.taken else "+" if each.best else "",
            each.label,
            "/".join(each.tiers),
            format_size(each.expert_bytes),
            f"{each.token_ms:.1f}",
            up_to(1e3 / each.token_ms, each.token_ms_skewed and 1e3 / each.token_ms_skewed),
            f"{each.first_prompt_ms / 1e3:.1f} s",
            f"{each.prompt_ms / 1e3:.1f} s",
            _kl(each),
        )
        for each in found.candidates
    ]
    return "\n".join(
        [
            *aligned([_HEAD, *rows]),
            "The plan marked * is chosen. A plan is marked + if no other plan is both faster and "
            "less lossy.",
            f"first prompt: seconds until the answer to a first prompt of {PROMPT_TOKENS} tokens "
            "starts. prompt: the same for later prompts.",
            f"loss: mean KL divergence from {best} per token. 0 is lossless.",
            _USUAL,
            *([_UNKNOWN] if any(each.token_ms_skewed for each in found.candidates) else []),
            f"`chat` and `serve` use {found.why}",
            *filter(None, [context_speeds_text(found.taken.token_ms_behind)]),
            *([DISTURBED] if found.disturbed else []),
        ]
    )


def _kl(each: Candidate) -> str:
    """Format a plan's quality loss; "?" if the loss is unknown."""
    if each.kl is None:
        return "?"
    return "<= " * each.kl_at_most + (f"{each.kl:.2g}" if each.kl else "0")


def render_known(known: Known) -> str:
    """Format the table of known models on this machine as text."""
    rows = [_KNOWN_HEAD, *(_known_row(row, known.runs(row)) for row in known.best())]
    machine = machine_text(
        known.processor, known.threads, known.ram_bytes, known.disk_bytes_per_s, known.free_bytes
    )
    legend = (
        f"precision: the best precision with at least {WELL:g} tokens per second, or else the "
        "fastest precision. --json lists all precisions.",
        *HERE,
        f"here = {NO_ROOM}: the model is larger than the free disk space.",
        "tok/s: tokens per second.",
        RANGE,
        f"at 8k: tokens per second after {LONG} tokens.",
        f"first: seconds until the answer to a first prompt of {known.first_tokens} tokens starts.",
    )
    return "\n".join(
        [
            *wrap(machine, COLUMNS),
            "",
            *aligned(rows),
            "",
            *legend_lines(legend),
            "`moe-edge plan hf:OWNER/NAME` compares the models of a repository before a download.",
            *wrap(known.disturbed, COLUMNS),
        ]
    )


def _known_row(row: Row, runs: str) -> tuple[str, ...]:
    return (
        row.model,
        f"{row.total_b:g}B-A{row.active_b:g}B",
        row.precision,
        runs,
        up_to(row.tokens_s, row.tokens_s_skewed),
        number(row.tokens_s_long),
        number(row.first_s),
        f"{row.ram_bytes / 2**30:.1f}",
        f"{row.disk_bytes / 2**30:.1f}",
    )


def _print_known_models(as_json: bool, options: dict[str, Any]) -> None:
    """Print the table of known models on this machine.

    options: the options of the command `moe-edge plan`.
    """
    chosen = {"remember": True, **given(options), "model": os.devnull}
    config = make_config(chosen)  # the model is a placeholder
    with Console().bars() as console:
        known = known_here(PlanRequest(config, Needs(conversations=True)), console.bar)
    best = [asdict(row) | {"runs": known.runs(row)} for row in known.best()]
    report = asdict(known) | {"best": best}
    say_result(report, lambda _: render_known(known), as_json)


@click.command(cls=Command)
@model_options_with("a table")
@JSON
@option(
    "--plot picture OUT.png",
    "Plot speed and loss of ways to run a model (.png or .svg). Needs the extra `plot`.",
    type=NEW_FILE,
)
@FORCE
def plan(named: str | None, as_json: bool, picture: Path | None, **options: Any) -> None:
    """Show which models this machine can run, or how it would run one model.

    Without a model, the command prints a table of known models. With a model, it prints the plans
    for this model by speed and quality loss, and the chosen plan. MODEL may be a file,
    hf:OWNER/NAME/FILE or a URL; only the header of a remote file is read. If hf:OWNER/NAME contains
    several models, the command prints how each of them would run, and marks the best choice.

    A plan has predictions of the milliseconds per token and the seconds until the first token. If
    the model has a loss table, it also has the KL divergence from the file's best precision in nats
    per token. The option --max-loss makes `chat` and `serve` use the fastest plan within that loss.
    """
    asked = one_name(named, options["model"])
    several = None if asked is None else _several(asked)
    if several is not None:
        if picture is not None:
            raise click.UsageError(
                f"--plot draws the plans of one model (ways to run it), but {asked} contains "
                f"several models: choose one as {asked}/FILE"
            )
        compared = compare_here(several, options)
        say_result(compared.as_dict(), lambda _: render_compared(compared), as_json)
    elif asked is not None:
        _print_plans(asked, as_json, picture, options)
    elif picture is not None:
        raise click.UsageError(
            "--plot draws the plans of one model (ways to run it): name the model as MODEL"
        )
    else:
        _print_known_models(as_json, options)


def _several(asked: str) -> Listing | None:
    """Return the models of a repository on the Hub; None unless the user named one with several.

    asked: the model that the user named. If the Hub does not answer, the result is None, because
    the cache may have the model.
    """
    from gguf_tools.hub import PREFIX, list_models

    repo = asked.removeprefix(PREFIX)
    if repo == asked or repo.count("/") != 1:
        return None
    try:
        found = list_models(repo)
    except HubUnreachableError:
        return None
    return found if len(found.models) > 1 else None


def _print_plans(asked: str, as_json: bool, picture: Path | None, options: dict[str, Any]) -> None:
    """Print the ways to run one model (plans), with their predicted speed and quality loss.

    asked: a file, a model on the Hugging Face Hub, or a URL. picture: the file for a plot, or None.
    options: the options of the command `moe-edge plan`.
    """
    from gguf_tools.hub import fetch_headers, find_pulled, is_remote
    from orchestrator.cli import pictures
    from orchestrator.cli.machine import examine
    from orchestrator.cost.disk import machine_bandwidth
    from orchestrator.runtime.answering import Answering

    if picture is not None:
        pictures.prepare(picture)
    with ExitStack() as stack:
        headers, console = None, stack.enter_context(Console().bars())
        if is_remote(asked) and find_pulled(asked) is None:
            folder = stack.enter_context(TemporaryDirectory(prefix="moe-edge-"))
            console.bar("Reading the header", None)
            headers = fetch_headers(asked, Path(folder))
        config = chat_config({**options, "model": headers.path if headers else asked})
        disk = machine_bandwidth(config) if headers else None
        request = Answering(images=True).request(config)
        found, plans = examine(request, lambda what: console.bar(what, None), disk)
    if headers:
        found |= {"model": asked, "header_bytes": headers.read_bytes}
    if picture is not None and plans is not None:
        pictures.draw_plans(plans, strip_controls(config.model.name), picture)
    say_result(found, lambda _: _report(found, plans), as_json)
    if not as_json:
        if headers:
            read = format_size(headers.read_bytes)
            note(
                f"The size of {asked} is {format_size(headers.nbytes)}. Only the header ({read}) "
                "was downloaded."
            )
        for sentence in found["notes"]:
            note(sentence)
    if found["plan_note"] and plans is None:
        raise ConfigError(found["plan_note"])


def _report(found: dict[str, Any], plans: Frontier | None) -> str:
    from orchestrator.cli.machine import render as render_machine

    head = render_machine(found)
    return head if plans is None else f"{head}\n\n{render(plans, found['best_tier'])}"
