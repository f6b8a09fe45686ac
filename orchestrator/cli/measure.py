"""The commands that measure: `moe-edge bench` and those below it, `eval`, `calibrate`, `check`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from orchestrator.chat.console import Console, progress_bar, strip_controls
from orchestrator.cli.help import Command, Group
from orchestrator.cli.options import (
    AT_LEAST_0,
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
    check_study,
    chosen_method,
    given,
    make_config,
    model_argument,
    model_options,
    names_of,
    note,
    option,
    option_of,
    print_notes,
    refuse_taken,
    say,
    say_result,
    say_tables,
)
from orchestrator.errors import ConfigError
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
@option("--text FILE", "Text to predict. A .jsonl has one in each record, and .xz is unpacked.")
@option("--choices FILE", 'Questions to answer, as JSON lines {"question", "choices", "answer"}.')
@option("--kl", "Compare with the best precision of the file.")
@option("--kl-from TIER", "With this one instead, as the best one in use.", group=MORE)
@option("--max-tokens tokens N", "Use N tokens of the text at most.")
# What scripts may still call it.
@option("--tokens as_before N", "", hidden=True)
@option("--window N", "Tokens of one context.  [default: 512]", type=int, group=MORE)
@option(
    "--prompt-tokens N",
    "Read the first N tokens of each window, and the context of a record, as a prompt that is not "
    "scored.",
    type=AT_LEAST_0,
    group=MORE,
)
@option("--prefill", "Judge the text read as prompts, not by token.", group=MORE)
@option(
    "--reuse",
    "A low request may use a high copy in memory, as in a chat; results then depend on the memory.",
    group=MORE,
)
@option(
    "--bandwidth SIZE",
    "Reads in bytes a second, as 2GB, of the virtual time in which a policy decides that goes by "
    "what is in memory.  [default: measured]",
    group=MORE,
)
@option(
    "--latency-us N",
    "What a read takes beside its bytes, in microseconds.  [default: measured]",
    type=click.IntRange(0, 10**7),
    group=MORE,
)
@option(
    "--compute-ms MS",
    "Computing a token in that time, without waits.  [default: measured]",
    type=Number(0, 10**6),
    group=MORE,
)
@option(
    "--study NAME",
    f"Tables and a figure of a study. Known are {'; '.join(studies_by_paper())}.",
)
@option(
    "--uniform TYPES",
    "What the studies memory and equal compare with, all experts in one type: precisions made from "
    "the best one, .gguf files of the same model, or none.  [default: q2_k,q3_k,q4_k,q5_k,q6_k]",
    group=MORE,
)
@option(
    "--calib TEXT",
    "Text for an importance matrix: each of --uniform is then made with one as well.",
    type=FILE,
    group=MORE,
)
@STUDY_OUT
@FORCE
@JSON
def evaluate(study: str | None, out: Path | None, as_json: bool, **options: Any) -> None:
    """Measure quality: perplexity, distance from the best precision, multiple choice.

    Each token is decided on its own, as in an answer: what is decided for a prompt sees its
    later tokens."""
    from dataclasses import fields

    from gguf_tools.experts import ExpertModel
    from orchestrator.lab.eval import EvalOptions, render
    from orchestrator.lab.eval import evaluate as run
    from orchestrator.memory.plan import notes_of

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
    with Console().bars() as console:
        if study is None:
            result = run(config, wanted, console.bar)
        else:
            tables = load(STUDIES, study).publish(config, wanted, out, console.bar, console.note)
    with ExpertModel.open(config.model, config.low) as model:
        print_notes(notes_of(config, model))
    if study is None:
        say_result(result, render, as_json)
    else:
        say_tables(study, tables, as_json)


@click.command(cls=Command)
@model_argument
@option("--calib TEXT", "The text to read.", type=FILE, required=True)
@CALIB_TOKENS
@option(
    "--reference FILE",
    "The same model in full precision, as F16.  [default: the best precision of the file]",
)
@option(
    "--types LIST",
    "Precisions to measure beside the file's, as q4_k,q2_k, quantized from the reference.",
    default="",
)
@option("--method NAME", "How those are quantized: rtn, imatrix, gptq.  [default: rtn]")
@option("--out FILE", "The table.  [default: FILE.calib.json]", type=NEW_FILE)
@option(
    "--save-imatrix FILE",
    "Write an importance matrix of the text, and no table.",
    type=NEW_FILE,
)
@RAM
@THREADS
@FORCE
def calibrate(
    file: Path, reference: Path | None, out: Path | None, save_imatrix: Path | None, **options: Any
) -> None:
    """Measure what each expert's output loses in each precision, on a text.

    The table stands beside the file, where policies that choose precisions find it. A run that
    was interrupted goes on where it was.
    """
    from orchestrator.cache.files import check_target
    from orchestrator.cost.losses import default_path
    from orchestrator.lab.calibrate import methods
    from orchestrator.lab.calibrate import table as tables

    if save_imatrix is not None and (out is not None or options["method"] is not None):
        unused = "--method" if out is None else "--out"
        raise click.UsageError(f"{unused} is for the table, which --save-imatrix leaves out")
    if save_imatrix is None:
        options["calib_tokens"] = options["calib_tokens"] or tables.TOKENS
    method = chosen_method(options)
    target = save_imatrix or out or default_path(file)
    refuse_taken(target)
    try:
        check_target(target)
    except OSError as error:
        if target in (save_imatrix, out):
            raise
        raise ConfigError(
            f"{target}: {error.strerror}: the table belongs beside the model. Write it elsewhere "
            f"with --out FILE, and name it with --losses FILE when the model runs"
        ) from error
    if save_imatrix is not None:
        with progress_bar("Calibrating") as progress:
            weak = methods.save_imatrix(method, reference or file, save_imatrix, progress)
        print_notes([weak] if weak else [])
        say(str(save_imatrix))
        return
    notes: list[str] = []
    with Console().bars() as console:
        table = tables.measure_losses(
            method, file, reference, names_of(options["types"]), target, console.bar, notes.append
        )
    print_notes(notes)
    say(f"{target}: {table.calibration}")
    say(table.render())


@click.command(cls=Command)
@model_options
@option("--tokens N", "Decode N tokens in each run.  [default: 64]", default=64)
@option(
    "--all-tiers",
    "Compare the lower precisions as well. Those of a packed file are exported to the folder of "
    "temporary files first.",
)
@option("--no-verify", "Do not read every block of the file first.")
@option("--out FILE", "Write the report there, too.", type=NEW_FILE)
@FORCE
@JSON
def check(
    tokens: int, all_tiers: bool, no_verify: bool, out: Path | None, as_json: bool, **options: Any
) -> None:
    """Try a model: its file, tokenizer and template; its bits against llama.cpp's own path; its
    memory against what was promised, at three budgets; and its speed. The report names the file,
    this machine and its processor. The exit status is 0 where all is good."""
    from orchestrator.cache.files import check_target, write_whole
    from orchestrator.lab.check import CheckOptions, examine, render

    if out is not None:
        check_target(out)
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
@option("--part NAME", "One part: device, kernels, managed, ..., bench.")
@option("--step TEXT", "Steps whose line has it, anew.", default="")
@option(
    "--report FILE",
    "What is written; a folder of its name lies beside it.",
    default="gpu-report.md",
    show_default=True,
)
@option("--emulated", "Show the procedure on a checkout's emulated GPU.")
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
