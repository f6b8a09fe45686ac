"""Commands about model files and the cache.

They are `inspect`, `verify`, `architectures`, `pull`, `list`, `rm` and `cache`.
"""

from __future__ import annotations

import glob
import json
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import click

from gguf_tools.columns import aligned
from gguf_tools.units import format_size
from orchestrator.chat.console import progress_bar
from orchestrator.cli.help import Command
from orchestrator.cli.options import (
    FORCE,
    JSON,
    LOW,
    NEW_FILE,
    THREADS,
    model_argument,
    note,
    option,
    say,
    say_result,
)
from orchestrator.errors import ConfigError, HubError, MoeEdgeError, SeveralModelsError

# Exit status of verify for an undamaged file that llama.cpp cannot load.
CANNOT_RUN = 3


@click.command(cls=Command)
@model_argument
@LOW
@JSON
@option(
    "--plot picture OUT.png",
    "Draw the bytes of each layer and precision to a file (.png or .svg). Needs the extra `plot`.",
    type=NEW_FILE,
)
@FORCE
def inspect(file: Path, low: Path | None, as_json: bool, picture: Path | None) -> None:
    """Show the contents of a model file, and which of its parts fit in which memory budget."""
    from gguf_tools.experts import ExpertModel
    from gguf_tools.inspect import describe, render
    from orchestrator.cli import pictures
    from orchestrator.config import Config
    from orchestrator.plan.planning import scratch_bytes
    from orchestrator.runtime.support import support_of

    if picture is not None:
        pictures.prepare(picture)
    with ExpertModel.open(file, low) as model:
        facts = describe(model, scratch_bytes(model, Config.build(model=file)))
    found = support_of(file)
    facts["support"] = found and asdict(found)
    if picture is not None:
        pictures.draw_layers(facts, picture)
        note(str(picture))
    say_result(facts, render, as_json)
    if found is not None and not as_json:
        say(f"  {found.sentence}")


@click.command(cls=Command)
@model_argument
@LOW
@THREADS
@JSON
@click.pass_context
def verify(
    ctx: click.Context, file: Path, low: Path | None, threads: int | None, as_json: bool
) -> None:
    """Check every block and the metadata of a model file, and whether llama.cpp can load it.

    The exit status is 0 for a good file, 1 for a damaged file, and 3 for an undamaged file that
    llama.cpp cannot load.
    """
    from gguf_tools.experts import ExpertModel
    from gguf_tools.verify import verify as run
    from orchestrator.runtime.support import NOT, Support, support_of

    with progress_bar("Verifying") as progress:
        report = run(file, low, progress=progress, threads=threads)
    found = None
    if report.no_experts:
        found = Support(NOT, report.no_experts.removeprefix(f"{report.files[0]}: "))
    elif not report.problems:
        with ExpertModel.open(file):  # reports missing metadata first
            found = support_of(file)
    if as_json:
        click.echo(json.dumps(report.as_dict() | {"support": found and asdict(found)}))
    elif report.problems:
        for problem in report.problems:
            say(problem.text)
    else:
        more = f" and {len(report.files) - 1} more" if len(report.files) > 1 else ""
        experts = f"experts in {', '.join(report.tiers)}" if report.tiers else "no experts"
        say(
            f"{report.files[0]}{more}: no problems found; {report.n_tensors} tensors,"
            f" {format_size(report.nbytes)}, {experts}"
        )
        if report.unchecked:
            note(
                f"Note: {report.unchecked[0]} has no checksums. A damaged weight is found only if "
                "the weight is infinite or NaN. Files from `moe-edge pack` and `moe-edge pull` "
                "have checksums."
            )
        if found is not None and found.reason:
            note(f"Note: {file}: {found.sentence}")
    if report.problems:
        ctx.exit(1)
    if found is not None and found.runs == NOT:
        ctx.exit(CANNOT_RUN)


@click.command(cls=Command)
@JSON
def architectures(as_json: bool) -> None:
    """List the architectures that are tested with experts on disk, by their names in GGUF files.

    Other architectures also run with experts on disk if llama.cpp's graph allows it. The command
    inspect shows how a file would run.
    """
    from gguf_tools.experts import PROVEN

    names = sorted(PROVEN)
    say_result({"managed": names}, lambda _: "\n".join(names), as_json)


