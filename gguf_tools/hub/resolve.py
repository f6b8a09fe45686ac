"""Models named on the command line as hf:OWNER/NAME: their local paths, downloaded where needed."""

import glob
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gguf_tools.errors import HubError, HubUnreachableError
from gguf_tools.hub.contents import Download, prepare
from gguf_tools.hub.download import fetch
from gguf_tools.hub.explain import storage_folder
from gguf_tools.hub.selection import PREFIX, models_of, select_files


def resolve(
    text: str, note: Callable[[str], None], progress: Callable[[], Any] | None = None
) -> Path:
    """The local path of ``hf:OWNER/NAME`` or ``hf:OWNER/NAME/FILE``, downloaded where needed.

    note gets a line before a download. progress opens a bar for it, as a context manager that
    gives a Progress. Where the Hub does not answer, what is in the cache is used. Raises HubError.
    """
    words = text.removeprefix(PREFIX).split("/", 2)
    if len(words) < 2 or not all(words):
        raise HubError(f"{text}: write it as {PREFIX}OWNER/NAME or {PREFIX}OWNER/NAME/FILE.gguf")
    repo = "/".join(words[:2])
    include = [glob.escape(words[2])] if len(words) == 3 else []
    try:
        found = prepare(repo, include)
    except HubUnreachableError:
        here = _cached(repo, include)
        if here is None:
            raise
        return here
    if len(found.models) != 1:
        names = found.models or [each.name for each in found.files[:4]]
        what = "several models match" if found.models else "no GGUF model in"
        raise HubError(f"{repo}: {what} {', '.join(names)}")
    _fetch_noted(found, note, progress)
    return next(each.path for each in found.files if each.name == found.models[0])


def resolve_checkpoint(
    text: str, note: Callable[[str], None], progress: Callable[[], Any] | None = None
) -> tuple[Path, str]:
    """The local folder and NAME of the checkpoint ``hf:OWNER/NAME[@REVISION]``. Where a repository
    holds no checkpoint, it is the path of its only GGUF. Works as ``resolve`` otherwise.
    """
    repo, _, revision = text.removeprefix(PREFIX).partition("@")
    name = repo.rpartition("/")[2]
    try:
        found = prepare(repo, revision=revision or None, checkpoint_first=True)
    except HubUnreachableError:
        snapshot = _snapshot(repo, revision or "main")
        if snapshot is None or not (snapshot / "config.json").exists():
            raise
        return snapshot, name
    _fetch_noted(found, note, progress)
    if found.models:
        return next(each.path for each in found.files if each.name == found.models[0]), name
    return found.folder / "snapshots" / found.commit, name


def _fetch_noted(
    found: Download, note: Callable[[str], None], progress: Callable[[], Any] | None
) -> None:
    if found.missing:
        note(found.summary())
    if progress is None:
        fetch(found)
    else:
        with progress() as report:
            fetch(found, report)


def _cached(repo: str, include: Sequence[str]) -> Path | None:
    """The model in the cache, as of the last time that it was asked for."""
    snapshot = _snapshot(repo, "main")
    if snapshot is None:
        return None
    names = {
        path.relative_to(snapshot).as_posix(): path.stat().st_size
        for path in snapshot.rglob("*.gguf")
        if path.exists()
    }
    models = models_of(select_files(repo, names, include)) if names else {}
    return snapshot / next(iter(models)) if models else None


def _snapshot(repo: str, revision: str) -> Path | None:
    """The folder of a revision, as of the last time that it was asked for."""
    folder = storage_folder(repo)
    if (folder / "snapshots" / revision).is_dir():
        return folder / "snapshots" / revision
    try:
        return folder / "snapshots" / (folder / "refs" / revision).read_text().strip()
    except OSError:
        return None
