"""The command line of the measurements: `moe-edge bench` and what is below it.

A command takes its options from the experiment of its name, which is loaded when they are asked
for.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from orchestrator.cli.files import FORCE, NamedPath, note, refuse_taken
from orchestrator.cli.options import bad_option, option_of
from orchestrator.errors import SettingError
from orchestrator.lab.registry import BENCHMARKS, load_benchmark

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
            experiment = load_benchmark(self.experiment)
            for declared in experiment.options.declared().values():
                if declared.option:
                    option_of(declared)(self)
            self.params.append(_JSON)
            if experiment.draws:
                self.params.append(_OUT)
                FORCE(self)
        return super().get_params(ctx)


class Measurements(Measurement, click.Group):
    """`moe-edge bench`: an experiment itself, and the commands of the others."""


def _measure(name: str, as_json: bool, out: Path | None = None, **options: Any) -> None:
    """Runs one experiment with the options that were given, and prints its report."""
    experiment = load_benchmark(name)
    try:
        asked = experiment.options.of(options)
    except SettingError as error:
        raise bad_option(error) from error
    if out is not None:
        from orchestrator.lab.plotting import require_matplotlib

        require_matplotlib("--out")
        for path in out.glob(f"{name}*.png"):
            refuse_taken(path, click.get_current_context())
        out.mkdir(parents=True, exist_ok=True)
    report = experiment.run(asked, note)
    if out is not None:
        for path in experiment.draw(report, out):
            note(f"wrote {path}")
    click.echo(json.dumps(report) if as_json else experiment.text(report))


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
        _command = Measurement(_name, callback=partial(_measure, _name), help=_place.help)
        _command.experiment = _name
        bench.add_command(_command)
