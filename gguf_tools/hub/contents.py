"""What a repository of the Hugging Face Hub holds, and what of it is to be downloaded."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from gguf_tools.errors import DiskSpaceError, HubError
from gguf_tools.hub.explain import hub_sentences, storage_folder
from gguf_tools.hub.selection import is_language_model, models_of, select_files
from gguf_tools.units import format_size

_ETAG = re.compile(r"[0-9A-Za-z_-]{1,128}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository.

    ``path`` is where it is, or will be. ``blob`` is where its bytes go first, by content. ``have``
    counts the bytes that are here already.
    """

    name: str
    size: int
    url: str
    path: Path
    blob: Path
    have: int


@dataclass(slots=True)
class Download:
    """What to get from a repository, before anything is downloaded. Sizes are bytes.

    ``models`` are the GGUF models among the files, each by its first part. ``free`` is the room on
    the disk of the cache.
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
        """The size of all files."""
        return sum(each.size for each in self.files)

    @property
    def missing(self) -> int:
        """Bytes that are still to be downloaded."""
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


def prepare(
    repo: str,
    include: Sequence[str] = (),
    revision: str | None = None,
    *,
    checkpoint_first: bool = False,
) -> Download:
    """Ask the Hub what a repository (OWNER/NAME) holds, and choose from it.

    include: patterns of file names, as ``*Q4_K_M*``. Without one, the only GGUF model of the
    repository is chosen, else a checkpoint's weights, configuration and tokenizer;
    checkpoint_first: the other way round. Of a model in several files all are taken.

    Raises HubError, in one sentence, where there is no such repository or revision or no access
    to it, where there are several models to choose from, and where nothing matches. Raises
    HubUnreachableError where the Hub does not answer.
    """
    from huggingface_hub import HfApi

    with hub_sentences(repo, revision):
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
        sizes = {each.rfilename: int(each.size or 0) for each in info.siblings or ()}
        names = select_files(repo, sizes, include, checkpoint_first=checkpoint_first)
        commit = str(info.sha)
        folder = storage_folder(repo)
        files = [_look_up(repo, commit, name, folder) for name in names]
    models = [first for first in models_of(names) if is_language_model(first)]
    return Download(repo, commit, revision or "main", folder, files, models, _free_bytes(folder))


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
    here = blob if blob.exists() else incomplete_blob(blob)
    have = min(found.size, here.stat().st_size) if here.exists() else 0
    return HubFile(name, found.size, url, path, blob, have)


def incomplete_blob(blob: Path) -> Path:
    """Where the cache keeps a blob that has not been downloaded to its end."""
    return blob.with_name(blob.name + ".incomplete")


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
