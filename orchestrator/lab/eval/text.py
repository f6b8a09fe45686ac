"""Texts to evaluate on: documents read from a file and cut into windows of tokens."""

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

# Assumed maximum number of characters per token. It limits how much of a file is read for n tokens.
TOKEN_CHARACTERS = 64
# A text may be cut before it is tokenized. Tokens do not depend on a cut that comes at least this
# many tokens later.
_CUT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Document:
    """A text that is evaluated independently of other texts.

    `context` is text that is read before it and not scored. `domain` is its label in the report, or
    "".
    """

    text: str
    context: str = ""
    domain: str = ""


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that are evaluated in one context. Tokens from index `first` (>= 1) on are scored.

    With prompt=True, the tokens before `first` are read as a prompt.
    """

    tokens: list[int]
    first: int
    domain: str
    prompt: bool = False

    @property
    def n_scored(self) -> int:
        return len(self.tokens) - self.first


# A function that tokenizes a text. The result begins with the BOS token if the model uses one.
Tokenize = Callable[[str], list[int]]


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """Open a text file without its byte order mark, decompressed if its name ends in .xz.

    Raises ConfigError or TextFileError, also for errors while the caller reads.
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
        kind = "an xz file of text" if path.suffix == ".xz" else "a text"
        raise ConfigError(f"{path} is not {kind} in UTF-8: {error}") from error


def read_text(path: Path, n_tokens: int | None = None) -> str:
    """Read a text file, or an .xz file with a text. Raises ConfigError if it cannot be read.

    Only as many characters are read as `n_tokens` tokens can have; None reads all.
    """
    with _opened(path) as file:
        return file.read(-1 if n_tokens is None else TOKEN_CHARACTERS * n_tokens)


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, record) for each line of a file of JSON lines that is not blank.

    Raises ConfigError for a line that is not a JSON object.
    """
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
    """Return how many tokens of a text must be read so that `limit` tokens can be scored.

    The text is cut into windows of `length` tokens. The first `prompt` tokens of each window are
    not scored. If `limit` is None, the result is None, which means the whole text.
    """
    if limit is None:
        return None
    scored = max(1, length - max(1, prompt or 0))
    return (1 + -(-limit // scored)) * length + _CUT_TOKENS


def read_documents(path: Path, n_tokens: int | None = None) -> list[Document]:
    """Read the documents of a text file, or of a file of JSON lines.

    A text file is one document. In JSON lines, the "text" of each record is one document, with an
    optional "context" before it and an optional "domain". Reading stops after as many characters as
    `n_tokens` tokens can have; None reads all. Raises ConfigError if the file has no text.
    """
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
                    f'{path} line {number}: "text" and the optional "context" and "domain" '
                    f"must be strings"
                )
            documents.append(Document(*fields))
            if left is not None:
                left -= len(documents[-1].text)
                if left <= 0:
                    break
    if not any(each.text.strip() for each in documents):
        raise ConfigError(f'{path} holds no text: give a text file, or JSON lines with a "text"')
    return documents


def windows_of(
    tokenize: Tokenize,
    documents: Sequence[Document],
    length: int,
    limit: int | None,
    prompt: int | None = None,
) -> list[Window]:
    """Cut documents into windows (pieces) of at most `length` tokens, each from one document.

    A window begins with the BOS token if the model uses one. A document's `context` (a text before
    it) is cut together with it. All tokens of a window are scored, except for:

    - its first token.
    - tokens of the context.
    - its first `prompt` tokens, which are read as a prompt. None means no prompt.

    `limit` is the maximum number of scored tokens in all windows together; None means no limit.
    """
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
    """Return the first tokens of a text: at least `most`, or all if the text has fewer.

    Only the beginning of a long text is tokenized, because tokens need more memory than text.
    """
    n = len(text) if most is None else 8 * most
    while True:
        tokens = tokenize(text[:n])
        if n >= len(text):
            return tokens
        if most is not None and len(tokens) >= most + _CUT_TOKENS:
            return tokens[:most]
        n *= 2
