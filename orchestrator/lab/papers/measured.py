"""The measurements that the tables and figures of a paper share. Each is made when first needed."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.cache.files import digest, write_whole
from orchestrator.config import Config
from orchestrator.errors import ConfigError, TraceError
from orchestrator.lab.bench.child import SEPARATOR, Job, Part, longest_context
from orchestrator.lab.bench.models import DEMO_TEXT
from orchestrator.lab.children import Result, run_child
from orchestrator.lab.eval.run import LEAST_WINDOW, EvalOptions
from orchestrator.lab.eval.text import Document, read_documents
from orchestrator.lab.replay.file import read_trace, write_trace
from orchestrator.lab.replay.record import record_text
from orchestrator.lab.replay.trace import Trace
from orchestrator.lab.study.routing import Routes, read_routes
from orchestrator.lab.study.subject import Subject
from orchestrator.native import MAX_AHEAD, Library
from orchestrator.policy.firm import FIRM, MOL
from orchestrator.runtime.load import Progress
from orchestrator.runtime.runtime import Runtime

# Tokens that each configuration is scored on, and tokens per context.
TOKENS, WINDOW = 1536, 256
# With fewer scored tokens, standard errors exceed the effects.
LEAST = 512
# Tokens whose routing is counted, and tokens per context: 64 sequences for the largest batches.
ROUTED, SEQUENCE = 6144, 96
# Texts are divided into pieces of this many characters, so that domains get about as many tokens.
PIECE = 1200
# Tokens that are read of each domain at most.
_MOST = 1 << 14
# Parts of a text of the demo: one conversation, whose last answer is scored.
_ANSWER = "<|im_start|>assistant\n"
_TEXTS = (".jsonl", ".jsonl.xz", ".txt", ".txt.xz")
# A timed part may take this long.
_PART_S = 120.0


class Source(NamedTuple):
    """The text to measure on.

    - folder: a folder with texts. None uses the demo model's conversations.
    - max_tokens: maximum number of tokens that one measurement reads. None means no limit.
    """

    folder: Path | None = None
    max_tokens: int | None = None


def read_data(folder: Path) -> list[list[Document]]:
    """Read the texts in a folder, and return one list of texts for each domain (kind of text).

    A file is plain text, or has one text per JSON line. Files that end in .xz are decompressed. The
    domain of a text is the one in its JSON line, or else the name of the file.

    Raises ConfigError if the folder has no texts or a text cannot be read.
    """
    paths = sorted(path for path in folder.glob("*") if path.name.endswith(_TEXTS))
    if not paths:
        raise ConfigError(
            f"--data {folder} has no texts: give a folder with .jsonl or .txt files, which may be "
            f"compressed (.xz)"
        )
    domains: dict[str, list[Document]] = {}
    for path in paths:
        for each in read_documents(path, _MOST):
            name = each.domain or path.name.split(".")[0]
            domains.setdefault(name, []).extend(_pieces(each, name))
    return list(domains.values())


def _pieces(document: Document, domain: str) -> Iterator[Document]:
    """Divide a text into pieces of PIECE characters. The first piece keeps the text's context."""
    for start in range(0, len(document.text), PIECE):
        piece = document.text[start : start + PIECE]
        if piece.strip():
            yield Document(piece, "" if start else document.context[-PIECE:], domain)


def _balanced(domains: Sequence[list[Document]]) -> Iterator[Document]:
    """Yield all texts, in an order that gives each domain about the same share of any beginning.

    The next text is of the domain with the fewest characters so far.
    """
    left = [deque(each) for each in domains]
    had = [0] * len(domains)
    while any(left):
        at = min((at for at, each in enumerate(left) if each), key=had.__getitem__)
        had[at] += len(left[at][0].text)
        yield left[at].popleft()


def conversations() -> list[list[Document]]:
    """Return the example conversations that come with the demo model.

    Each conversation is a Document: its text is the last answer, and its context is everything
    before. The result has the form of `read_data`, one list for each kind of text. All
    conversations are of the same kind, so there is one list.
    """
    pieces = DEMO_TEXT.read_text("utf-8").removesuffix("\n").split(SEPARATOR)
    halves = (piece.rpartition(_ANSWER) for piece in pieces)
    return [[Document(after, f"{before}{mark}", "chat") for before, mark, after in halves]]


