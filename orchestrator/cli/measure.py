"""The commands that measure: `moe-edge bench` and those below it, `eval`, `calibrate`, `check`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from orchestrator.chat.console import Console, progress_bar, strip_controls
from orchestrator.cli.help import Command, Group, Option
from orchestrator.cli.options import (
    AT_LEAST_1,
    CALIB_TOKENS,
    FILE,
    FORCE,
    JSON,
    NEW_FILE,
    RAM,
    STUDY_OUT,
    THREADS,
    Number,
    as_options,
    chat_config,
    check_output,
    check_study,
    chosen_method,
    given,
    make_config,
    model_options,
    names_of,
    note,
    option_of,
    print_notes,
    refuse_taken,
    say,
    say_result,
    say_tables,
    size,
)
from orchestrator.lab.registry import BENCHMARKS, STUDIES, load, studies_by_paper
from orchestrator.settings import MORE


class Measurement(Command):
    """The command of one experiment."""

    experiment = ""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The experiment's options; it is loaded here."""
        if not self.params:
            experiment = load(BENCHMARKS, self.experiment)
            for declared in experiment.options.declared().values():
                if declared.option:
                    option_of(declared)(self)
            JSON(self)
        return super().get_params(ctx)


class Measurements(Measurement, Group):
    """`moe-edge bench`: an experiment itself, and the commands of the others."""


def _measure(name: str, as_json: bool, **options: Any) -> None:
    """Runs one experiment with the options that were given, and prints its report."""
    experiment = load(BENCHMARKS, name)
    with as_options():
        asked = experiment.options.of(options)
    report = experiment.run(asked, note)
    say_result(report.as_dict(), lambda _: report.text(), as_json)


@click.group(
    cls=Measurements,
    invoke_without_command=True,
    help=BENCHMARKS[""].help,
)
@click.pass_context
def bench(ctx: click.Context, /, **options: Any) -> None:
    """Runs the experiment of `moe-edge bench` itself, unless a command follows."""
    if ctx.invoked_subcommand is None:
        _measure("", **options)
        return
    for parameter in ctx.command.params:
        if ctx.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{parameter.opts[0]} comes after the command: moe-edge bench "
                f"{ctx.invoked_subcommand} {parameter.opts[0]} .."
            )


for _name, _place in BENCHMARKS.items():
    if _name:
        _command = Measurement(
            _name,
            callback=partial(_measure, _name),
            help=_place.help,
            short_help=_place.help.split("\n")[0],
        )
        _command.experiment = _name
        bench.add_command(_command)


