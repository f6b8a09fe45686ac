"""Select the files of a Hugging Face repository that make up a model."""

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from gguf_tools.errors import HubError, SeveralModelsError
from gguf_tools.file.parts import SPLIT_NAME
from gguf_tools.units import format_size

PREFIX = "hf:"
MAX_LISTED = 24
# Name prefixes of GGUF files that are not language models: image projectors and calibration data.
_ENCODER = "mmproj"
_OTHER = (_ENCODER, "imatrix")
_CHECKPOINT = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")


def select_files(
    repo: str,
    sizes: Mapping[str, int],
    include: Sequence[str] = (),
    *,
    checkpoint_first: bool = False,
) -> list[str]:
    """Return the sorted names of the files to download from a repository.

    By default, select the only GGUF model. If there is no GGUF model, select the checkpoint. A
    split model is selected with all its parts, and any GGUF model with its image encoder. Raises
    HubError, which lists the available files, if nothing matches, and SeveralModelsError if there
    are several models and no pattern was given.

    sizes: size in bytes of each file of the repository, by name.
    include: patterns of file names or paths that replace the default selection.
    checkpoint_first: prefer the checkpoint to a GGUF model.
    """
    models = models_of(sizes)
    if checkpoint_first and not include and (found := _checkpoint(sizes)):
        return found
    if include:
        chosen = {name for each in include for name in _matching(sizes, each)}
        if not chosen:
            raise HubError(
                f"{repo}: no file matches {' or '.join(include)}: the repository contains"
                f" {_listed(sizes, models)}"
            )
        for parts in models.values():
            if chosen.intersection(parts):
                check_parts(repo, sizes, parts)
                chosen.update(parts)
        return sorted(chosen | _encoder(sizes, chosen))
    own = {first: parts for first, parts in models.items() if is_language_model(first)}
    if len(own) > 1:
        raise SeveralModelsError(
            f"{repo} contains {len(own)} models: `moe-edge plan {PREFIX}{repo}` compares them on"
            f" this machine; choose one as {PREFIX}{repo}/FILE, or by `moe-edge pull {repo}"
            f" --include PATTERN`: {_listed(sizes, own)}"
        )
    if own:
        parts = next(iter(own.values()))
        check_parts(repo, sizes, parts)
        return sorted({*parts} | _encoder(sizes, parts))
    if found := _checkpoint(sizes):
        return found
    raise HubError(
        f"{repo}: no GGUF or safetensors files: the repository contains {_listed(sizes, {})}"
    )


def _encoder(sizes: Mapping[str, int], chosen: Collection[str]) -> set[str]:
    """Return the name of the image encoder that belongs to the chosen files, as a set.

    The set is empty if the repository has no image encoder (mmproj*.gguf), if one is chosen
    already, or if no language model is chosen. Of several, the one in half precision is returned,
    or the smallest.
    """
    found = [name for name in sizes if is_encoder(name)]
    models = [name for name in chosen if name.endswith(".gguf") and is_language_model(name)]
    if not models or not found or {*found} & {*chosen}:
        return set()
    names = {name: PurePosixPath(name).name.lower() for name in found}
    half = [name for name in found if "f16" in names[name] and "bf16" not in names[name]]
    return {min(half or found, key=lambda name: (sizes[name], name))}


def _checkpoint(sizes: Mapping[str, int]) -> list[str]:
    """Return the sorted names of the files of a repository's checkpoint.

    The list is empty if the repository has no safetensors files.

    sizes: size in bytes of each file of the repository, by name.
    """
    weights = [name for name in sizes if fnmatchcase(name, "*.safetensors") and "/" not in name]
    chosen = {
        name
        for name in sizes
        if "/" not in name and any(fnmatchcase(name, each) for each in _CHECKPOINT)
    }
    # Some repositories contain the weights twice, the second time in the vendor's own layout.
    duplicates = {name for name in weights if name.startswith("consolidated")}
    if not weights:
        return []
    return sorted(chosen - duplicates if len(duplicates) < len(weights) else chosen)


def check_parts(repo: str, sizes: Mapping[str, int], parts: Sequence[str]) -> None:
    """Raise HubError if the repository lacks a part of a split model.

    sizes: size in bytes of each file of the repository, by name. parts: the model's files.
    """
    for name in parts:
        if name not in sizes:
            raise HubError(f"{repo}: the repository lacks {name}, a part of {parts[0]}")


def models_of(names: Mapping[str, int] | Sequence[str]) -> dict[str, list[str]]:
    """Return the GGUF models among file names, as a dict.

    A key is the name of a model's first file. The value is the list of the names of all its files.
    All parts of a split model are listed, even if `names` lacks some of them.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        match = SPLIT_NAME.fullmatch(name)
        if match is not None and 1 <= int(match[2]) <= int(match[3]):
            parts = [f"{match[1]}-{i:05d}-of-{match[3]}.gguf" for i in range(1, int(match[3]) + 1)]
            models[parts[0]] = parts
        elif name.endswith(".gguf"):
            models[name] = [name]
    return models


def is_encoder(name: str) -> bool:
    """Return whether a file is an image encoder in GGUF, judging by its name."""
    text = PurePosixPath(name).name.lower()
    return text.startswith(_ENCODER) and text.endswith(".gguf")


def is_language_model(name: str) -> bool:
    """Return whether a GGUF file is a language model, judging by its name.

    Image projectors and importance matrices are no language models.
    """
    return not PurePosixPath(name).name.lower().startswith(_OTHER)


def _matching(names: Collection[str], pattern: str) -> list[str]:
    """Return the paths that match a pattern such as `*Q4_K_M*`.

    If no whole path matches, return the paths whose file name, without folders, matches.
    """
    whole = [name for name in names if fnmatchcase(name, pattern)]
    return whole or [name for name in names if fnmatchcase(PurePosixPath(name).name, pattern)]


def _listed(sizes: Mapping[str, int], models: Mapping[str, list[str]]) -> str:
    """Format the models with their sizes as a text that lists at most MAX_LISTED entries.

    If there are no models, list the names of all files.

    sizes: size in bytes of each file of the repository, by name.
    models: the files of each model, by its first file.
    """
    if models:
        found = [
            f"{first} ({format_size(sum(sizes.get(part, 0) for part in parts))})"
            for first, parts in models.items()
        ]
    else:
        found = sorted(sizes)
    more = [f"and {len(found) - MAX_LISTED} more"] if len(found) > MAX_LISTED else []
    return ", ".join(found[:MAX_LISTED] + more) or "nothing"
