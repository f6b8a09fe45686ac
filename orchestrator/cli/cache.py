"""The command line of what takes room: `moe-edge list`, `rm` and `cache`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import click

from gguf_tools.columns import aligned
from gguf_tools.units import format_size
from orchestrator.chat.console import strip_controls
from orchestrator.cli.files import note
from orchestrator.errors import ConfigError

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.command("list")
@JSON
def list_models(as_json: bool) -> None:
    """List the models that were pulled. Each name is one that -m understands."""
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
    if as_json:
        click.echo(json.dumps({"models": rows}))
        return
    if not rows:
        note("No model was pulled: `moe-edge pull OWNER/NAME` fetches one.")
        return
    shown = [
        (
            row["name"],
            format_size(row["bytes"]),
            row["used"],
            row["repo"] if row["file"] else "a checkpoint, for convert",
        )
        for row in rows
    ]
    _print_table(("name", "size", "used", "from"), shown)


@click.command("rm")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def remove_models(names: tuple[str, ...]) -> None:
    """Remove models that were pulled, by the names that `moe-edge list` shows."""
    from gguf_tools.hub import find_pulled, remove

    chosen = []
    for name in names:
        found = find_pulled(name, gguf=False)
        if found is None:
            raise ConfigError(f"{name}: no model of this name was pulled: `moe-edge list`")
        chosen.append(found)
    for found in dict.fromkeys(chosen):
        click.echo(strip_controls(f"{found.names[0]}: {format_size(remove(found))} freed"))


@click.command("cache")
@click.option(
    "--clear",
    multiple=True,
    metavar="NAME",
    help="Delete this folder of it, or all; may be repeated.",
)
@JSON
def cache(clear: tuple[str, ...], as_json: bool) -> None:
    """List what lies in the user cache, as models of benchmarks, or delete it.

    All of it is made again when it is needed. Models that were pulled lie elsewhere: `moe-edge
    list`."""
    from orchestrator.cache.files import clear_cache, user_cache, user_folder

    found = clear_cache(clear) if clear else user_cache()
    if as_json:
        rows = [
            {"name": each.name, "path": str(each.path), "files": each.n_files, "bytes": each.nbytes}
            for each in found
        ]
        click.echo(json.dumps({"cleared" if clear else "cache": rows}))
        return
    if clear:
        freed = format_size(sum(each.nbytes for each in found))
        click.echo(f"{', '.join(each.name for each in found) or 'nothing'}: {freed} freed")
        return
    shown = [(each.name, format_size(each.nbytes), f"{each.n_files}", each.about) for each in found]
    total = format_size(sum(each.nbytes for each in found))
    note(f"{user_folder('cache')}: {total}")
    if shown:
        _print_table(("name", "size", "files", "what it is"), shown)


def _print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    for line in aligned([head, *rows]):
        click.echo(strip_controls(line))
