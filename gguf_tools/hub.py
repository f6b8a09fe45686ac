"""Models from the Hugging Face Hub, in huggingface_hub's own cache, with its token and
endpoint (HF_HOME, HF_TOKEN, HF_ENDPOINT).

Files are fetched over its HTTP client into the cache's place for them, by us: its own
``hf_hub_download`` throws a partial download away when the process ends, and a model is
many gigabytes. What lies there complete is then handed to it.
"""

import fcntl
import glob
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import DiskSpaceError, HubError, HubUnreachableError
from .hub_choice import PREFIX, choose, is_language_model, models_of
from .streaming import Meter, Progress, sha256_of
from .units import format_size

RETRIES = 5
_ETAG = re.compile(r"[0-9A-Za-z_-]{1,128}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. ``path``: where it is, or will be. ``blob``: where its bytes go
    first, by content. ``have``: bytes that are here already."""

    name: str
    size: int
    url: str
    path: Path
    blob: Path
    have: int


@dataclass(slots=True)
class HubPlan:
    """What to get from a repository; nothing is downloaded yet. Sizes in bytes.

    ``models``: the GGUF models among the files, each by its first part. ``free``: room on the
    disk of the cache.
    """

    repo: str
    commit: str
    revision: str
    folder: Path
    files: list[HubFile]
    models: list[str] = field(default_factory=list)
    free: int = 0

    @property
    def nbytes(self) -> int:
        """All files."""
        return sum(each.size for each in self.files)

    @property
    def missing(self) -> int:
        """What is to be downloaded."""
        return sum(each.size - each.have for each in self.files)

    def summary(self) -> str:
        """One line: files, size, what is left to download, free space."""
        n = len(self.files)
        text = f"{self.repo} at {self.commit[:8]}: {n} file{'s' * (n != 1)}"
        text += f", {format_size(self.nbytes)}"
        if not self.missing:
            return f"{text}, all here already"
        return (
            f"{text}, {format_size(self.missing)} to download into {self.folder},"
            f" {format_size(self.free)} free there"
        )

    def check_space(self) -> None:
        """Raises DiskSpaceError where the cache's disk has too little room."""
        if self.missing > self.free:
            raise DiskSpaceError(
                f"{self.repo}: {format_size(self.missing, up=True)} to download, but only"
                f" {format_size(self.free)} are free in {self.folder}: make room, or set HF_HOME"
                " to a folder on another disk"
            )


def plan(
    repo: str,
    include: Sequence[str] = (),
    revision: str | None = None,
    *,
    checkpoint_first: bool = False,
) -> HubPlan:
    """Ask the Hub what a repository (OWNER/NAME) holds, and choose from it.

    include: patterns of file names, as ``*Q4_K_M*``; without one, the only GGUF model of the
    repository, else a checkpoint's weights, configuration and tokenizer; checkpoint_first: the
    other way round. Of a model in several files all are taken. Raises HubError, in one
    sentence: no such repository or revision, no access, several models to choose from, nothing
    that matches; HubUnreachableError.
    """
    from huggingface_hub import HfApi

    with _sentences(repo, revision):
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
        sizes = {each.rfilename: int(each.size or 0) for each in info.siblings or ()}
        names = choose(repo, sizes, include, checkpoint_first=checkpoint_first)
        commit = str(info.sha)
        folder = _storage(repo)
        files = [_look_up(repo, commit, name, folder) for name in names]
    models = [first for first in models_of(names) if is_language_model(first)]
    return HubPlan(repo, commit, revision or "main", folder, files, models, _free_bytes(folder))


def fetch(plan: HubPlan, progress: Progress | None = None) -> list[Path]:
    """Download what is missing; the local paths, in the order of ``plan.files``.

    ``progress`` gets the finished share, 0 to 1. A connection that breaks is taken up again;
    so is a download of an earlier run. Raises HubError; DiskSpaceError before the first byte.
    """
    from huggingface_hub import constants, hf_hub_download

    plan.check_space()
    meter = Meter(progress, plan.nbytes)
    paths = []
    with _sentences(plan.repo, plan.revision):
        for file in plan.files:
            meter.add(file.have)
            if not file.path.exists():
                # Larger files go through the Hub's own protocol for them, not over HTTP.
                if not file.blob.exists() and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
                    _download(file, meter.add)
                hf_hub_download(plan.repo, file.name, revision=plan.commit)
            paths.append(file.path)
        if plan.revision != plan.commit:
            ref = plan.folder / "refs" / plan.revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(plan.commit)
    return paths


def resolve(
    text: str, note: Callable[[str], None], progress: Callable[[], Any] | None = None
) -> Path:
    """The local path of ``hf:OWNER/NAME`` or ``hf:OWNER/NAME/FILE``, downloaded where needed.

    note gets a line before a download; progress opens a bar for it (a context manager that
    gives a Progress). Without the Hub, what is in the cache is used. Raises HubError.
    """
    words = text.removeprefix(PREFIX).split("/", 2)
    if len(words) < 2 or not all(words):
        raise HubError(f"{text}: write it as {PREFIX}OWNER/NAME or {PREFIX}OWNER/NAME/FILE.gguf")
    repo = "/".join(words[:2])
    include = [glob.escape(words[2])] if len(words) == 3 else []
    try:
        found = plan(repo, include)
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
    """(local folder, NAME) of the checkpoint ``hf:OWNER/NAME[@REVISION]``; the path of the only
    GGUF where a repository holds no checkpoint. As ``resolve`` otherwise.
    """
    repo, _, revision = text.removeprefix(PREFIX).partition("@")
    name = repo.rpartition("/")[2]
    try:
        found = plan(repo, revision=revision or None, checkpoint_first=True)
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
    found: HubPlan, note: Callable[[str], None], progress: Callable[[], Any] | None
) -> None:
    if found.missing:
        note(found.summary())
    if progress is None:
        fetch(found)
    else:
        with progress() as report:
            fetch(found, report)


