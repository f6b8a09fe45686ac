"""Finds image files in a line, as terminals write the name of a file that is dropped on them."""

from __future__ import annotations

import os.path
import shlex
from pathlib import Path
from urllib.parse import unquote, urlsplit

from orchestrator.runtime.image_files import type_of

# A longer line is a message. The longest path of Linux has 4096 bytes, and several may be dropped.
_LONGEST_LINE = 1 << 14
# Enough to recognise the type of a file.
_HEAD_BYTES = 1024


def path_of(text: str) -> Path:
    """Return the path of a file whose name the user typed, or that was dropped on the terminal.

    The name of an existing file is returned unchanged, except that ~ is expanded. Otherwise quotes,
    backslashes and file:// URLs are decoded, because terminals write the names of dropped files in
    these forms.
    """
    path = os.path.expanduser(text)
    words = [] if os.path.exists(path) else _words(text)
    return words[0] if len(words) == 1 else Path(path)


def dropped_images(line: str) -> list[Path]:
    """Return the image files that the user dragged and dropped on the terminal.

    The terminal writes the names of dropped files into the input line. The result is empty if the
    line has any text except names of image files. Images of types that the model cannot read are
    included, so that the caller can report them.
    """
    text = line.strip()
    if not text or len(text) > _LONGEST_LINE or "\n" in text:
        return []
    whole = os.path.expanduser(text)
    paths = [Path(whole)] if os.path.isfile(whole) else _words(text)
    return paths if all(map(_is_image, paths)) else []


def _words(text: str) -> list[Path]:
    """Return the paths in a line, which are separated by spaces."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quote without its end
        return []
    return [_local(word) for word in words]


def _local(word: str) -> Path:
    """Return the path of a word, which may be a file: URL with escapes such as %20."""
    if not word.lower().startswith("file://"):
        return Path(os.path.expanduser(word))
    try:
        return Path(unquote(urlsplit(word).path))
    except ValueError:
        return Path(word)


def _is_image(path: Path) -> bool:
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return (type_of(file.read(_HEAD_BYTES)) or "").endswith("image")
    except OSError:
        return False
