"""Resolve model names such as hf:OWNER/NAME to local paths, downloading the model if necessary."""

import glob
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gguf_tools.errors import HubError, HubUnreachableError
from gguf_tools.hub.contents import Download, prepare
from gguf_tools.hub.download import fetch
from gguf_tools.hub.explain import storage_folder
from gguf_tools.hub.selection import PREFIX, is_language_model, models_of, select_files


def resolve(
    text: str, note: Callable[[str], None], progress: Callable[[], Any] | None = None
) -> Path:
    """Return the local path of a GGUF model on the Hub, after downloading it if necessary.

    If the Hub does not answer, the cached model is used. Raises HubError if no single GGUF model
    matches or the download fails.

    text: `hf:OWNER/NAME` or `hf:OWNER/NAME/FILE`.
    note: called with one line of text before a download.
    progress: returns a context manager that shows a progress bar and yields a Progress callback.
    """
    words = text.removeprefix(PREFIX).split("/", 2)
    if len(words) < 2 or not all(words):
        raise HubError(
            f"{text}: not a model name: write it as {PREFIX}OWNER/NAME or"
            f" {PREFIX}OWNER/NAME/FILE.gguf"
        )
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
        problem = (
            "several models match" if found.models else "there is no GGUF model among the files"
        )
        raise HubError(f"{repo}: {problem}: {', '.join(names)}")
    _fetch_noted(found, note, progress)
    return next(each.path for each in found.files if each.name == found.models[0])


def resolve_checkpoint(
    text: str, note: Callable[[str], None], progress: Callable[[], Any] | None = None
) -> tuple[Path, str]:
    """Return the local folder and the name of a checkpoint on the Hub.

    The checkpoint is downloaded if it is not in the cache. If the repository has no checkpoint, the
    path of its only GGUF model is returned instead of a folder. If the Hub does not answer, the
    cached checkpoint is used. Raises HubError if nothing suitable is found or the download fails.

    text: `hf:OWNER/NAME` or `hf:OWNER/NAME@REVISION`.
    note: called with one line of text before a download.
    progress: returns a context manager that shows a progress bar and yields a Progress callback.
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
    """Return the path of a repository's model in the cache, without contacting the Hub.

    Only the files of the main branch count. Return None if none of them is a GGUF file. Raises
    HubError unless exactly one cached model matches `include`.

    include: patterns of file names, such as `*Q4_K_M*`. If empty, every cached model matches.
    """
    snapshot = _snapshot(repo, "main")
    if snapshot is None:
        return None
    names = {
        path.relative_to(snapshot).as_posix(): path.stat().st_size
        for path in snapshot.rglob("*.gguf")
        if path.exists()
    }
    models = models_of(select_files(repo, names, include)) if names else {}
    return next((snapshot / each for each in models if is_language_model(each)), None)


def _snapshot(repo: str, revision: str) -> Path | None:
    """Return the folder of a repository's revision in the cache, without contacting the Hub.

    Return None if the cache does not have the revision.
    """
    folder = storage_folder(repo)
    if (folder / "snapshots" / revision).is_dir():
        return folder / "snapshots" / revision
    try:
        return folder / "snapshots" / (folder / "refs" / revision).read_text().strip()
    except OSError:
        return None