def _storage(repo: str) -> Path:
    """The folder of a repository in the cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder: str = repo_folder_name(repo_id=repo, repo_type="model")
    return Path(constants.HF_HUB_CACHE) / folder


def _look_up(repo: str, commit: str, name: str, folder: Path) -> HubFile:
    """Size, place and content hash of a file, and how much of it is here."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    inside = PurePosixPath(name)
    if inside.is_absolute() or ".." in inside.parts:
        raise HubError(f"{repo}: the file name {name!r} leaves its folder")
    path = folder / "snapshots" / commit / inside
    url = hf_hub_url(repo, name, revision=commit)
    if path.exists():
        size = path.stat().st_size
        return HubFile(name, size, url, path, path, size)
    found = get_hf_file_metadata(url)
    if found.size is None or found.etag is None or not _ETAG.fullmatch(found.etag):
        raise HubError(f"{repo}: {name}: the server does not say its size and ETag")
    blob = folder / "blobs" / found.etag
    here = blob if blob.exists() else _partial(blob)
    have = min(found.size, here.stat().st_size) if here.exists() else 0
    return HubFile(name, found.size, url, path, blob, have)


def _partial(blob: Path) -> Path:
    return blob.with_name(blob.name + ".incomplete")


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _download(file: HubFile, add: Callable[[int], None]) -> None:
    """Bring a file's blob into being, from where an earlier attempt ended."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    class Bar:
        """What http_get wants of a tqdm."""

        def __init__(self, **_: Any) -> None:
            pass

        def update(self, nbytes: int) -> None:
            add(nbytes)

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    partial = _partial(file.blob)
    partial.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("ab") as target:
        try:
            fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HubError(f"{file.name}: another process is downloading it") from None
        if target.tell() > file.size:
            target.truncate(0)
        retries = RETRIES
        while True:
            before = target.tell()
            try:
                http_get(
                    file.url,
                    target,
                    resume_size=before,
                    headers=build_hf_headers(),
                    expected_size=file.size,
                    tqdm_class=Bar,
                )
                break
            except HfHubHTTPError:
                raise
            except HTTPError:
                # http_get takes up some broken connections itself, but not a reset one.
                retries = RETRIES if target.tell() > before else retries - 1
                if not retries:
                    raise
                time.sleep(1)
        target.flush()
        os.fsync(target.fileno())
        _check_content(file, partial)
        os.replace(partial, file.blob)


def _check_content(file: HubFile, partial: Path) -> None:
    """Large files are named by their SHA-256: it must be that of what was downloaded."""
    if not _SHA256.fullmatch(file.blob.name):
        return
    if sha256_of(partial) != file.blob.name:
        partial.unlink()
        raise HubError(f"{file.name}: damaged on the way (its SHA-256 differs): pull it again")


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
    models = models_of(choose(repo, names, include)) if names else {}
    return snapshot / next(iter(models)) if models else None


def _snapshot(repo: str, revision: str) -> Path | None:
    """The folder of a revision, as of the last time that it was asked for."""
    folder = _storage(repo)
    if (folder / "snapshots" / revision).is_dir():
        return folder / "snapshots" / revision
    try:
        return folder / "snapshots" / (folder / "refs" / revision).read_text().strip()
    except OSError:
        return None


@contextmanager
def _sentences(repo: str, revision: str | None) -> Iterator[None]:
    """Turns what huggingface_hub raises into one sentence, and keeps its own log quiet."""
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)
    login = "log in with `hf auth login` or set HF_TOKEN"
    try:
        yield
    except hub.GatedRepoError as error:
        raise HubError(
            f"{repo}: access to it is restricted: accept its terms at {constants.ENDPOINT}/{repo},"
            f" then {login}"
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise HubError(
            f"{repo}: no such model at {constants.ENDPOINT}, or a private one: check the name, or"
            f" {login}"
        ) from error
    except hub.DisabledRepoError as error:
        raise HubError(
            f"{repo}: disabled at {constants.ENDPOINT}: nobody can download it"
        ) from error
    except hub.RevisionNotFoundError as error:
        raise HubError(f"{repo}: no revision {revision}") from error
    except hub.LocalEntryNotFoundError as error:
        raise HubUnreachableError(
            f"{repo}: {constants.ENDPOINT} no longer answers: try again later"
        ) from error
    except hub.EntryNotFoundError as error:
        raise HubError(f"{repo}: a file of it is gone: {_first_line(error)}") from error
    except hub.HFValidationError as error:
        raise HubError(f"{repo}: not a repository's name: write it as OWNER/NAME") from error
    except hub.OfflineModeIsEnabled as error:
        raise HubUnreachableError(f"{repo}: HF_HUB_OFFLINE forbids asking the Hub") from error
    except hub.HfHubHTTPError as error:
        status = error.response.status_code
        why = "is HF_ENDPOINT right?"
        if status in (401, 403):
            why = f"is the token right? {login}"
        elif status == 429 or status >= 500:
            why = "try again later"
        kind = HubUnreachableError if status >= 500 else HubError
        raise kind(f"{repo}: {constants.ENDPOINT} answers {status}: {why}") from error
    except hub.HTTPError as error:
        raise HubUnreachableError(
            f"{repo}: {constants.ENDPOINT} cannot be reached: {_first_line(error)}"
        ) from error
    except ValueError as error:
        raise HubError(f"{repo}: {_first_line(error)}") from error
    except OSError as error:
        where = error.filename or _storage(repo)
        raise HubError(f"{where}: {error.strerror or _first_line(error)}") from error
    finally:
        log.setLevel(level)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
