"""The command line of files as such: `moe-edge inspect`, `verify` and `pull`."""

from __future__ import annotations

import glob
import json
import math
import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gguf_tools import interrupts
from gguf_tools.units import format_size
from orchestrator.chat.console import progress_bar, strip_controls
from orchestrator.errors import GGUFError

if TYPE_CHECKING:
    from gguf_tools.pack import PackReport
    from orchestrator.engine.support import Support

# The status of verify for a file that is whole, of a model that llama.cpp does not load.
CANNOT_RUN = 3
# Where a context keeps whether outputs may be replaced.
_FORCE = "moe-edge.force"
AT_LEAST_1 = click.IntRange(min=1)


class NamedPath(click.Path):
    """A path that names something: "" would be the current folder."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "":
            self.fail("the name is empty", param, ctx)
        return super().convert(value, param, ctx)


class NewPath(NamedPath):
    """The name of an output. What has it already is replaced where FORCE was given, alone."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "-":
            self.fail("an output is a file, not stdout (./- is a file of that name)", param, ctx)
        path = super().convert(value, param, ctx)
        complaint = taken(path, ctx)
        if complaint:
            self.fail(complaint, param, ctx)
        return path


def taken(path: Path, ctx: click.Context) -> str | None:
    """Why an output of this name is not to be written, or None. Nobody writes over a folder."""
    from gguf_tools.file.unfinished import irregular

    complaint = irregular(path)
    if complaint:
        return f"{path} {complaint}"
    if ctx.meta.get(_FORCE) or not os.path.lexists(path) or path.is_dir():
        return None
    return f"{path} exists: choose another name, or replace it with --force"


def refuse_taken(path: Path, ctx: click.Context) -> None:
    """Raises UsageError where an output of this name is not to be written."""
    complaint = taken(path, ctx)
    if complaint:
        raise click.UsageError(complaint, ctx)


def _remember_force(ctx: click.Context, _param: click.Parameter, given: bool) -> None:
    ctx.meta[_FORCE] = given


