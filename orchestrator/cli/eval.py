"""The command line of `moe-edge eval`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from gguf_tools import interrupts
from orchestrator.chat.console import Console, strip_controls
from orchestrator.cli.files import AT_LEAST_1, FILE, FORCE, Number, refuse_taken
from orchestrator.cli.options import given, make_config, model_options, size
from orchestrator.lab.registry import load_study, studies_by_paper
from orchestrator.lab.table import Table


@click.command("eval")
@model_options
@click.option(
    "--text",
    type=FILE,
    metavar="FILE",
    help="Text to predict; .jsonl records have a text each; .xz is unpacked.",
)
@click.option(
    "--choices",
    type=FILE,
    metavar="FILE",
    help='JSON lines {"question", "choices", "answer"}, answered by likelihood.',
)
@click.option("--kl", is_flag=True, help="Compare with the best tier of the file.")
@click.option(
    "--max-tokens",
    "tokens",
    type=AT_LEAST_1,
    metavar="N",
    help="Use N tokens of the text at most.",
)
# What scripts may still call it.
@click.option("--tokens", "as_before", type=AT_LEAST_1, hidden=True)
@click.option("--window", type=int, metavar="N", help="Tokens of one context.  [default: 512]")
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=0),
    metavar="N",
    help="Read the first N tokens of each window, and the context of a record, as a prompt that "
    "is not scored.",
)
@click.option("--prefill", is_flag=True, help="Judge the text read as prompts, not by token.")
@click.option(
    "--reuse",
    is_flag=True,
    help="A low request may use a high copy in memory, as in a chat; results then depend on "
    "the memory.",
)
@click.option(
    "--bandwidth",
    callback=size,
    metavar="SIZE",
    help="Reads in bytes a second, as 2GB, of the virtual time in which a policy decides that goes "
    "by what is in memory.  [default: measured]",
)
@click.option(
    "--latency-us",
    type=click.IntRange(0, 10**7),
    metavar="N",
    help="Of such a read, in microseconds.  [default: measured]",
)
@click.option(
    "--compute-ms",
    type=Number(0, 10**6),
    metavar="MS",
    help="Computing a token in that time, without waits.  [default: measured]",
)
@click.option(
    "--study",
    metavar="NAME",
    help=f"Tables and a figure, of the papers or ours: {'; '.join(studies_by_paper())}.",
)
@click.option(
    "--uniform",
    metavar="TYPES",
    help="What the studies accuracy, memory and equal compare with, all experts in one type: "
    "types made from the best tier, .gguf files of the same model, or none.  [default: "
    "q2_k,q3_k,q4_k,q5_k,q6_k]",
)
@click.option(
    "--calib",
    type=FILE,
    metavar="TEXT",
    help="Text for an importance matrix: each of --uniform is then made with one as well.",
)
@click.option("--out", type=FILE, metavar="DIR", help="Where a study writes tables and plots.")
@FORCE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(study: str | None, out: Path | None, as_json: bool, **options: Any) -> None:
    """Measure quality: perplexity, distance from the best tier, multiple choice.

    Each token is decided on its own, as in an answer: what is decided for a prompt sees its
    later tokens."""
    from dataclasses import fields

    from orchestrator.lab.eval import EvalOptions, render
    from orchestrator.lab.eval import evaluate as run

    as_before = options.pop("as_before")
    if as_before is not None and options["tokens"] is not None:
        raise click.UsageError(
            "--tokens is another name of --max-tokens: give one of the two, and leave the other out"
        )
    options["tokens"] = options["tokens"] or as_before
    names = {field.name for field in fields(EvalOptions)}
    chosen = {name: options.pop(name) for name in names & options.keys()}
    if chosen["uniform"] is not None:
        chosen["uniform"] = tuple(name.strip() for name in chosen["uniform"].split(","))
    config, wanted = make_config(options), EvalOptions(**given(chosen))
    check_study(study, out)
    console = Console()
    try:
        if study is None:
            result = run(config, wanted, console.bar)
            text = render(result)
        else:
            tables = load_study(study).publish(config, wanted, out, console.bar, console.note)
            result, text = study_result(study, tables)
    finally:
        console.end_bar()
    click.echo(json.dumps(result) if as_json else strip_controls(text))


def check_study(study: str | None, out: Path | None) -> None:
    """Raises click's errors where --study and --out do not go together, or a result is there."""
    if out is None:
        return
    if study is None:
        raise click.UsageError("--out is where a study writes: give --study NAME")
    refuse_taken(out / f"{study}.md", click.get_current_context())
    interrupts.ends_with(out / f"{study}.md")


def study_result(study: str, tables: Sequence[Table]) -> tuple[dict[str, Any], str]:
    """A study's tables for JSON, and as text."""
    result = {"study": study, "tables": [table.as_dict() for table in tables]}
    return result, "\n\n".join(table.markdown() for table in tables)
