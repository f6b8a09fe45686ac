"""Texts of the collection in `--data DIR`: some for fitting, others for evaluation."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.lab.eval.text import (
    Document,
    Tokenize,
    Window,
    json_lines,
    read_documents,
    read_text,
    windows_of,
)

WINDOW = 512
# Maximum number of windows of one document, so that a long book does not dominate.
_WINDOWS_EACH = 2
# Kinds of text for fitting experts and routers, in equal parts.
FIT = ("enwiki_recent", "textbooks_ccby", "books_classics", "oasst1_messages_flat")
# Files with texts for the evaluation, by name. Fitting uses none of them.
JUDGED = {
    "wikitext": "eval/wikitext2/wiki.test.raw.xz",
    "textbooks": "valid/textbooks_ccby.jsonl.xz",
    "books": "valid/books_children.jsonl.xz",
    "messages": "valid/sft_oasst1.jsonl.xz",
    "encyclopedia": "valid/enwiki_core.jsonl.xz",
    "stories": "valid/stories_ccby.jsonl",
    "mathematics": "eval/gsm8k/test.jsonl.xz",
    "code": "eval/humaneval/HumanEval.jsonl.gz",
}
# Fields of the records of these texts that together are a document.
_FIELDS = {"mathematics": ("question", "answer"), "code": ("prompt", "canonical_solution")}
_ARTICLE = re.compile(r"^ = [^=].* = $", re.MULTILINE)


def fit_windows(
    tokenize: Tokenize, data: Path, n_tokens: int, kinds: Sequence[str] = FIT
) -> list[list[int]]:
    """Return windows (lists of tokens) for fitting, about `n_tokens` tokens in total.

    The kinds of text alternate. `data` is the folder of the text collection. Raises ConfigError if
    one of its files is missing.
    """
    share = -(-n_tokens // len(kinds))
    found = [
        _windows(tokenize, _documents(data / f"train/{name}.jsonl.xz", share), share)
        for name in kinds
    ]
    return [window.tokens for turn in zip_longest(*found) for window in turn if window is not None]


def judged_documents(data: Path, name: str, n_tokens: int) -> list[Document]:
    """Return documents of the text `name` of JUDGED, with about `n_tokens` tokens in total.

    WikiText-2 is one file, and each of its articles is a document. Raises ConfigError if the file
    is missing or the name is unknown.
    """
    if name not in JUDGED:
        raise ConfigError(f"unknown text '{name}': choose one of {', '.join(JUDGED)}")
    path = data / JUDGED[name]
    if name == "wikitext":
        text = read_text(path, 2 * n_tokens)
        starts = [found.start() for found in _ARTICLE.finditer(text)]
        cuts = zip(starts, [*starts[1:], len(text)], strict=True)
        return [Document(text[start:end], domain=name) for start, end in cuts]
    if name in _FIELDS:
        _check(path)
        records = islice(_records(path), max(1, n_tokens // 64))
        texts = ("\n".join(each[field] for field in _FIELDS[name]) for each in records)
        return [Document(each, domain=name) for each in texts]
    return [Document(each.text, domain=name) for each in _documents(path, n_tokens)]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of JSON lines, which may be compressed (.xz or .gz)."""
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from map(json.loads, file)
    else:
        yield from (record for _, record in json_lines(path))


def _check(path: Path) -> None:
    """Raise ConfigError if a file of the text collection is missing."""
    if not path.is_file():
        raise ConfigError(f"{path} is missing: --data names the folder of the text collection")


def judged_windows(
    tokenize: Tokenize,
    documents: Sequence[Document],
    n_tokens: int,
    length: int = WINDOW,
    each: int = _WINDOWS_EACH,
) -> list[tuple[int, list[int]]]:
    """Cut documents into windows, and return (number of the document, tokens) of each.

    All windows together have at most `n_tokens` tokens.

    length: maximum number of tokens of a window. each: maximum number of windows of a document.
    """
    found: list[tuple[int, list[int]]] = []
    left = n_tokens
    for number, document in enumerate(documents):
        for window in windows_of(tokenize, [document], length, min(left, each * length))[:each]:
            found.append((number, window.tokens))
            left -= window.n_scored
        if left <= 0:
            break
    return found


def _documents(path: Path, n_tokens: int) -> list[Document]:
    """Return the documents of a file of JSON lines, with about `n_tokens` tokens.

    A chat record is one document with its messages in order.
    """
    _check(path)
    if path.name.startswith("sft_"):
        chats = []
        for _, record in json_lines(path):
            messages = record.get("messages", [])
            chats.append(Document("\n\n".join(each["content"] for each in messages)))
            if len(chats) >= n_tokens // 64:
                break
        return chats
    return read_documents(path, n_tokens)


def _windows(tokenize: Tokenize, documents: Sequence[Document], n_tokens: int) -> list[Window]:
    """Cut documents into windows with `n_tokens` tokens in total, a few of each document."""
    found: list[Window] = []
    left = n_tokens
    for document in documents:
        if left <= 0:
            break
        cut = windows_of(tokenize, [document], WINDOW, min(left, _WINDOWS_EACH * WINDOW))
        found += cut
        left -= sum(len(window.tokens) for window in cut)
    return found
