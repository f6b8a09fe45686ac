"""What to judge on: documents of a file, cut into windows of tokens."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from gguf_tools.file.texts import open_regular
from orchestrator.errors import ConfigError

# No text has so many characters to a token, so that no more of it is read for so many tokens.
TOKEN_CHARACTERS = 64
# Tokens that stand so far before the place where a text was cut do not depend on the cut.
_CUT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Document:
    """One text, read on its own. context stands before it and is not scored. domain: what it
    is called in the report, "" for nothing."""

    text: str
    context: str = ""
    domain: str = ""


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that are judged in one context: those from number `first` on, 1 at least, are
    predicted and scored. prompt: those before are read as a prompt."""

    tokens: list[int]
    first: int
    domain: str
    prompt: bool = False

    @property
    def n_scored(self) -> int:
        return len(self.tokens) - self.first


# What turns text into tokens, the begin token that the model wants first.
Tokenize = Callable[[str], list[int]]


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """Open a text file without its byte order mark; an .xz file is unpacked.

    Raises ConfigError or TextFileError, also for what reading it raises.
    """
    try:
        with open_regular(path) as file:
            packed = path.suffix == ".xz"
            data = lzma.open(file) if packed else file  # noqa: SIM115 - closed with the text
            with TextIOWrapper(data, encoding="utf-8-sig") as text:
                yield text
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        kind = "an xz file" if path.suffix == ".xz" else "a text"
        raise ConfigError(f"{path} is not {kind} in UTF-8: {error}") from error


def read_text(path: Path, n_tokens: int | None = None) -> str:
    """A text file, an .xz one unpacked: as much as so many tokens can have, None for all. Raises
    ConfigError."""
    with _opened(path) as file:
        return file.read(-1 if n_tokens is None else TOKEN_CHARACTERS * n_tokens)


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, record) of each line that is not blank. Raises ConfigError."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path} line {number} is not JSON: {error}") from error
            if not isinstance(record, dict):
                raise ConfigError(f"{path} line {number} is not a JSON object")
            yield number, record


def needed_tokens(limit: int | None, length: int, prompt: int | None = None) -> int | None:
    """How many tokens of a text give so many that are scored, in windows of that length of which
    the first `prompt` are not; None for all."""
    if limit is None:
        return None
    scored = max(1, length - max(1, prompt or 0))
    return (1 + -(-limit // scored)) * length + _CUT_TOKENS


def read_documents(path: Path, n_tokens: int | None = None) -> list[Document]:
    """A plain text is one document; of JSON lines, each record's "text" is one, with an
    optional "context" before it and an optional "domain". As many of them as so many tokens can
    have, None for all. Raises ConfigError where there is no text."""
    name = path.stem if path.suffix == ".xz" else path.name
    if not name.endswith((".jsonl", ".ndjson")):
        documents = [Document(read_text(path, n_tokens))]
    else:
        documents = []
        left = None if n_tokens is None else TOKEN_CHARACTERS * n_tokens
        for number, record in json_lines(path):
            fields = [record.get("text"), record.get("context", ""), record.get("domain", "")]
            if not all(isinstance(each, str) for each in fields):
                raise ConfigError(
                    f'{path} line {number}: "text", and "context" and "domain" where they are '
                    f"given, must be strings"
                )
            documents.append(Document(*fields))
            if left is not None:
                left -= len(documents[-1].text)
                if left <= 0:
                    break
    if not any(each.text.strip() for each in documents):
        raise ConfigError(f"{path} holds no text: give a file with text, or JSON lines with it")
    return documents


def windows_of(
    tokenize: Tokenize,
    documents: Sequence[Document],
    length: int,
    limit: int | None,
    prompt: int | None = None,
) -> list[Window]:
    """Windows of at most length tokens, each within one document and, where the model wants a
    begin token, behind one. At most limit tokens are scored. prompt: of each window the first so
    many tokens at least, and the document's context, are read as a prompt; None for no prompts."""
    begin = tokenize("")
    size = length - len(begin)
    left = limit
    needed = needed_tokens(limit, length, prompt)
    windows: list[Window] = []
    for document in documents:
        if left == 0:
            break
        context = len(tokenize(document.context)) - len(begin)
        most = None if needed is None else context + needed
        tokens = _tokens(tokenize, document.context + document.text, most)[len(begin) :]
        for start in range(0, len(tokens), size):
            first = max(1, prompt or 0, len(begin) + context - start)
            window = begin + tokens[start : start + size]
            if left is not None:
                window = window[: left + first]
            if len(window) <= first:
                continue
            windows.append(Window(window, first, document.domain, prompt is not None))
            if left is not None:
                left -= len(window) - first
    return windows


def _tokens(tokenize: Tokenize, text: str, most: int | None) -> list[int]:
    """The tokens of a text, so many at least where there are as many. A long text is not taken
    apart as a whole: its tokens take more memory than it does."""
    n = len(text) if most is None else 8 * most
    while True:
        tokens = tokenize(text[:n])
        if n >= len(text):
            return tokens
        if most is not None and len(tokens) >= most + _CUT_TOKENS:
            return tokens[:most]
        n *= 2
