"""List the files of a Hugging Face repository and plan a download."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from gguf_tools.errors import DiskSpaceError, HubError
from gguf_tools.hub.explain import storage_folder, translated_errors
from gguf_tools.hub.selection import is_language_model, models_of, select_files
from gguf_tools.units import format_size

_ETAG = re.compile(r"[0-9A-Za-z_-]{1,128}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository on the Hugging Face Hub, and its place in the local cache.

    path: location in the cache's snapshot folder.
    blob: location of the contents in the cache's blob folder, named by the file's ETag.
    have: number of bytes that are already in the cache.
    """

    name: str
    size: int
    url: str
    path: Path
    blob: Path
    have: int


@dataclass(slots=True)
class Download:
    """The files of a Hugging Face repository that will be downloaded. Sizes are in bytes.

    folder: the repository's folder in the cache.
    models: names of the GGUF models among the files. A split model has the name of its first file.
    free: free space on the disk of the cache.
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
        """The total size of all files."""
        return sum(each.size for each in self.files)

    @property
    def missing(self) -> int:
        """The number of bytes that still have to be downloaded."""
        return sum(each.size - each.have for each in self.files)

    def summary(self) -> str:
        """Return one line for the user: number of files, total and missing size, and free space."""
        n = len(self.files)
        text = f"{self.repo} at {self.commit[:8]}: {n} file{'s' * (n != 1)}"
        text += f", {format_size(self.nbytes)}"
        if not self.missing:
            return f"{text}, already downloaded"
        return (
            f"{text}, {format_size(self.missing)} to download into {self.folder},"
            f" {format_size(self.free)} free on its disk"
        )

    def check_space(self) -> None:
        """Raise DiskSpaceError if the disk of the cache has too little free space."""
        if self.missing > self.free:
            raise DiskSpaceError(
                f"{self.repo}: {format_size(self.missing, up=True)} to download, but only"
                f" {format_size(self.free)} are free in {self.folder}: free disk space, or set"
                " HF_HOME to a folder on another disk"
            )


def prepare(
    repo: str,
    include: Sequence[str] = (),
    revision: str | None = None,
    *,
    checkpoint_first: bool = False,
) -> Download:
    """Ask the Hub for the files of a repository (OWNER/NAME), and select the files to download.

    By default, select the repository's only GGUF model. If it has no GGUF model, select the
    checkpoint: its weights, configuration and tokenizer. A split model is selected with all its
    parts.

    include: patterns of file names, such as `*Q4_K_M*`, that replace the default selection.
    revision: branch, tag or commit. Default: the main branch.
    checkpoint_first: prefer the checkpoint to a GGUF model.

    Raises HubError if the repository or revision does not exist or is not accessible, if several
    models match, or if nothing matches. Raises HubUnreachableError if the Hub does not answer.
    """
    from huggingface_hub import HfApi

    with translated_errors(repo, revision):
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
        sizes = {each.rfilename: int(each.size or 0) for each in info.siblings or ()}
        names = select_files(repo, sizes, include, checkpoint_first=checkpoint_first)
        commit = str(info.sha)
        folder = storage_folder(repo)
        files = [_look_up(repo, commit, name, folder) for name in names]
    models = [first for first in models_of(names) if is_language_model(first)]
    return Download(repo, commit, revision or "main", folder, files, models, free_bytes(folder))


def _look_up(repo: str, commit: str, name: str, folder: Path) -> HubFile:
    """Ask the Hub for the size and ETag of a file, and look up how much of it is in the cache.

    Raises HubError if the file's name leads out of the repository's folder, or if the server
    reports no size and ETag.

    folder: the repository's folder in the cache.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    path = folder / "snapshots" / commit / path_inside(repo, name)
    url = hf_hub_url(repo, name, revision=commit)
    if path.exists():
        size = path.stat().st_size
        return HubFile(name, size, url, path, path, size)
    found = get_hf_file_metadata(url)
    if found.size is None or found.etag is None or not _ETAG.fullmatch(found.etag):
        raise HubError(f"{repo}: {name}: the server does not report the file's size and ETag")
    blob = folder / "blobs" / found.etag
    here = blob if blob.exists() else incomplete_blob(blob)
    have = min(found.size, here.stat().st_size) if here.exists() else 0
    return HubFile(name, found.size, url, path, blob, have)


def path_inside(repo: str, name: str) -> PurePosixPath:
    """Return the relative path of a repository's file.

    Raises HubError if the file's name leads out of the repository's folder.
    """
    inside = PurePosixPath(name)
    if inside.is_absolute() or ".." in inside.parts:
        raise HubError(f"{repo}: the file name {name!r} leads out of the repository's folder")
    return inside


def incomplete_blob(blob: Path) -> Path:
    """Return the path of a file in the cache while its download is incomplete.

    blob: path of the complete file.
    """
    return blob.with_name(blob.name + ".incomplete")


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
