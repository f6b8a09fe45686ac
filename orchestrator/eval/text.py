"""What to judge on: documents of a file, cut into windows of tokens."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from orchestrator.errors import ConfigError

LEAST_TOKENS = 16


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


class Tokenizer(Protocol):
    """What turns text into tokens, as Engine does."""

    def tokenize(self, text: str) -> list[int]: ...


def read_text(path: Path) -> str:
    """A text file, an .xz one unpacked. Raises ConfigError."""
    try:
        if path.suffix == ".xz":
            with lzma.open(path, "rt", encoding="utf-8") as file:
                return file.read()
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        kind = "an xz file" if path.suffix == ".xz" else "a text"
        raise ConfigError(f"{path} is not {kind} in UTF-8: {error}") from error


def is_json_lines(path: Path) -> bool:
    name = path.stem if path.suffix == ".xz" else path.name
    return name.endswith((".jsonl", ".ndjson"))


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, record) of each line that is not blank. Raises ConfigError."""
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} line {number} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ConfigError(f"{path} line {number} is not a JSON object")
        yield number, record


def read_documents(path: Path) -> list[Document]:
    """A plain text is one document; of JSON lines, each record's "text" is one, with an
    optional "context" before it and an optional "domain". Raises ConfigError where there is no
    text."""
    if not is_json_lines(path):
        documents = [Document(read_text(path))]
    else:
        documents = []
        for number, record in json_lines(path):
            fields = [record.get("text"), record.get("context", ""), record.get("domain", "")]
            if not all(isinstance(each, str) for each in fields):
                raise ConfigError(
                    f'{path} line {number}: "text", and "context" and "domain" where they are '
                    f"given, must be strings"
                )
            documents.append(Document(*fields))
    if not any(each.text.strip() for each in documents):
        raise ConfigError(f"{path} holds no text: give a file with text, or JSON lines with it")
    return documents


def windows_of(
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    length: int,
    limit: int | None,
    prompt: int | None = None,
) -> list[Window]:
    """Windows of at most length tokens, each within one document and, where the model wants a
    begin token, behind one. At most limit tokens are scored. prompt: of each window the first so
    many tokens at least, and the document's context, are read as a prompt; None for no prompts."""
    begin = tokenizer.tokenize("")
    size = length - len(begin)
    left = limit
    windows: list[Window] = []
    for document in documents:
        if left == 0:
            break
        context = len(tokenizer.tokenize(document.context)) - len(begin)
        tokens = tokenizer.tokenize(document.context + document.text)[len(begin) :]
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


def cut_windows(
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    length: int,
    limit: int | None,
    name: object,
    prompt: int | None = None,
) -> list[Window]:
    """windows_of, to judge by. name: the text's, for errors.

    Raises ConfigError where fewer than LEAST_TOKENS tokens can be scored.
    """
    windows = windows_of(tokenizer, documents, length, limit, prompt)
    scored = sum(window.n_scored for window in windows)
    if scored < LEAST_TOKENS:
        behind = f" behind prompts of {prompt} tokens" if prompt else ""
        raise ConfigError(
            f"{name}: {scored} tokens{behind} are too few to judge by, {LEAST_TOKENS} are the "
            f"least: give more text{', or lower --prompt-tokens' if prompt else ''}"
        )
    return windows
