"""A model with the beginnings of documents as its text, for studies with intervals."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from models.real.make import report
from models.real.text import JUDGED, judged_documents
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.lab.eval.run import EvalOptions
from orchestrator.lab.eval.text import Document, Window, windows_of
from orchestrator.lab.study.subject import Subject
from orchestrator.runtime.evaluator import Evaluator

# Characters per token that are written at most, and tokens of a text that are searched.
_CHARACTERS, _MOST = 16, 1 << 14
Kind = TypeVar("Kind", bound=Subject)


@dataclass(frozen=True, slots=True)
class Beginnings(EvalOptions):
    """Options of an evaluation that reads the first window of each document.

    So the windows are independent. Documents with fewer tokens than a window are left out.

    - each: maximum number of documents of each domain.
    """

    each: int = 16

    def windows(self, evaluator: Evaluator, documents: Sequence[Document]) -> list[Window]:
        """Return the first window of each document. Raises ConfigError if no document fits."""
        taken: Counter[str] = Counter()
        found = []
        for document in documents:
            if taken[document.domain] == self.each:
                continue
            first = windows_of(evaluator.tokenize, [document], self.window, self.window)[:1]
            if first and len(first[0].tokens) == self.window:
                taken[document.domain] += 1
                found += first
        if not found:
            raise ConfigError(f"no document has {self.window} tokens: use a smaller --window")
        return found


def add_text_options(parser: argparse.ArgumentParser, names: Sequence[str], window: int) -> None:
    """Add the options that choose the text. `names` and `window` are the defaults."""
    parser.add_argument("--data", type=Path, required=True, help="folder of the text collection")
    parser.add_argument("--text", choices=list(JUDGED), nargs="+", default=list(names))
    parser.add_argument("--documents", type=int, default=16, help="documents of each text")
    parser.add_argument(
        "--window", type=int, default=window, help="number of tokens to read of each document"
    )
    parser.add_argument("--threads", type=int, help="compute threads [default: free cores]")


def make_subject(kind: type[Kind], config: Config, folder: Path, args: argparse.Namespace) -> Kind:
    """Return a model with the beginnings of documents as its text.

    - kind: the class of the subject.
    - folder: receives a copy of the text.
    - args: the values of the options of `add_text_options`.

    Raises ConfigError if a text is missing or too short.
    """
    path = folder / "text.jsonl"
    length = _CHARACTERS * args.window
    with path.open("w") as file:
        for name in args.text:
            for each in judged_documents(args.data, name, _MOST):
                file.write(json.dumps({"text": each.text[:length], "domain": name}) + "\n")
    return kind(config, Beginnings(text=path, window=args.window, each=args.documents), report)
