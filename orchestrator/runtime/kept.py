"""The conversations of a server in the folder of --prompt-cache, in the form in which a chat keeps
them: what one of both has read, the other does not read again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from orchestrator.errors import PolicyError
from orchestrator.native import NativeServer
from orchestrator.runtime.driver import PlainDriver
from orchestrator.runtime.prompt_copies import Listed, PromptFolder, common_prefix, usable
from orchestrator.runtime.prompts import LEAST_TOKENS, is_worth_writing
from orchestrator.runtime.steps import Mark

# A prompt that differs from the one before in no more than its last tokens goes on from what its
# sequence holds: templates close a turn in another way than they open the answer to it.
_TAIL_TOKENS = 16


class KeptConversations:
    """What each sequence holds, and what of it is on disk. All work is done on `thread`, one piece
    after the other; leave is for its end."""

    def __init__(
        self,
        folder: PromptFolder,
        key: str,
        driver: PlainDriver,
        native: NativeServer,
        thread: str,
        note: Callable[[str], None],
        has_part: bool,
    ) -> None:
        """thread: its name; note gets a sentence for the log. Raises OSError."""
        self._native, self._note = native, note
        self._folder, self._key = folder, key
        self._has_part = has_part
        self._held: dict[int, Sequence[int]] = {}  # the prompt that each sequence had last
        self._saved: dict[int, int] = {}  # tokens of that prompt, once it is on disk
        self._driver = driver
        self._told = 0  # of the folder's notes
        self.thread = ThreadPoolExecutor(1, thread)

    def before_prompt(self, sequence: int, prompt: Sequence[int]) -> None:
        """Before a prompt is read into a sequence on which nothing decodes; it is empty where
        nobody knows what that will hold. From another thread, which waits for it."""
        work = self._submitted(self._recall, sequence, prompt)
        if work is not None:
            work.result()

    def answered(self, sequences: Iterable[int], is_good: bool) -> None:
        """Behind a request, before another one gets its sequences. is_good: these hold what they
        were to, or a part of it."""
        for each in sequences:
            self._submitted(self._keep, each, is_good)

    def behind(self, work: Callable[[], None]) -> bool:
        """Does it once what was asked for until now is kept; False where the server ends."""
        return self._submitted(work) is not None

    def _submitted(self, work: Callable[..., None], *args: Any) -> Future[None] | None:
        try:
            return self.thread.submit(work, *args)
        except RuntimeError:
            return None  # the server ends

    def _recall(self, sequence: int, prompt: Sequence[int]) -> None:
        """Where the sequence holds another conversation, that one is written, and the file takes
        its place that holds most of the prompt."""
        held = self._held.get(sequence, ())
        live = common_prefix(prompt, held)
        if live < max(1, len(held) - _TAIL_TOKENS):
            self._write(sequence)
            best, most = None, max(live, LEAST_TOKENS)
            for each in self._folder.of(self._key):
                common = common_prefix(prompt[:-1], each.tokens)
                common = usable(len(each.tokens), self._has_part, (), common)
                if common > most:
                    best, most = each, common
            self._saved[sequence] = 0
            if best is not None and self._bring(sequence, best):
                self._saved[sequence] = min(most, len(prompt))
        self._held[sequence] = prompt
        self._tell()

    def _keep(self, sequence: int, is_good: bool) -> None:
        """What took long to read is written."""
        if not is_good:
            self._held[sequence] = ()
        if is_worth_writing(len(self._held.get(sequence, ())), self._saved.get(sequence, 0)):
            self._write(sequence)
        self._tell()

    def leave(self, end_s: float | None) -> None:
        """At the end, once nothing decodes and the native server has returned. end_s: of the
        monotonic clock, when no further conversation is begun to be written."""
        for sequence in self._held:
            if end_s is None or monotonic() <= end_s:
                self._write(sequence)
        self._tell()

    def _write(self, sequence: int) -> None:
        prompt = self._held.get(sequence, ())
        n = len(prompt)
        if n < LEAST_TOKENS or self._saved.get(sequence, 0) >= n:
            return
        policy = self._driver.save_sequence(sequence)
        marks = () if policy is None else (Mark(n, None, policy),)

        def write(path: Path) -> int | None:
            n_bytes, n_tokens = self._native.save(sequence, path)
            self._saved[sequence] = min(n, n_tokens)  # an answer follows, or its client left
            return n_bytes if n_tokens >= LEAST_TOKENS or not n_bytes else None

        self._folder.save(self._key, prompt, self._has_part, marks, write)

    def _bring(self, sequence: int, kept: Listed) -> bool:
        """Puts a file's conversation in the place of what a sequence holds."""
        marks = self._folder.load(kept, 0, lambda path: self._native.restore(sequence, path))
        if marks is None:
            return False
        if marks and marks[-1].policy is not None:
            with suppress(PolicyError):  # another policy's: it starts anew
                self._driver.restore_sequence(sequence, marks[-1].policy)
        return True

    def _tell(self) -> None:
        for sentence in self._folder.notes[self._told :]:
            self._note(sentence)
        self._told = len(self._folder.notes)
