"""Where a user's own files are, and writing files so that none is ever half there.

The only place here that reads XDG_CACHE_HOME and XDG_STATE_HOME; the build, which runs before
anything is installed, has its own (patches/upstream.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from gguf_tools.file.opening import open_file
from gguf_tools.file.unfinished import ENDING, UnfinishedFile, remove_abandoned

_USUAL = {"cache": ".cache", "state": ".local/state"}


def user_folder(kind: str) -> Path:
    """The folder of ours for files of a kind, "cache" or "state"; it need not exist. As the XDG
    base directory specification wants it, a relative path in the environment counts as none."""
    base = os.environ.get(f"XDG_{kind.upper()}_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / _USUAL[kind]) / "moe-edge"


@contextmanager
def whole_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write, which gets its name when the block ends well and is gone otherwise. What a
    killed writer of the same file left goes as well. Raises OSError."""
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
    """An empty folder. What lies there when the block ends well gets its names in `folder`, all of
    it or nothing, `first` before the others: an interrupt that ends with it leaves none. Raises
    OSError."""
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
    """Raises OSError where whole_file cannot write, before a long run finds out."""
    with _about(path):
        UnfinishedFile(path).discard()


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """Lets an OSError name `path`: of a full disk it names nothing, and else a temporary file."""
    try:
        yield
    except OSError as error:
        named = error.filename
        if error.errno is None or not (named is None or str(named).endswith(ENDING)):
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error


def read_object(path: Path, most_bytes: int) -> dict[str, Any] | None:
    """The JSON object in a file; None for anything else, or more. Raises OSError."""
    with open_file(path) as file:
        # read(n) would allocate n bytes for the smallest file
        text = file.read() if os.fstat(file.fileno()).st_size <= most_bytes else b""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def write_whole(path: Path, text: str, *, private: bool = False) -> None:
    """Writes a file, whole or not at all. private: only its owner may read it. Raises OSError."""
    with whole_file(path, 0o600 if private else 0o666) as file:
        file.write(text.encode())
