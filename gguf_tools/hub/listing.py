"""List the GGUF models of a Hugging Face repository, without reading any of their files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_tools.errors import HubError
from gguf_tools.hub.contents import free_bytes, incomplete_blob, path_inside
from gguf_tools.hub.explain import storage_folder, translated_errors
from gguf_tools.hub.selection import check_parts, is_language_model, models_of


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A GGUF model of a repository. A split model has the name of its first file.

    nbytes: size of all files. missing: the number of these bytes that are not in the cache.
    paths: locations of the files in the cache, whether they exist or not.
    why: a sentence that says why the model cannot be downloaded, otherwise empty.
    """

    name: str
    nbytes: int
    missing: int
    urls: tuple[str, ...]
    paths: tuple[Path, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """The language models of a repository, sorted by falling size.

    free: free bytes on the disk of the cache.
    """

    repo: str
    commit: str
    models: tuple[ListedModel, ...]
    free: int


def list_models(repo: str, revision: str | None = None) -> Listing:
    """Ask the Hub for the GGUF models of a repository (OWNER/NAME).

    Image projectors and importance matrices are left out. This function makes one request.

    revision: branch, tag or commit. Default: the main branch.

    Raises HubError if the repository or revision does not exist or is not accessible, and
    HubUnreachableError if the Hub does not answer.
    """
    from huggingface_hub import HfApi

    with translated_errors(repo, revision):
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
        files = {each.rfilename: each for each in info.siblings or ()}
        folder, commit = storage_folder(repo), str(info.sha)
        models = [
            _listed(repo, commit, folder, parts, files)
            for first, parts in models_of([*files]).items()
            if is_language_model(first)
        ]
    models.sort(key=lambda each: (-each.nbytes, each.name))
    return Listing(repo, commit, tuple(models), free_bytes(folder))


def _listed(
    repo: str, commit: str, folder: Path, parts: list[str], files: dict[str, Any]
) -> ListedModel:
    """Describe one model of a repository.

    folder: the repository's folder in the cache. parts: names of the model's files. files: what the
    Hub reports of each file, by its name.
    """
    from huggingface_hub import hf_hub_url

    sizes = {name: int(files[name].size or 0) for name in parts if name in files}
    why, paths, missing = "", [], 0
    try:
        check_parts(repo, sizes, parts)
        for name, size in sizes.items():
            path = folder / "snapshots" / commit / path_inside(repo, name)
            paths.append(path)
            missing += 0 if path.exists() else size - _kept_bytes(folder, files[name])
    except HubError as error:
        why = str(error).removeprefix(f"{repo}: ")
    urls = tuple(hf_hub_url(repo, name, revision=commit) for name in sizes)
    return ListedModel(parts[0], sum(sizes.values()), missing, urls, tuple(paths), why)


def _kept_bytes(folder: Path, file: Any) -> int:
    """Return how many bytes of a file an earlier or interrupted download left in the cache.

    folder: the repository's folder in the cache. file: what the Hub reports of the file.
    """
    if file.lfs is None:
        return 0
    blob = folder / "blobs" / Path(file.lfs.sha256).name
    here = blob if blob.exists() else incomplete_blob(blob)
    return min(int(file.size or 0), here.stat().st_size) if here.exists() else 0