@click.command(cls=Command)
@click.argument("repo", metavar="REPO")
@option(
    "--include PATTERN",
    "Pattern of the files to download, such as '*Q4_K_M*'. May be repeated.  [default: the model, "
    "if REPO has only one]",
    multiple=True,
)
@option("--revision R", "Branch, tag or commit.  [default: main]")
@JSON
def pull(repo: str, include: tuple[str, ...], revision: str | None, as_json: bool) -> None:
    """Download a model from the Hugging Face Hub, as OWNER/NAME or OWNER/NAME/FILE.

    Files are stored in huggingface_hub's cache (HF_HOME). An interrupted download continues when
    the command is repeated. For gated models, set HF_TOKEN or run `hf auth login`.

    If OWNER/NAME contains several models, nothing is downloaded. The command shows how each of them
    would run on this machine, and ends with status 1.
    """
    from gguf_tools import hub
    from gguf_tools.hub import PREFIX

    owner, _, rest = repo.removeprefix(PREFIX).partition("/")
    name, _, wanted = rest.partition("/")
    patterns = (*include, glob.escape(wanted)) if wanted else include
    try:
        found = hub.prepare(f"{owner}/{name}" if rest else owner, patterns, revision)
    except SeveralModelsError as error:
        _refuse_several(error, f"{owner}/{name}", revision, as_json)
    note(found.summary())
    try:
        with progress_bar("Downloading") as progress:
            paths = hub.fetch(found, progress)
    except KeyboardInterrupt:
        note("Interrupted: the downloaded part is kept. Repeat the command to continue.")
        raise
    models = [str(file.path) for file in found.files if file.name in found.models]
    if as_json:
        facts = {"repo": found.repo, "commit": found.commit, "bytes": found.nbytes}
        click.echo(json.dumps({**facts, "files": list(map(str, paths)), "models": models}))
        return
    for path in paths:
        say(str(path))
    for model in models:
        say(f"moe-edge chat -m {shlex.quote(model)}")
    if not models:
        note("There is no GGUF among the files. Convert the checkpoint before you run it:")
        target = f"{name or owner}.gguf"
        folder = found.folder / "snapshots" / found.commit
        note(f"moe-edge convert --tiers q4_k,q2_k {shlex.quote(str(folder))} {shlex.quote(target)}")


def _refuse_several(
    error: SeveralModelsError, repo: str, revision: str | None, as_json: bool
) -> NoReturn:
    """Show how the models of a repository would run here, and raise a HubError.

    The table goes to stderr, because nothing was downloaded; JSON goes to stdout. If the models
    cannot be compared, the given error is raised again. It lists the models.
    """
    from gguf_tools.hub import list_models
    from orchestrator.cli.compared import compare_here, render_compared

    try:
        found = compare_here(list_models(repo, revision), {})
    except (MoeEdgeError, OSError):
        raise error from None
    if as_json:
        click.echo(json.dumps(found.as_dict()))
    else:
        note(f"{render_compared(found)}\n")
    best = "None of these models would run on this machine"
    if found.best is not None:
        more = f" --revision {shlex.quote(revision)}" if revision else ""
        command = f"moe-edge pull {shlex.quote(f'{repo}/{found.best}')}{more}"
        best = f"To download the model that suits this machine best, run `{command}`"
    raise HubError(
        f"{repo} contains {len(found.rows) + found.left_out} models. Name one as {repo}/FILE, or "
        f"several with --include PATTERN. {best}"
    )


@click.command("list", cls=Command)
@JSON
def list_models(as_json: bool) -> None:
    """List the downloaded models. The option -m accepts each of the listed names."""
    from gguf_tools.hub import pulled, short_name

    models = pulled()
    rows: list[dict[str, Any]] = [
        {
            "name": short_name(each, models),
            "bytes": each.nbytes,
            "used": time.strftime("%Y-%m-%d", time.localtime(each.used_s)),
            "repo": each.repo,
            "file": each.file or None,
            "path": str(each.paths[0]),
        }
        for each in models
    ]
    if not rows and not as_json:
        note("There are no downloaded models. `moe-edge pull OWNER/NAME` downloads one.")
        return
    shown = [("name", "size", "used", "from")]
    for row in rows:
        source = row["repo"] if row["file"] else "a checkpoint, for convert"
        shown.append((row["name"], format_size(row["bytes"]), row["used"], source))
    say_result({"models": rows}, lambda _: "\n".join(aligned(shown)), as_json)


@click.command("rm", cls=Command)
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def remove_models(names: tuple[str, ...]) -> None:
    """Delete downloaded models, by the names that `moe-edge list` shows."""
    from gguf_tools.hub import find_pulled, remove

    chosen = []
    for name in names:
        found = find_pulled(name, gguf=False)
        if found is None:
            raise ConfigError(
                f"{name}: there is no downloaded model of this name: `moe-edge list` shows all"
            )
        chosen.append(found)
    for found in dict.fromkeys(chosen):
        say(f"{found.names[0]}: {format_size(remove(found))} freed")


@click.command("cache", cls=Command)
@option(
    "--clear NAME",
    "Delete the folder NAME of the cache, or every folder if NAME is all. May be repeated.",
    multiple=True,
)
@JSON
def cache(clear: tuple[str, ...], as_json: bool) -> None:
    """List the folders of the user cache, or delete them.

    Everything except conversations is recreated when it is needed. Downloaded models are in another
    cache: see `moe-edge list`.
    """
    from orchestrator.cache.files import clear_cache, user_cache, user_folder

    found = clear_cache(clear) if clear else user_cache()
    total = format_size(sum(each.nbytes for each in found))
    if as_json:
        rows = [
            {"name": each.name, "path": str(each.path), "files": each.n_files, "bytes": each.nbytes}
            for each in found
        ]
        click.echo(json.dumps({"cleared" if clear else "cache": rows}))
    elif clear:
        say(f"{', '.join(each.name for each in found) or 'nothing'}: {total} freed")
    else:
        note(f"{user_folder('cache')}: {total}")
        shown = [("name", "size", "files", "what it is")]
        for each in found:
            shown.append((each.name, format_size(each.nbytes), f"{each.n_files}", each.about))
        if found:
            say("\n".join(aligned(shown)))
