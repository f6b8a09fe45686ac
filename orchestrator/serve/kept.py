"""The conversations of a server in the folder of --prompt-cache, in the form in which a chat keeps
them: what one of both has read, the other does not read again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic

from orchestrator.engine.driver import PlainDriver
from orchestrator.engine.engine import Engine
from orchestrator.engine.prompt_copies import Listed, common_prefix
from orchestrator.engine.prompts import LEAST_TOKENS, is_worth_writing, state_key
from orchestrator.engine.steps import Mark, SequenceState
from orchestrator.errors import PolicyError
from orchestrator.native import NativeServer

# A prompt that differs from the one before in no more than its last tokens goes on from what its
# sequence holds: templates close a turn in another way than they open the answer to it.
_TAIL_TOKENS = 16


class KeptConversations:
    """What each sequence holds, and what of it is on disk.

    Its methods but leave are for `thread`, on which one of them runs at a time. Behind recall a
    request decodes on the sequence, and answered follows where it came to its end.
    """

    def __init__(
        self,
        engine: Engine,
        native: NativeServer,
        thread: str,
        note: Callable[[str], None],
    ) -> None:
        """engine: with a prompt folder; thread: its name; note gets a sentence for the log. Raises
        OSError."""
        assert engine.prompt_folder is not None
        self._engine, self._native, self._note = engine, native, note
        self._folder = engine.prompt_folder
        self._key = state_key(engine.config, engine.model, engine.plan)
        self._has_part = SequenceState(engine.context).has_part
        self._held: dict[int, Sequence[int]] = {}  # the prompt that each sequence had last
        self._saved: dict[int, int] = {}  # tokens of that prompt, once it is on disk
        self._whole: set[int] = set()  # sequences that hold all of that prompt
        self._driver = engine.driver if engine.managed else PlainDriver()
        self._told = 0  # of the folder's notes
        self.thread = ThreadPoolExecutor(1, thread)

    def recall(self, sequence: int, prompt: Sequence[int]) -> None:
        """Before a prompt is read: where its sequence holds another conversation, that one is
        written, and the file takes its place that holds most of the prompt."""
        self._engine.end_idle()
        held = self._held.get(sequence, ())
        self._whole.discard(sequence)
        live = common_prefix(prompt, held)
        if live < max(1, len(held) - _TAIL_TOKENS):
            self._write(sequence)
            best, most = None, max(live, LEAST_TOKENS)
            for each in self._folder.of(self._key):
                common = each.usable(common_prefix(prompt[:-1], each.tokens))
                if common > most:
                    best, most = each, common
            self._saved[sequence] = 0
            if best is not None and self._bring(sequence, best):
                self._saved[sequence] = min(most, len(prompt))
        self._held[sequence] = prompt
        self._tell()

    def answered(self, sequence: int, prompt: Sequence[int]) -> None:
        """Behind an answer: what took long to read is written."""
        if self._held.get(sequence) is not prompt:
            return  # the next one has begun
        self._whole.add(sequence)
        n = len(prompt)
        if is_worth_writing(n, self._saved.get(sequence, 0)):
            self._write(sequence)
        self._tell()

    def lose(self, sequence: int) -> None:
        """Before a sequence forgets what it holds."""
        self._write(sequence)
        self._held.pop(sequence, None)
        self._whole.discard(sequence)
        self._tell()

    def leave(self, end_s: float | None) -> None:
        """At the end, once nothing decodes and the native server has returned. end_s: of the
        monotonic clock, when no further conversation is begun to be written."""
        context = self._engine.context
        for sequence in self._whole:
            prompt = self._held[sequence]
            if self._has_part or (end_s is not None and monotonic() > end_s):
                continue  # such a memory cannot be cut to the tokens that are known
            context.forget_from(len(prompt), sequence)
            state = SequenceState(context, sequence)
            self._write(sequence, partial(state.save, tokens=prompt))
        self._tell()

    def _write(self, sequence: int, save: Callable[[Path], int] | None = None) -> None:
        prompt = self._held.get(sequence, ())
        n = len(prompt)
        if n < LEAST_TOKENS or self._saved.get(sequence, 0) >= n:
            return
        policy = self._driver.save_sequence(sequence)
        marks = () if policy is None else (Mark(n, None, policy),)
        write = save or (lambda path: self._native.save(sequence, path))
        self._folder.save(self._key, prompt, self._has_part, marks, write)
        self._saved[sequence] = n

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
