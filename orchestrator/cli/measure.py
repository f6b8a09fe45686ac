"""Commands that measure: `bench` and its subcommands, `eval`, `calibrate`, `check`, `gpu-check`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    THREADS,
    Number,
    as_options,
    chat_config,
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
)
from orchestrator.errors import ConfigError
from orchestrator.lab.registry import BENCHMARKS, load
from orchestrator.settings import MORE

if TYPE_CHECKING:
    from orchestrator.cost.losses import LossTable
    from orchestrator.lab.calibrate.methods import Method


class BenchmarkCommand(Command):
    """A click command, such as `moe-edge bench NAME`, that runs one benchmark.

    Its options are those that the benchmark declares.

    benchmark: the name of the benchmark.
    """

    benchmark = ""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the options of the benchmark. The first call imports the benchmark's module."""
        if not self.params:
            experiment = load(self.benchmark)
            for declared in experiment.options.declared().values():
                if declared.option:
                    option_of(declared)(self)
            JSON(self)
        return super().get_params(ctx)


class BenchmarkGroup(BenchmarkCommand, Group):
    """The command `moe-edge bench`: a default benchmark, with other benchmarks as subcommands."""


def _measure(name: str, as_json: bool, **options: Any) -> None:
    """Run a benchmark with the given options, and print its report."""
    experiment = load(name)
    with as_options():
        asked = experiment.options.of(options)
    report = experiment.run(asked, note)
    say_result(report.as_dict(), lambda _: report.text(), as_json)


@click.group(
    cls=BenchmarkGroup,
    invoke_without_command=True,
    help=BENCHMARKS[""].help,
)
@click.pass_context
def bench(ctx: click.Context, /, **options: Any) -> None:
    """Run the default benchmark, unless a subcommand follows."""
    if ctx.invoked_subcommand is None:
        _measure("", **options)
        return
    for parameter in ctx.command.params:
        if ctx.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{parameter.opts[0]} must follow the subcommand: moe-edge bench "
                f"{ctx.invoked_subcommand} {parameter.opts[0]} .."
            )


for _name, _place in BENCHMARKS.items():
    if _name:
        _command = BenchmarkCommand(
            _name,
            callback=partial(_measure, _name),
            help=_place.help,
            short_help=_place.help.split("\n")[0],
        )
        _command.benchmark = _name
        bench.add_command(_command)


@click.command("eval", cls=Command)
@model_options
@option(
    "--text FILE",
    "Text to predict. A .jsonl file has one text per record, and .xz files are decompressed.",
)
@option(
    "--choices FILE",
    "Multiple-choice questions, as JSON lines. The fields are question, choices and answer.",
)
@option("--kl", "Also measure the KL divergence from the best precision of the file.")
@option(
    "--kl-from TIER",
    "Reference precision for --kl, instead of the best in the file. If it equals --high-tier, "
    "--kl measures only the loss of experts in lower precisions.",
    group=MORE,
)
@option("--max-tokens tokens N", "Use at most N tokens of the text.")
# The old name of --max-tokens, for scripts.
@option("--tokens as_before N", "", hidden=True)
@option(
    "--window N",
    "Length of the windows (pieces) into which the text is cut, in tokens.  [default: 512]",
    type=int,
    group=MORE,
)
@option(
    "--prompt-tokens N",
    "Read the first N tokens of each window (see --window) as a prompt, without scoring them. The "
    "field context of a .jsonl record is never scored.",
    type=AT_LEAST_0,
    group=MORE,
)
@option("--prefill", "Score the text in prefill, instead of token by token.", group=MORE)
@option(
    "--reuse",
    "Use the best copy of an expert in memory, even if the policy requests a lower precision. "
    "`moe-edge chat` does so. Results then depend on the contents of memory.",
    group=MORE,
)
@option(
    "--bandwidth SIZE",
    "Speed of the simulated disk in bytes per second, such as 2GB. Only policies whose decisions "
    "depend on the experts in memory have a simulated disk.  [default: measured]",
    group=MORE,
)
@option(
    "--latency-us N",
    "Latency of a read from the simulated disk (see --bandwidth), in microseconds.  [default: "
    "measured]",
    type=click.IntRange(0, 10**7),
    group=MORE,
)
@option(
    "--compute-ms MS",
    "Compute time per token in the simulation of the disk (see --bandwidth), in milliseconds. "
    "Time spent waiting for reads is not included.  [default: measured]",
    type=Number(0, 10**6),
    group=MORE,
)
@JSON
def evaluate(as_json: bool, **options: Any) -> None:
    """Measure quality: perplexity, KL divergence, multiple-choice accuracy.

    By default, the text is evaluated token by token, so the policy does not know later tokens.
    """
    from dataclasses import fields

    from gguf_tools.experts import ExpertModel
    from orchestrator.lab.eval import EvalOptions, render
    from orchestrator.lab.eval import evaluate as run
    from orchestrator.plan.options import notes_of

    as_before = options.pop("as_before")
    if as_before is not None and options["tokens"] is not None:
        raise click.UsageError("--tokens is the old name of --max-tokens: give only one of them")
    options["tokens"] = options["tokens"] or as_before
    names = {field.name for field in fields(EvalOptions)}
    chosen = {name: options.pop(name) for name in names & options.keys()}
    config, wanted = make_config(options), EvalOptions(**given(chosen))
    with Console().bars() as console:
        result = run(config, wanted, console.bar)
    with ExpertModel.open(config.model, config.low) as model:
        print_notes(notes_of(config, model))
    say_result(result, render, as_json)