@click.command("eval", cls=Command)
@model_options
@click.option(
    "--text",
    type=FILE,
    metavar="FILE",
    help="Text to predict. A .jsonl has one in each record, and .xz is unpacked.",
)
@click.option(
    "--choices",
    type=FILE,
    metavar="FILE",
    help='Questions to answer, as JSON lines {"question", "choices", "answer"}.',
)
@click.option("--kl", is_flag=True, help="Compare with the best precision of the file.")
@click.option(
    "--kl-from",
    cls=Option,
    group=MORE,
    metavar="TIER",
    help="With this one instead, as the best one in use.",
)
@click.option(
    "--max-tokens",
    "tokens",
    type=AT_LEAST_1,
    metavar="N",
    help="Use N tokens of the text at most.",
)
# What scripts may still call it.
@click.option("--tokens", "as_before", type=AT_LEAST_1, hidden=True)
@click.option(
    "--window",
    cls=Option,
    group=MORE,
    type=int,
    metavar="N",
    help="Tokens of one context.  [default: 512]",
)
@click.option(
    "--prompt-tokens",
    cls=Option,
    group=MORE,
    type=click.IntRange(min=0),
    metavar="N",
    help="Read the first N tokens of each window, and the context of a record, as a prompt that "
    "is not scored.",
)
@click.option(
    "--prefill",
    cls=Option,
    group=MORE,
    is_flag=True,
    help="Judge the text read as prompts, not by token.",
)
@click.option(
    "--reuse",
    cls=Option,
    group=MORE,
    is_flag=True,
    help="A low request may use a high copy in memory, as in a chat; results then depend on "
    "the memory.",
)
@click.option(
    "--bandwidth",
    cls=Option,
    group=MORE,
    callback=size,
    metavar="SIZE",
    help="Reads in bytes a second, as 2GB, of the virtual time in which a policy decides that goes "
    "by what is in memory.  [default: measured]",
)
@click.option(
    "--latency-us",
    cls=Option,
    group=MORE,
    type=click.IntRange(0, 10**7),
    metavar="N",
    help="What a read takes beside its bytes, in microseconds.  [default: measured]",
)
@click.option(
    "--compute-ms",
    cls=Option,
    group=MORE,
    type=Number(0, 10**6),
    metavar="MS",
    help="Computing a token in that time, without waits.  [default: measured]",
)
@click.option(
    "--study",
    metavar="NAME",
    help=f"Tables and a figure of a study. Known are {'; '.join(studies_by_paper())}.",
)
@click.option(
    "--uniform",
    cls=Option,
    group=MORE,
    metavar="TYPES",
    help="What the studies memory and equal compare with, all experts in one type: "
    "precisions made from the best one, .gguf files of the same model, or none.  [default: "
    "q2_k,q3_k,q4_k,q5_k,q6_k]",
)
@click.option(
    "--calib",
    cls=Option,
    group=MORE,
    type=FILE,
    metavar="TEXT",
    help="Text for an importance matrix: each of --uniform is then made with one as well.",
)
@STUDY_OUT
@FORCE
@JSON
def evaluate(study: str | None, out: Path | None, as_json: bool, **options: Any) -> None:
    """Measure quality: perplexity, distance from the best precision, multiple choice.

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
    check_study(study, out, click.get_current_context())
    with Console().bars() as console:
        if study is None:
            result = run(config, wanted, console.bar)
        else:
            tables = load(STUDIES, study).publish(config, wanted, out, console.bar, console.note)
    if study is None:
        say_result(result, render, as_json)
    else:
        say_tables(study, tables, as_json)


@click.command(cls=Command)
@click.argument("file", metavar="FILE", type=FILE)
@click.option("--calib", required=True, type=FILE, metavar="TEXT", help="The text to read.")
@CALIB_TOKENS
@click.option(
    "--reference",
    type=FILE,
    metavar="FILE",
    help="The same model in full precision, as F16.  [default: the best precision of the file]",
)
@click.option(
    "--types",
    default="",
    metavar="LIST",
    help="Precisions to measure beside the file's, as q4_k,q2_k, quantized from the reference.",
)
@click.option(
    "--method",
    metavar="NAME",
    help="How those are quantized: rtn, imatrix, gptq.  [default: rtn]",
)
@click.option("--out", type=NEW_FILE, metavar="FILE", help="The table.  [default: FILE.calib.json]")
@click.option(
    "--save-imatrix",
    type=NEW_FILE,
    metavar="FILE",
    help="Write an importance matrix of the text, and no table.",
)
@RAM
@THREADS
@FORCE
@click.pass_context
def calibrate(
    ctx: click.Context,
    /,
    file: Path,
    reference: Path | None,
    types: str,
    out: Path | None,
    save_imatrix: Path | None,
    threads: int | None,
    **options: Any,
) -> None:
    """Measure what each expert's output loses in each precision, on a text.

    The table stands beside the file, where policies that choose precisions find it. A run that
    was interrupted goes on where it was.
    """
    from orchestrator.cost.losses import default_path
    from orchestrator.lab.calibrate import methods
    from orchestrator.lab.calibrate import table as tables

    if save_imatrix is not None and (out is not None or options["method"] is not None):
        unused = "--method" if out is None else "--out"
        raise click.UsageError(f"{unused} is for the table, which --save-imatrix leaves out")
    if save_imatrix is None:
        options["calib_tokens"] = options["calib_tokens"] or tables.TOKENS
    method = chosen_method(threads, options)
    target = save_imatrix or out or default_path(file)
    refuse_taken(target, ctx)
    check_output(target)
    if save_imatrix is not None:
        with progress_bar("Calibrating") as progress:
            weak = methods.save_imatrix(method, reference or file, save_imatrix, progress)
        print_notes([weak] if weak else [])
        say(str(save_imatrix))
        return
    notes: list[str] = []
    with Console().bars() as console:
        table = tables.measure_losses(
            method, file, reference, names_of(types), target, console.bar, notes.append
        )
    print_notes(notes)
    say(f"{target}: {table.calibration}")
    say(table.render())


@click.command(cls=Command)
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
    help="Compare the lower precisions as well. Those of a packed file are exported to the folder "
    "of temporary files first.",
)
@click.option("--no-verify", is_flag=True, help="Do not read every block of the file first.")
@click.option("--out", type=NEW_FILE, metavar="FILE", help="Write the report there, too.")
@FORCE
@JSON
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
    from orchestrator.cache.files import write_whole
    from orchestrator.lab.check import CheckOptions, examine, render

    if out is not None:
        check_output(out)
    asked = CheckOptions(tokens=tokens, all_tiers=all_tiers, verify=not no_verify)
    with Console().bars() as console:
        report = examine(chat_config(options), asked, console.bar)
    text = json.dumps(report) if as_json else strip_controls(render(report))
    if out is not None:
        write_whole(out, text + "\n")
    click.echo(text)
    if not report["ok"]:
        click.get_current_context().exit(1)


@click.command("gpu-check", cls=Command)
@click.option("--part", metavar="NAME", help="One part: device, kernels, managed, ..., bench.")
@click.option("--step", default="", metavar="TEXT", help="Steps whose line has it, anew.")
@click.option(
    "--report",
    type=FILE,
    default="gpu-report.md",
    show_default=True,
    metavar="FILE",
    help="What is written; a folder of its name lies beside it.",
)
@click.option("--emulated", is_flag=True, help="Show the procedure on a checkout's emulated GPU.")
@click.pass_context
def gpu_check(
    ctx: click.Context, part: str | None, step: str, report: Path, emulated: bool
) -> None:
    """Try all that needs a GPU: a checkout's tests, then benchmarks from small to large. Each is a
    process of its own with a time limit, and what ended is kept: call it again, and it goes on.
    """
    from orchestrator.lab.gpu_check import run

    if not run(report, part, step, emulated, say):
        ctx.exit(1)
