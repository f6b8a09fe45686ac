"""The command line of the measurements: `moe-edge bench` and what is below it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from orchestrator.cli_files import AT_LEAST_1, NamedPath, Number, note
from orchestrator.cli_options import F, given, together
from orchestrator.errors import ConfigError


def measure_options(
    *,
    routing: str,
    tokens: int,
    runs: int,
    prompt_tokens: int | None,
    caps: str = "60,80",
    capped: str = "the model file",
) -> Callable[[F], F]:
    """The options of every measurement, with the defaults that a command's help shows.

    prompt_tokens None: the command has prompts of several lengths, and an option for them.
    capped: what the caps are shares of.
    """
    options = [
        click.option(
            "--shape",
            metavar="NAME",
            help="Experts of a random-weight model, as olmoe, mixtral, qwen3-30b; or demo, the "
            "trained model.  [default: olmoe]",
        ),
        click.option(
            "--routing",
            metavar="KIND",
            help="How a random-weight model uses its experts: uniform, zipf, or topics: zipf, and "
            "other experts for the other half of the vocabulary.  [default: "
            f"{routing}]",
        ),
        click.option(
            "--caps",
            metavar="LIST",
            help=f"Memory caps in % of {capped}.  [default: {caps}]",
        ),
        click.option(
            "--tokens",
            type=AT_LEAST_1,
            metavar="N",
            help=f"Measured decode steps.  [default: {tokens}]",
        ),
        click.option(
            "--prompt-tokens",
            type=AT_LEAST_1,
            metavar="N",
            help=f"Prompt length.  [default: {prompt_tokens}]",
        ),
        click.option(
            "--runs",
            type=AT_LEAST_1,
            metavar="N",
            help=f"Passes over all cases.  [default: {runs}]",
        ),
        click.option(
            "--threads", type=AT_LEAST_1, metavar="N", help="Compute threads.  [default: the cores]"
        ),
        click.option(
            "--seed",
            type=click.IntRange(min=0),
            metavar="N",
            help="Seed of the weights and of the tokens.  [default: 0]",
        ),
        click.option(
            "--quick", is_flag=True, help="A tiny model, in seconds; no figures to quote."
        ),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    ]
    if prompt_tokens is None:
        del options[4]
    return together(*options)


retention_option = click.option(
    "--retention",
    type=Number(0, 1),
    metavar="R",
    help="Share of critical experts of dymoe.  [default: 0.75]",
)

prefetch_option = click.option(
    "--prefetch",
    type=click.Choice(["on", "auto"]),
    help="auto: as in a chat, with its trials whether it pays.  [default: on]",
)


def _chosen(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, caps as shares. Raises ConfigError."""
    from orchestrator.bench.plan import DEMO, parse_caps

    chosen = given(options)
    if chosen.get("shape") == DEMO and "routing" in chosen:
        raise ConfigError(
            "--routing has no effect with --shape demo, which routes as it was trained: leave one "
            "of the two out"
        )
    if "caps" in chosen:
        chosen["caps"] = parse_caps(chosen["caps"])
    return chosen


@click.group(
    invoke_without_command=True, short_help="Measure upstream and every policy on this machine."
)
@measure_options(routing="uniform", tokens=128, runs=2, prompt_tokens=128)
@retention_option
@click.pass_context
def bench(ctx: click.Context, /, as_json: bool, **options: Any) -> None:
    """Measure this machine: upstream and every policy under memory caps.

    Options of a command below come after its name.
    """
    if ctx.invoked_subcommand is not None:
        for parameter in ctx.command.params:
            source = ctx.get_parameter_source(parameter.name or "")
            if source is ParameterSource.COMMANDLINE:
                raise click.UsageError(
                    f"{parameter.opts[0]} comes after the command: moe-edge bench "
                    f"{ctx.invoked_subcommand} {parameter.opts[0]} .."
                )
        return
    from orchestrator.bench import BenchOptions, render, run

    result = run(BenchOptions(**_chosen(options)), note)
    click.echo(json.dumps(result) if as_json else render(result))


