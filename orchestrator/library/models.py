"""Finds a model by its name, and reads settings as a Python program gives them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.config import Config
from orchestrator.errors import GGUFError
from orchestrator.settings import Setting


def find_model(text: str, note: Callable[[str], None], progress: Callable[[], Any]) -> Path:
    """Return the local path of a model. A model on the Hugging Face Hub is downloaded.

    `text` is hf:OWNER/NAME[/FILE] for the Hub. Otherwise it is a path or the name of a downloaded
    model. `note` gets one line before a download. `progress` returns a context manager that shows
    the download.

    Raises HubError for a failed download and for a name that several downloaded models have. Raises
    GGUFError for a folder or a URL. Whether the file is readable is not checked.
    """
    from gguf_tools.hub import PREFIX, find_pulled, resolve

    if text.startswith(PREFIX):
        return resolve(text, note, progress)
    found = None if os.path.lexists(text) else find_pulled(text)
    return _local(Path(text)) if found is None else found.paths[0]


def _local(path: Path) -> Path:
    """Return `path` unchanged. Raises GGUFError if it is a folder or a URL."""
    if path.is_dir():
        hint = "give the path of a GGUF file in this folder"
        if (path / "config.json").is_file():
            hint = "convert the checkpoint with `moe-edge convert`"
        raise GGUFError(f"{path}: this is a folder, not a GGUF file: {hint}")
    if path.parts and path.parts[0] in ("http:", "https:"):
        raise GGUFError(
            f"{path}: URLs are not supported: use hf:OWNER/NAME for the Hugging Face Hub"
        )
    return path


def config_of(model: Path, given: Mapping[str, Any]) -> Config:
    """Return the settings for a model, checked and with defaults for absent values.

    Raises ConfigError or PolicyError for a wrong setting.
    """
    return Config.build(model=model, **parsed(given, Config.declared()))


def parsed(given: Mapping[str, Any], declared: Mapping[str, Setting]) -> dict[str, Any]:
    """Return settings with the values converted to the types of their declarations.

    `declared` maps names of settings to declarations. Texts are parsed as on the command line, and
    lists become tuples. Settings without a declaration are left unchanged. Raises ConfigError for a
    wrong value.
    """
    found = dict(given)
    for name, value in given.items():
        known = declared.get(name)
        if known is None:
            continue
        is_text = isinstance(value, str)
        if is_text and (known.unit is not None or known.notation is not None):
            found[name] = known.parse(value)
        elif is_text and Path in known.kinds:
            found[name] = Path(value)
        elif is_text and known.repeated:
            found[name] = (value,)
        elif isinstance(value, list) and tuple in known.kinds:
            found[name] = tuple(value)
    return found