@click.command(cls=Command)
@model_argument
@option(
    "--calib TEXT",
    "Text to measure on: plain text, .jsonl (one text per record), or compressed (.xz).  [default: "
    "a text that comes with moe-edge]",
    type=FILE,
)
@CALIB_TOKENS
@option(
    "--reference FILE",
    "File of the same model in full precision, such as F16.  [default: the best precision of "
    "MODEL]",
)
@option(
    "--types LIST",
    "Further precisions to measure, such as q4_k,q2_k. They are quantized from --reference.",
    default="",
)
@option("--method NAME", "Quantization method for --types: rtn, imatrix, gptq.  [default: rtn]")
@option("--out FILE", "File to write the loss table to.  [default: FILE.calib.json]", type=NEW_FILE)
@option(
    "--save-imatrix FILE",
    "Write an importance matrix of the text instead of a loss table.",
    type=NEW_FILE,
)
@RAM
@THREADS
@FORCE
def calibrate(
    file: Path, reference: Path | None, out: Path | None, save_imatrix: Path | None, **options: Any
) -> None:
    """Measure on a text how much quality each expert loses in each precision.

    The loss table is written next to the model, where --max-loss finds it. An interrupted run
    continues when the command is repeated.

    The default text has prose, dialogue, code, documentation, German and Spanish. It was written
    for this purpose and has the licence of moe-edge (MIT).
    """
    from orchestrator.cache.files import check_target
    from orchestrator.cost.calibrating import TOKENS
    from orchestrator.cost.losses import default_path
    from orchestrator.lab.calibrate import methods

    if save_imatrix is not None and options["calib"] is None:
        raise click.UsageError("--save-imatrix needs a long text: give --calib TEXT")
    if save_imatrix is not None and (out is not None or options["method"] is not None):
        unused = "--method" if out is None else "--out"
        raise click.UsageError(
            f"{unused} has no effect with --save-imatrix, which writes no loss table: leave one of "
            "them out"
        )
    if save_imatrix is None:
        options["calib_tokens"] = options["calib_tokens"] or TOKENS
    method = chosen_method(options, has_text=True)
    target = save_imatrix or out or default_path(file)
    refuse_taken(target)
    if save_imatrix or out:
        check_target(target)
    if save_imatrix is not None:
        with progress_bar("Calibrating") as progress:
            weak = methods.save_imatrix(method, reference or file, save_imatrix, progress)
        print_notes([weak] if weak else [])
        say(str(save_imatrix))
        return
    table = make_table(Console(), method, file, out, reference, names_of(options["types"]))
    say(f"{target}: {table.calibration}")
    say(table.render())


def make_table(
    console: Console,
    method: Method,
    file: Path,
    out: Path | None = None,
    reference: Path | None = None,
    types: Sequence[str] = (),
) -> LossTable:
    """Measure a model's loss table, write it to a file, and return it.

    A loss table has the error of each expert's output in each precision. The console shows the
    progress. method: the calibration text and how to quantize to `types`. out: the file, by default
    next to the model. reference: the model in full precision. types: further precisions to measure.
    Raises ConfigError if the model's folder cannot be written.
    """
    from orchestrator.cache.files import check_target
    from orchestrator.cost.losses import calibrate_command, default_path
    from orchestrator.lab.calibrate.table import measure_losses

    target = out or default_path(file)
    try:
        check_target(target)
    except OSError as error:
        if out is not None:
            raise
        raise ConfigError(
            f"the loss table {target} cannot be written: {error.strerror}. Run "
            f"{calibrate_command(file)} with --out FILE, and then the model with --losses FILE"
        ) from error
    with console.bars():
        show = partial(console.bar, "Calibrating")
        return measure_losses(method, file, reference, types, target, show, console.note)


@click.command(cls=Command)
@model_options
@option("--tokens N", "Tokens to decode in each run.  [default: 64]", default=64)
@option(
    "--all-tiers",
    "Also compare the output of each lower precision with llama.cpp's. Each lower precision of a "
    "packed file is first written to a temporary GGUF file.",
)
@option("--no-verify", "Do not check every block of the file for damage.")
@option("--out FILE", "Also write the report to this file.", type=NEW_FILE)
@FORCE
@JSON
def check(
    tokens: int, all_tiers: bool, no_verify: bool, out: Path | None, as_json: bool, **options: Any
) -> None:
    """Test a model, and write a report.

    The tests cover its file, tokenizer and chat template, its memory use at three budgets, and its
    speed. They also compare its output with llama.cpp's own. The report names the file and this
    machine's processor. The exit status is 0 if all tests pass.
    """
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
@option(
    "--part NAME",
    "Run only this part of the checks: device, kernels, managed, fused, engine, bench or table3.",
)
@option(
    "--step TEXT",
    "Run only the steps with this text in their name, command or part (see --part), even if they "
    "ran before.",
    default="",
)
@option(
    "--report FILE",
    "File to write the report to. Details go to a folder of the same name.",
    default="gpu-report.md",
    show_default=True,
)
@option(
    "--emulated",
    "Run only the tests that emulate a GPU on the CPU. Needs a source checkout.",
)
@click.pass_context
def gpu_check(
    ctx: click.Context, part: str | None, step: str, report: Path, emulated: bool
) -> None:
    """Test everything that needs a GPU.

    First run the tests of a checkout, then benchmarks from small to large. Each step is a process
    with a time limit. Finished steps are kept: repeat the command to continue after an
    interruption.
    """
    from orchestrator.lab.gpu_check import run

    if not run(report, part, step, emulated, say):
        ctx.exit(1)