class Measured(AbstractContextManager["Measured"]):
    """The model, the text and the shared measurements of one run of `moe-edge paper`.

    `folder` is the folder for results and for recorded traces.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        source: Source,
        report: Progress,
        note: Callable[[str], None],
    ) -> None:
        """Read the texts, and write a copy of them to `folder`. Raises ConfigError."""
        self.config, self.folder, self.report, self.note = config, folder, report, note
        self._most = source.max_tokens
        domains = conversations() if source.folder is None else read_data(source.folder)
        self.documents = list(_balanced(domains))
        self.domains = list(dict.fromkeys(each.domain for each in self.documents))
        records = [
            {"text": each.text, "context": each.context, "domain": each.domain}
            for each in self.documents
        ]
        lines = "".join(json.dumps(each) + "\n" for each in records)
        self._digest = digest(lines)
        self.text = folder / f"text-{self._digest[:8]}.jsonl"
        write_whole(self.text, lines)
        self.spoken = folder / f"text-{self._digest[:8]}.txt"
        pieces = [each.context + each.text for each in self.documents]
        write_whole(self.spoken, SEPARATOR.join(pieces))
        self._joined = "\n".join(pieces)
        self.subject = cache(self._subject)

    def __exit__(self, *_: object) -> None:
        """Delete the copies of the texts."""
        self.text.unlink(missing_ok=True)
        self.spoken.unlink(missing_ok=True)

    def basis(self) -> dict[str, Any]:
        """Return a description of the measured model and text, as a dict for JSON."""
        size = self.config.model.stat().st_size
        text = f"{', '.join(self.domains)} ({self._digest[:8]})"
        if self._most is not None:
            text += f", at most {self._most} tokens"
        return {"model": self.config.model.name, "bytes": size, "text": text}

    def _subject(self, tokens: int | None = None, window: int | None = None) -> Subject:
        """Return the model with `tokens` tokens of the text, in contexts of `window` tokens.

        The default of `window` is shorter if there are many domains, because studies need several
        contexts of each. Raises ConfigError if the text is too short.
        """
        tokens = tokens or TOKENS
        if self._most is not None:
            tokens = min(tokens, self._most)
        window = window or max(LEAST_WINDOW, min(WINDOW, tokens // (3 * len(self.domains))))
        options = EvalOptions(text=self.text, tokens=tokens, window=window)
        found = Subject(self.config, options, self.report, self.note)
        if found.n_tokens < LEAST:
            advice = "give more --data" if self._most is None else "use a larger --max-tokens"
            raise ConfigError(
                f"the text has {found.n_tokens} scored tokens, the minimum is {LEAST}: {advice}"
            )
        return found

    @cached_property
    def routes(self) -> Sequence[Routes]:
        """The routing of many short sequences of the text: one Routes object for each sequence.

        A Routes object has the experts that each token uses in each layer, [T, n_layers, k].
        """
        return read_routes(self.subject(ROUTED, SEQUENCE))

    @cached_property
    def library(self) -> Library:
        """The native library."""
        from orchestrator.native.llama import Bindings

        return Bindings.load().library()

    def trace(self, prompt: int, answer: int, policy: str = FIRM.name) -> Trace:
        """Return a recording of the experts that the first tokens of the text use.

        The first `prompt` tokens are read as a prompt, the next `answer` tokens as decode steps.
        The recording is kept on disk for later calls.

        - policy: the policy that runs during the recording. With `firm`, the recording also has
          each layer's predictions of the next layers' experts. With `dymoe`, it has the attention
          that each token of the prompt receives, if the model exposes it.

        Raises ConfigError if the text has too few tokens.
        """
        key = digest(self.basis())[:8]
        path = self.folder / f"trace-{policy}-{prompt}-{answer}-{key}.npz"
        if path.exists():
            try:
                return read_trace(path)
            except TraceError as error:
                raise ConfigError(f"{error}. Delete the file to record it again") from error
        forms: dict[str, dict[str, Any]] = {
            FIRM.name: {"agree": MOL, "n_ahead": MAX_AHEAD, "prefetch": "on"},
            "dymoe": {"retention": 0.75, "low_tier": "skip"},
        }
        n = prompt + answer
        config = self.config.compared(
            policy=policy,
            threads=self.config.n_threads,
            ctx=-(-(n + 64) // 256) * 256,
            ubatch=max(prompt, 64),
            force_managed=True,
            **forms[policy],
        )
        self.note(f"recording a prompt of {prompt} tokens and {answer} decode steps")
        with Runtime.open(config, self.report) as runtime, runtime.evaluator() as evaluator:
            found = record_text(evaluator, self._joined, n, prompt)
        steps = int(found.arrays["step_tokens"].sum())
        if steps < n:
            raise ConfigError(f"the text has {steps} tokens, but {n} are needed: give more --data")
        write_trace(path, found)
        return found

    def timed(self, settings: dict[str, Any], parts: list[Part]) -> Result:
        """Measure the time of prompts and decode steps in a child process.

        - settings: options of our engine, by name.
        - parts: the prompts and decode steps to run, in order.

        The returned dict has the list "parts". It has a dict for each part, with its "name" and
        with "ms", the time of each prompt or decode step. Raises ConfigError if the run fails.
        """
        job = Job(
            system="engine",
            model=str(self.config.model),
            low=None if self.config.low is None else str(self.config.low),
            settings={"io_threads": self.config.io_threads, **settings},
            n_ctx=longest_context(parts),
            n_ubatch=512,
            threads=self.config.n_threads,
            parts=parts,
            seed=1,
            text=str(self.spoken),
            sequences=max(part.sequences for part in parts),
        )
        found = run_child("orchestrator.lab.bench.child", job, _PART_S * len(parts))
        if "error" in found:
            raise ConfigError(f"a timed run failed: {found['error']}")
        return found
