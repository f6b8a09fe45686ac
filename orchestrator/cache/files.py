"""The user's folders, the contents of the user cache, and atomic writing of files.

This is the only module here that reads XDG_CACHE_HOME and XDG_STATE_HOME. The build runs before
anything is installed and has its own code (patches/upstream.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from gguf_tools.file.opening import open_file
from gguf_tools.file.unfinished import ENDING, UnfinishedFile, remove_abandoned
from orchestrator.errors import ConfigError

_USUAL = {"cache": ".cache", "state": ".local/state"}
# The maximum size of our files of settings and timings.
_LARGEST_BYTES = 1 << 20


def user_folder(kind: str) -> Path:
    """Return the folder of moe-edge for the user's files of this kind: "cache" or "state".

    The folder may not exist yet. XDG_CACHE_HOME or XDG_STATE_HOME names its parent folder. A
    relative path in these variables is ignored, as the XDG base directory specification requires.
    """
    base = os.environ.get(f"XDG_{kind.upper()}_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / _USUAL[kind]) / "moe-edge"


@contextmanager
def whole_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file for writing in a `with` block. It appears at `path` only when it is complete.

    If the block ends without an error, the file gets its name. Otherwise it is deleted. Unfinished
    files of earlier writers that were killed are deleted too. Raises OSError.

    mode: the permissions of the file.
    """
    remove_abandoned(path)
    with _about(path):
        unfinished = UnfinishedFile(path, mode)
        try:
            with os.fdopen(unfinished.fd, "wb", closefd=False) as file:
                yield file
            unfinished.complete(synced=False)
        finally:
            unfinished.discard()


@contextmanager
def whole_files(folder: Path, first: str) -> Iterator[Path]:
    """Yield an empty folder for output files. At the end of the block, move its files to `folder`.

    If the block ends with an error, no file is moved. The file named `first` is moved before all
    others, so `folder` never has other new files without it. Raises OSError.
    """
    with TemporaryDirectory(prefix="moe-edge-") as made, ExitStack() as begun:
        yield Path(made)
        paths = sorted(Path(made).iterdir(), key=lambda path: (path.name != first, path.name))
        parts = []
        for path in paths:
            target = folder / path.name
            remove_abandoned(target)
            with _about(target):
                parts.append(UnfinishedFile(target))
                begun.callback(parts[-1].discard)
                with os.fdopen(parts[-1].fd, "wb", closefd=False) as file:
                    file.write(path.read_bytes())
        for part in parts:
            with _about(part.path):
                part.complete(synced=False)


def check_target(path: Path) -> None:
    """Raise OSError if a file cannot be written to this path.

    Commands call this before a long computation, so that it does not fail at its end.
    """
    with _about(path):
        UnfinishedFile(path).discard()


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """Within this context, let each OSError name `path`.

    The error of a full disk names no file, and other errors may name a temporary file.
    """
    try:
        yield
    except OSError as error:
        named = error.filename
        if error.errno is None or not (named is None or str(named).endswith(ENDING)):
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error


def read_object(path: Path, most_bytes: int) -> dict[str, Any] | None:
    """Read a JSON object from a file.

    Return None for a file with other content or with more than most_bytes bytes. Raises OSError if
    the file cannot be read.
    """
    with open_file(path) as file:
        # read(n) would allocate n bytes even for a small file
        text = file.read() if os.fstat(file.fileno()).st_size <= most_bytes else b""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def write_whole(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text file atomically. Raises OSError.

    private: whether only the file's owner may read it.
    """
    with whole_file(path, 0o600 if private else 0o666) as file:
        file.write(text.encode())


def digest(*said: Any) -> str:
    """Return a hash of JSON-ready values, 24 hexadecimal digits, for names of cached files."""
    text = json.dumps(said, default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def recalled(path: Path, form: str, name: str) -> dict[str, Any]:
    """Return the values that keep() stored under `name` in a cache file.

    Return {} if the file is missing, damaged or of another format. form: the name of the format.
    """
    data: dict[str, Any] | None = None
    with suppress(OSError):
        data = read_object(path, _LARGEST_BYTES)
    found = data.get(name) if data and data.get("format") == form else None
    return found if isinstance(found, dict) else {}


def keep(path: Path, form: str, name: str, what: Mapping[str, Any]) -> None:
    """Store the values `what` under `name` in a cache file. Write errors are ignored.

    form: the name of the file's format, which readers check.
    """
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"format": form, name: what}))


ALL = "all"
KINDS = {
    "bench": "models that `moe-edge bench` generated, and generates again if they are deleted",
    "build": "object files of the last builds, so that `make build` compiles only changed files",
    "calibrating": "results of interrupted runs of `moe-edge calibrate`, from which it continues",
    "conversations": "the messages of the last chats on a terminal, for `moe-edge chat --resume`",
    "cuda": "libraries for builds with CUDA",
    "emulation": "compiled files of the tests that emulate a GPU",
    "hotness": "which experts earlier chats used, for each model",
    "plans": (
        "the plan that `--max-loss` chose for each model, so that later runs use the same plan"
    ),
    "sdist": "the source of llama.cpp as it was downloaded",
    "servers": "llama.cpp's server, compiled by `moe-edge serve`",
    "speed": "measured speeds of this machine, which are measured again if they are missing",
    "source": "the source of llama.cpp with our patches",
    "tuned": "policy settings that earlier runs tuned, for each model",
    "usage": "how often earlier chats and servers used each expert of a model",
    "wheels": "compiled packages of llama.cpp, so that other Python environments can install them",
}


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """One subfolder of the user cache.

    nbytes: the disk space of its files.
    """

    name: str
    path: Path
    n_files: int
    nbytes: int

    @property
    def about(self) -> str:
        return KINDS.get(self.name, "")


def user_cache() -> list[CacheFolder]:
    """Return a description of each subfolder of the user cache, largest first."""
    folder = user_folder("cache")
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            sizes = [512 * each.lstat().st_blocks for each in path.rglob("*") if not each.is_dir()]
            found.append(CacheFolder(path.name, path, len(sizes), sum(sizes)))
    return sorted(found, key=lambda each: (-each.nbytes, each.name))


def clear_cache(names: tuple[str, ...]) -> list[CacheFolder]:
    """Delete the named subfolders of the user cache, and return their descriptions.

    The name "all" stands for all subfolders. Raises ConfigError for an unknown name before anything
    is deleted. Raises OSError if a folder cannot be deleted.
    """
    here = {each.name: each for each in user_cache()}
    chosen = list(here.values()) if ALL in names else []
    for name in names if ALL not in names else ():
        if name in here:
            chosen.append(here[name])
        elif name not in KINDS:
            known = ", ".join(here) or "nothing"
            raise ConfigError(
                f"--clear {name}: the cache has no folder of this name. It has {known}; "
                f"{ALL} clears everything"
            )
    for each in chosen:
        shutil.rmtree(each.path)
    return chosen
