"""Which files of a repository on the Hugging Face Hub make a model."""

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from gguf_tools.errors import HubError
from gguf_tools.file.parts import SPLIT_NAME
from gguf_tools.units import format_size

PREFIX = "hf:"
MAX_LISTED = 24
# GGUF files with such names are no language model but projectors for images, calibration data.
_OTHER = ("mmproj", "imatrix")
_CHECKPOINT = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")


def select_files(
    repo: str,
    sizes: Mapping[str, int],
    include: Sequence[str] = (),
    *,
    checkpoint_first: bool = False,
) -> list[str]:
    """The files to take of those that a repository holds (name: bytes), sorted.

    include: patterns of file names or paths. Without one, the only GGUF model is taken, else a
    checkpoint; checkpoint_first: the other way round. Of a model in several files all are taken.
    Raises HubError, in one sentence that lists what there is.
    """
    models = models_of(sizes)
    if checkpoint_first and not include and (found := _checkpoint(sizes)):
        return found
    if include:
        chosen = {name for each in include for name in _matching(sizes, each)}
        if not chosen:
            raise HubError(
                f"{repo}: nothing matches {' or '.join(include)}; it holds {_listed(sizes, models)}"
            )
        for parts in models.values():
            if chosen.intersection(parts):
                _check_parts(repo, sizes, parts)
                chosen.update(parts)
        return sorted(chosen)
    own = {first: parts for first, parts in models.items() if is_language_model(first)}
    if len(own) > 1:
        raise HubError(
            f"{repo} holds {len(own)} models: choose one as {PREFIX}{repo}/FILE, or by `moe-edge"
            f" pull {repo} --include PATTERN`: {_listed(sizes, own)}"
        )
    if own:
        parts = next(iter(own.values()))
        _check_parts(repo, sizes, parts)
        return sorted(parts)
    if found := _checkpoint(sizes):
        return found
    raise HubError(f"{repo}: neither a GGUF nor safetensors; it holds {_listed(sizes, {})}")


def _checkpoint(sizes: Mapping[str, int]) -> list[str]:
    """The files of a checkpoint, sorted; none where there are no weights."""
    weights = [name for name in sizes if fnmatchcase(name, "*.safetensors") and "/" not in name]
    chosen = {
        name
        for name in sizes
        if "/" not in name and any(fnmatchcase(name, each) for each in _CHECKPOINT)
    }
    # Some repositories hold the weights a second time, in their makers' own layout.
    twice = {name for name in weights if name.startswith("consolidated")}
    if not weights:
        return []
    return sorted(chosen - twice if len(twice) < len(weights) else chosen)


def _check_parts(repo: str, sizes: Mapping[str, int], parts: Sequence[str]) -> None:
    for name in parts:
        if name not in sizes:
            raise HubError(f"{repo}: {name} is missing there, a part of {parts[0]}")


def models_of(names: Mapping[str, int] | Sequence[str]) -> dict[str, list[str]]:
    """GGUF models among file names: the first part of each, and all its parts."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        match = SPLIT_NAME.fullmatch(name)
        if match is not None and 1 <= int(match[2]) <= int(match[3]):
            parts = [f"{match[1]}-{i:05d}-of-{match[3]}.gguf" for i in range(1, int(match[3]) + 1)]
            models[parts[0]] = parts
        elif name.endswith(".gguf"):
            models[name] = [name]
    return models


def is_language_model(name: str) -> bool:
    """Whether a GGUF's name is that of a model, and not of something that goes with one."""
    return not PurePosixPath(name).name.lower().startswith(_OTHER)


def _matching(names: Collection[str], pattern: str) -> list[str]:
    """The paths that a pattern describes. Where it describes none, they are those whose file name
    it describes."""
    whole = [name for name in names if fnmatchcase(name, pattern)]
    return whole or [name for name in names if fnmatchcase(PurePosixPath(name).name, pattern)]


def _listed(sizes: Mapping[str, int], models: Mapping[str, list[str]]) -> str:
    """Models with their sizes, else files, and no more of them than a person wants to read."""
    if models:
        found = [
            f"{first} ({format_size(sum(sizes.get(part, 0) for part in parts))})"
            for first, parts in models.items()
        ]
    else:
        found = sorted(sizes)
    more = [f"and {len(found) - MAX_LISTED} more"] if len(found) > MAX_LISTED else []
    return ", ".join(found[:MAX_LISTED] + more) or "nothing"
