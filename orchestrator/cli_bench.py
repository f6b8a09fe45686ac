"""The command line of the measurements: `moe-edge bench` and what is below it.

A command takes its options from the experiment of its name, which is loaded when they are asked
for.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from orchestrator.cli_files import NamedPath, Number, note
from orchestrator.cli_options import given
from orchestrator.lab.registry import BENCHMARKS, load_benchmark

if TYPE_CHECKING:
    from dataclasses import Field

    from orchestrator.lab.option import Option

_JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object.")
_OUT = click.Option(
    ["--out"],
    type=NamedPath(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write a plot there, as PNG and SVG; needs the extra `plot`.",
)


class Measurement(click.Command):
    """The command of one experiment."""

    experiment = ""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The experiment's options; it is loaded here."""
        if not self.params:
            self.params = list(_options_of(self.experiment))
        return super().get_params(ctx)


class Measurements(Measurement, click.Group):
    """`moe-edge bench`: an experiment itself, and the commands of the others."""


def _options_of(name: str) -> list[click.Option]:
    from orchestrator.lab.option import declared_options

    experiment = load_benchmark(name)
    found = [
        _option(field, declared)
        for field, declared in declared_options(experiment.options)
        if declared.help
    ]
    return [*found, _JSON, *([_OUT] if experiment.draws else [])]


def _option(field: Field[Any], declared: Option) -> click.Option:
    spelled = declared.spelled or "--" + field.name.replace("_", "-")
    if field.default is False:
        return click.Option([spelled, field.name], is_flag=True, help=declared.help)
    told = declared.told or ("" if field.default is None else declared.shown(field.default))
    kind: Any = None
    if declared.choices:
        kind = click.Choice(declared.choices)
    elif declared.least is not None:
        of = Number if isinstance(field.default, float) else click.IntRange
        kind = of(declared.least, declared.most)
    return click.Option(
        [spelled, field.name],
        type=kind,
        metavar=None if declared.choices else declared.metavar,
        help=f"{declared.help}  [default: {told}]" if told else declared.help,
    )


def _measure(name: str, as_json: bool, out: Path | None = None, **options: Any) -> None:
    """Runs one experiment with the options that were given, and prints its report."""
    experiment = load_benchmark(name)
    asked = experiment.options.from_texts(given(options))
    if out is not None:
        from orchestrator.plotting import require_matplotlib

        require_matplotlib("--out")
        out.mkdir(parents=True, exist_ok=True)
    report = experiment.run(asked, note)
    if out is not None:
        for path in experiment.draw(report, out):
            note(f"wrote {path}")
    click.echo(json.dumps(report) if as_json else experiment.text(report))


@click.group(
    cls=Measurements,
    invoke_without_command=True,
    short_help="Measure upstream and every policy on this machine.",
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
        _command = Measurement(_name, callback=partial(_measure, _name), help=_place.help)
        _command.experiment = _name
        bench.add_command(_command)