class Number(click.FloatRange):
    """A number of a range; what is none (nan) is in no range."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is no number", param, ctx)
        return number


FILE = NamedPath(path_type=Path)
NEW_FILE = NewPath(path_type=Path)
# Of every command with an output. It is read before the output's name is.
FORCE = click.option(
    "--force",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_remember_force,
    help="Replace an output that exists.",
)
MODEL = click.argument(
    "file", metavar="FILE", type=FILE, callback=lambda _ctx, _param, value: model_path(str(value))
)
TIERS = click.option(
    "--tiers",
    required=True,
    metavar="LIST",
    help="Precisions to store, best first, as q8_0,q4_k,q2_k.",
)
THREADS = click.option(
    "--threads", type=AT_LEAST_1, metavar="N", help="Threads.  [default: the cores]"
)
LOW = click.option(
    "--low", type=FILE, metavar="LOW", help="The same model in a lower precision, as a second GGUF."
)


@click.command()
@MODEL
@LOW
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--plot",
    "picture",
    type=NEW_FILE,
    metavar="OUT.png",
    help="Draw the bytes of each layer and tier there (or .svg); needs the extra `plot`.",
)
@FORCE
def inspect(file: Path, low: Path | None, as_json: bool, picture: Path | None) -> None:
    """Show what a model file holds, and what fits which budget."""
    from gguf_tools.experts import ExpertModel
    from gguf_tools.inspect import describe, render
    from orchestrator.cli import pictures
    from orchestrator.config import Config
    from orchestrator.engine.support import support_of
    from orchestrator.memory.footprint import scratch_bytes

    if picture is not None:
        pictures.prepare(picture)
        interrupts.ends_with(picture)
    with ExpertModel.open(file, low) as model:
        facts = describe(model, scratch_bytes(model, Config.build(model=file)))
    found = support_of(file, facts["architecture"])
    facts["support"] = None if found is None else {"runs": found.runs, "reason": found.reason}
    if picture is not None:
        pictures.draw_layers(facts, picture)
        note(str(picture))
    click.echo(json.dumps(facts) if as_json else strip_controls(render(facts)))
    if found is not None and not as_json:
        click.echo(strip_controls(f"  {found.sentence}"))


@click.command()
@MODEL
@LOW
@THREADS
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def verify(
    ctx: click.Context, file: Path, low: Path | None, threads: int | None, as_json: bool
) -> None:
    """Check every block of a model file, and its metadata; and whether llama.cpp loads it.

    The exit status is 0 for a good file, 1 for a damaged one, and 3 for one that is whole and
    cannot run: llama.cpp does not load a model of its header."""
    from gguf_tools.verify import verify as run
    from orchestrator.engine.support import NOT

    with progress_bar("Verifying") as progress:
        report = run(file, low, progress=progress, threads=threads)
    found = None if report.problems else _support(file)
    if as_json:
        support = None if found is None else {"runs": found.runs, "reason": found.reason}
        click.echo(json.dumps(report.as_dict() | {"support": support}))
    elif report.problems:
        for problem in report.problems:
            click.echo(strip_controls(problem.text))
    else:
        more = f" and {len(report.files) - 1} more" if len(report.files) > 1 else ""
        click.echo(
            strip_controls(
                f"{report.files[0]}{more}: good: {report.n_tensors} tensors,"
                f" {format_size(report.nbytes)}, experts in {', '.join(report.tiers)}"
            )
        )
    if not as_json and not report.problems and report.unchecked:
        note(
            f"Note: {report.unchecked[0]}: has no checksums, as files have that `moe-edge pack` "
            f"wrote or `moe-edge pull` fetched: damage that leaves every number finite was not "
            f"looked for"
        )
    if found is not None and found.reason and not as_json:
        note(f"Note: {file}: {found.sentence}")
    if report.problems:
        ctx.exit(1)
    if found is not None and found.runs == NOT:
        ctx.exit(CANNOT_RUN)


def _support(file: Path) -> Support | None:
    from gguf_tools.experts import ExpertModel
    from orchestrator.engine.support import support_of

    with ExpertModel.open(file) as model:
        return support_of(file, model.hparams.arch)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def architectures(as_json: bool) -> None:
    """List the architectures whose experts can be managed, as GGUF files name them.

    Any other one that llama.cpp loads runs where all of it fits the memory. `moe-edge inspect` says
    of a file how it can run."""
    from orchestrator.native.llama import Bindings

    names = sorted(Bindings.load().library().managed_architectures())
    click.echo(json.dumps({"managed": names}) if as_json else "\n".join(names))


@click.command()
@click.argument("repo", metavar="REPO")
@click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Files to take, as '*Q4_K_M*'; may be repeated.  [default: the only model]",
)
@click.option("--revision", metavar="R", help="Branch, tag or commit.  [default: main]")
def pull(repo: str, include: tuple[str, ...], revision: str | None) -> None:
    """Download a model from the Hugging Face Hub, as OWNER/NAME or OWNER/NAME/FILE.

    It goes into the cache of huggingface_hub (HF_HOME); an interrupted download goes on where
    it ended. HF_TOKEN or `hf auth login` opens what needs it.
    """
    from gguf_tools import hub
    from gguf_tools.hub import PREFIX

    owner, _, rest = repo.removeprefix(PREFIX).partition("/")
    name, _, wanted = rest.partition("/")
    patterns = (*include, glob.escape(wanted)) if wanted else include
    found = hub.prepare(f"{owner}/{name}" if rest else owner, patterns, revision)
    note(found.summary())
    try:
        with progress_bar("Downloading") as progress:
            paths = hub.fetch(found, progress)
    except KeyboardInterrupt:
        note("Interrupted: what is here stays, and the same command goes on from there.")
        raise
    for path in paths:
        click.echo(strip_controls(str(path)))
    for file in found.files:
        if file.name in found.models:
            click.echo(strip_controls(f"moe-edge chat -m {shlex.quote(str(file.path))}"))
    if not found.models:
        note("No GGUF among them: a checkpoint has to be converted before it can run, as by")
        target = f"{name or owner}.gguf"
        folder = found.folder / "snapshots" / found.commit
        note(f"moe-edge convert --tiers q4_k,q2_k {shlex.quote(str(folder))} {shlex.quote(target)}")


def print_report(report: PackReport) -> None:
    """What was written on stdout, what is odd about it on stderr."""
    tiers = ", ".join(
        f"{name} {bpw:.2f} bits {format_size(nbytes)}" for name, bpw, nbytes in report.tiers
    )
    click.echo(strip_controls(f"{report.path}: {format_size(report.nbytes)}, experts in {tiers}"))
    print_notes((*report.fallbacks, *report.warnings))


def print_notes(sentences: Iterable[str]) -> None:
    """What is odd about a result, on stderr."""
    for sentence in sentences:
        note(f"Note: {sentence}")


def names_of(text: str) -> list[str]:
    """The names in a list that is written as q8_0,q4_k."""
    return [name.strip().lower() for name in text.split(",") if name.strip()]


def tier_names(text: str) -> list[str]:
    """The names in a --tiers option; UsageError where there is none."""
    names = names_of(text)
    if not names:
        raise click.UsageError("--tiers names no precision: write it as q8_0,q4_k,q2_k")
    return names


def model_path(text: str) -> Path:
    """The path that an option names: hf:OWNER/NAME and hf:OWNER/NAME/FILE are fetched; where no
    file has the name, a model that was pulled may (`moe-edge list`)."""
    from gguf_tools.hub import PREFIX

    if not text.startswith(PREFIX):
        return _local(Path(text)) if os.path.lexists(text) else _pulled(text) or _local(Path(text))
    from gguf_tools.hub import resolve

    return resolve(text, note, lambda: progress_bar("Downloading"))


def _pulled(name: str) -> Path | None:
    """The model of that name that was pulled. Raises HubError where several have it."""
    from gguf_tools.hub import find_pulled

    found = find_pulled(name)
    return None if found is None else found.paths[0]


def _local(path: Path) -> Path:
    """`path`, unless what it is says what was meant; all else is the reader's to refuse."""
    if path.is_dir():
        hint = "name a GGUF in it"
        if (path / "config.json").is_file():
            hint = "`moe-edge convert` makes one of a checkpoint"
        raise GGUFError(f"{path}: a folder, not a GGUF: {hint}")
    if path.parts and path.parts[0] in ("http:", "https:"):
        raise GGUFError(f"{path}: no file; from the Hugging Face Hub it is hf:OWNER/NAME")
    return path


def note(text: str) -> None:
    """A line on stderr."""
    click.echo(strip_controls(text), err=True)
