"""List, find and remove the models in huggingface_hub's cache."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gguf_tools.errors import HubError
from gguf_tools.file.parts import SPLIT_NAME
from gguf_tools.hub.explain import storage_folder
from gguf_tools.hub.selection import PREFIX, is_language_model, models_of

_ENDING = ".gguf"


@dataclass(frozen=True, slots=True)
class Pulled:
    """A GGUF model or a checkpoint in huggingface_hub's cache.

    file: name of the GGUF file in the repository. A split model has the name of its first file.
        Empty for a checkpoint.
    paths: the model's files in order, or the folder of a checkpoint.
    used_s: Unix time of the last access.
    """

    repo: str
    file: str
    paths: tuple[Path, ...]
    nbytes: int
    used_s: float

    @property
    def stem(self) -> str:
        """The file's name without folder, extension and part number of a split model."""
        name = PurePosixPath(self.file).name
        split = SPLIT_NAME.fullmatch(name)
        return split[1] if split else name.removesuffix(_ENDING)

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which a user can refer to the model, the shortest last."""
        if not self.file:
            return (self.repo,)
        long = f"{self.repo}/{self.file}"
        short = f"{self.repo}/{self.stem}"
        own = PurePosixPath(self.file).name
        return (long, short, self.repo, self.repo.partition("/")[2], own, self.stem)


def pulled() -> list[Pulled]:
    """Return all models in huggingface_hub's cache, sorted by name.

    Damaged cache entries are left out.
    """
    from huggingface_hub import constants, scan_cache_dir

    if not Path(constants.HF_HUB_CACHE).is_dir():
        return []
    found: dict[tuple[str, str], Pulled] = {}
    for repo in scan_cache_dir(constants.HF_HUB_CACHE).repos:
        if repo.repo_type != "model":
            continue
        # If several revisions contain a model, the most recently modified one is listed.
        for revision in sorted(repo.revisions, key=lambda each: each.last_modified):
            files = {
                each.file_path.relative_to(revision.snapshot_path).as_posix(): each
                for each in revision.files
            }
            models = {k: v for k, v in models_of(files).items() if is_language_model(k)}
            for first, parts in models.items():
                here = [files[name] for name in sorted(parts) if name in files]
                found[repo.repo_id, first] = Pulled(
                    repo.repo_id,
                    first,
                    tuple(each.file_path for each in here),
                    sum(each.size_on_disk for each in here),
                    max(each.blob_last_accessed for each in here),
                )
            if not models and any(name.endswith(".safetensors") for name in files):
                found[repo.repo_id, ""] = Pulled(
                    repo.repo_id,
                    "",
                    (revision.snapshot_path,),
                    revision.size_on_disk,
                    repo.last_accessed,
                )
    return [found[key] for key in sorted(found)]


def short_name(model: Pulled, among: Sequence[Pulled]) -> str:
    """Return the model's shortest name that no other model in `among` has."""
    others = [each for each in among if each != model]
    return next(
        (name for name in reversed(model.names) if not any(_is(each, name) for each in others)),
        model.names[0],
    )


def find_pulled(text: str, gguf: bool = True) -> Pulled | None:
    """Return the model with the given name in huggingface_hub's cache, or None if no model has it.

    text: one of the model's names (`Pulled.names`), with or without `hf:`.
    gguf: whether only GGUF models are searched. If it is False, checkpoints are searched too.

    Raises HubError if several models have this name.
    """
    name = text.removeprefix(PREFIX)
    among = pulled()
    matching = [each for each in among if _is(each, name) and (each.file or not gguf)]
    if len(matching) > 1:
        names = ", ".join(short_name(each, among) for each in matching)
        raise HubError(f"{text}: several downloaded models have this name: choose one of {names}")
    return matching[0] if matching else None


def remove(model: Pulled) -> int:
    """Delete a model from the cache. Return the number of bytes that this frees.

    If the cache has no other model of the repository, delete the repository's whole folder. Raises
    OSError if a file cannot be deleted.
    """
    folder = storage_folder(model.repo)
    if not model.file or sum(each.repo == model.repo for each in pulled()) == 1:
        nbytes = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink())
        shutil.rmtree(folder)
        return nbytes
    nbytes = 0
    blobs = set()
    for path in model.paths:
        name = "/".join(path.relative_to(folder / "snapshots").parts[1:])
        for each in folder.glob(f"snapshots/*/{name}"):
            blobs.add(each.resolve())
            each.unlink()
    kept = {path.resolve() for path in (folder / "snapshots").rglob("*") if path.is_symlink()}
    for blob in blobs - kept:
        if blob.exists():
            nbytes += blob.stat().st_size
            blob.unlink()
    return nbytes


def _is(model: Pulled, name: str) -> bool:
    return name.casefold() in {each.casefold() for each in model.names}