@bench.command()
@measure_options(routing="zipf", tokens=96, runs=3, prompt_tokens=32)
@retention_option
@click.option(
    "--turns",
    type=AT_LEAST_1,
    metavar="N",
    help="Prompts of one process after a first one; they share the decode steps.  [default: 3]",
)
@prefetch_option
@click.option(
    "--out",
    type=NamedPath(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write a plot there, as PNG and SVG; needs the extra `plot`.",
)
def ablation(as_json: bool, out: Path | None, **options: Any) -> None:
    """Six rows as in Table 3 of the DyMoE paper: what each part brings.

    TTFT is that of a prompt after decode steps of another conversation; cold TTFT that of the
    first prompt, with nothing in memory.
    """
    from orchestrator.bench import AblationOptions, render_ablation, run_ablation

    checked = AblationOptions(**_chosen(options))
    if out is not None:
        from orchestrator.bench import plot

        plot.prepare(out)
    result = run_ablation(checked, note)
    if out is not None:
        for path in plot.draw(result, out):
            note(f"wrote {path}")
    click.echo(json.dumps(result) if as_json else render_ablation(result))


@bench.command()
@measure_options(routing="zipf", tokens=32, runs=2, prompt_tokens=None)
@retention_option
@click.option(
    "--prompts", metavar="LIST", help="Prompt lengths in tokens.  [default: 8,16,32,64,128]"
)
@click.option(
    "--repeats",
    type=AT_LEAST_1,
    metavar="N",
    help="Prompts of each length in one run.  [default: 3]",
)
@click.option(
    "--long",
    "long_tokens",
    type=click.IntRange(min=0),
    metavar="N",
    help="Length of a prompt in the middle of decoding, 0 for none.  [default: 1024; 512 for the "
    "demo]",
)
@click.option(
    "--ubatch",
    type=AT_LEAST_1,
    metavar="N",
    help="Tokens of a prompt that are evaluated at once.  [default: 128]",
)
@prefetch_option
def prefill(as_json: bool, prompts: str | None, **options: Any) -> None:
    """First token by prompt length; what a long prompt does.

    One precision against 4/2 and 4/0 under the same memory caps, and what a long prompt does
    to the experts that decoding had in memory.
    """
    from orchestrator.bench import PrefillOptions, render_prefill, run_prefill
    from orchestrator.bench.plan import parse_numbers

    chosen = _chosen(options)
    if prompts is not None:
        chosen["prompts"] = parse_numbers(prompts, "prompt lengths")
    result = run_prefill(PrefillOptions(**chosen), note)
    click.echo(json.dumps(result) if as_json else render_prefill(result))


@bench.command()
@measure_options(routing="topics", tokens=256, runs=2, prompt_tokens=32, caps="80")
@click.option(
    "--switches", type=AT_LEAST_1, metavar="N", help="Changes of the topic.  [default: 4]"
)
@click.option(
    "--steady",
    type=AT_LEAST_1,
    metavar="N",
    help="Decode steps at the end that stay with one topic.  [default: 512]",
)
@click.option(
    "--updates",
    metavar="LIST",
    help="Intervals of dynaexq in decode steps.  [default: 8,16,32,64,128]",
)
@click.option(
    "--rates",
    metavar="LIST",
    help="What its exchange of experts may read, in MiB a second, 0 for no limit, as "
    "16,64,256,0: a row each.",
)
def topics(as_json: bool, updates: str | None, rates: str | None, **options: Any) -> None:
    """dynaexq while the topic changes.

    How even its steps stay, how soon the hot set has followed, how many experts are promoted
    with and without hysteresis, and what the slowest steps have in common.
    """
    from orchestrator.bench import TopicOptions, render_topics, run_topics
    from orchestrator.bench.plan import parse_numbers

    chosen = _chosen(options)
    for name, text in (("updates", updates), ("rates", rates)):
        if text is not None:
            chosen[name] = parse_numbers(text)
    result = run_topics(TopicOptions(**chosen), note)
    click.echo(json.dumps(result) if as_json else render_topics(result))


@bench.command()
@measure_options(routing="zipf", tokens=64, runs=2, prompt_tokens=32, caps="80")
@retention_option
@click.option(
    "--batches",
    metavar="LIST",
    help="How many sequences decode together.  [default: 1,2,4,8,16,32]",
)
def batch(as_json: bool, batches: str | None, **options: Any) -> None:
    """Several sequences that decode together, a token each a step, under every policy."""
    from orchestrator.bench import BatchOptions, render_batch, run_batch
    from orchestrator.bench.plan import parse_numbers

    chosen = _chosen(options)
    if batches is not None:
        chosen["batches"] = parse_numbers(batches, "batches")
    result = run_batch(BatchOptions(**chosen), note)
    click.echo(json.dumps(result) if as_json else render_batch(result))


@bench.command()
@measure_options(
    routing="zipf", tokens=128, runs=2, prompt_tokens=2048, caps="25,50", capped="the experts"
)
@retention_option
@click.option("--device", metavar="NAME", help="The GPU.  [default: cuda0]")
@click.option(
    "--layers",
    type=AT_LEAST_1,
    metavar="N",
    help="Layers of a random-weight model: qwen3-30b has 48 in full, mixtral 32.  [default: 6, 4]",
)
def gpu(as_json: bool, **options: Any) -> None:
    """Upstream and every policy on a GPU, against the bound and the goals.

    A cap is the share of the expert bytes that the GPU's memory holds beside the rest of the
    model. Upstream keeps the experts of the layers that do not fit on the CPU.
    """
    from orchestrator.bench import GpuOptions, render_gpu, run_gpu

    result = run_gpu(GpuOptions(**_chosen(options)), note)
    click.echo(json.dumps(result) if as_json else render_gpu(result))
