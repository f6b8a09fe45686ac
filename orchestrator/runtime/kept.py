"""Conversations that outlive their sequence and their process.

They are files in the folder of --prompt-cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from gguf_tools import built
from gguf_tools.experts import ExpertModel
from orchestrator.cache.profile import identity
from orchestrator.config import Config
from orchestrator.errors import PolicyError
from orchestrator.native import NativeServer
from orchestrator.plan.records import Plan
from orchestrator.runtime.driver import NoopDriver
from orchestrator.runtime.prompt_copies import Listed, Mark, PromptFolder, Stored, common_prefix
from orchestrator.runtime.store_layout import has_flash

_FORMAT = 1
# Fewer tokens than these are read again rather than kept.
LEAST_TOKENS = 16
# A sequence is written after an answer if this many of its tokens, and half of them, are not on
# disk.
_UNSAVED_TOKENS = 1024


def prompt_folder(config: Config) -> PromptFolder | None:
    """Return the folder of --prompt-cache; None without one.

    Raises ConfigError for a folder that cannot be used.
    """
    if config.prompt_cache is None:
        return None
    return PromptFolder(config.prompt_cache, config.prompt_cache_limit)


def state_key(config: Config, model: ExpertModel, plan: Plan) -> str:
    """Return a text that identifies everything on which a sequence's state depends.

    Besides its tokens, these are the model's files, the tiers and the policy that chooses among
    them, and the layout of keys and values.

    With one tier neither policy nor budget changes the state. Without flash attention values are
    transposed. Raises OSError.
    """
    files = [(path.stat().st_size, path.stat().st_mtime_ns) for path in model.files]
    parts: dict[str, Any] = {
        "format": _FORMAT,
        "llama": built.stamp().get("version"),
        "model": identity(model),
        "files": files,
        "kv": config.kv,
        "flash": has_flash(config, plan),
        "tiers": plan.tier_names,
    }
    placement = plan.placement
    if placement is not None and (len(plan.tiers) > 1 or plan.skip):
        settings = placement.settings
        names = [name for name, each in settings.declared().items() if each.recorded]
        parts["policy"] = placement.name, plan.skip, config.renormalize, config.exact_tiers
        parts["settings"] = {name: str(getattr(settings, name)) for name in sorted(names)}
    return json.dumps(parts, sort_keys=True)


def is_worth_writing(n_tokens: int, n_saved: int) -> bool:
    """Return whether to write a sequence of n_tokens after an answer if n_saved are in a file."""
    return n_tokens - n_saved >= max(_UNSAVED_TOKENS, n_tokens // 2)


class KeptConversations:
    """Writes what sequences hold to files, and brings files back into sequences.

    A conversation is written before another conversation replaces it in its sequence, after an
    answer if many of its tokens are in no file, and at the end. All work is done on `thread`, one
    piece after the other; leave is called after the end of that.
    """

    def __init__(
        self,
        folder: PromptFolder,
        key: str,
        driver: NoopDriver,
        native: NativeServer,
        thread: str,
        note: Callable[[str], None],
    ) -> None:
        """key: everything that a state depends on besides its tokens (state_key).

        thread: its name. note: gets sentences for the log.
        """
        self._folder, self._key, self._driver = folder, key, driver
        self._native, self._note = native, note
        # The tokens of each sequence that are in a file.
        self._saved: dict[int, np.ndarray] = {}
        self._failed: set[int] = set()  # sequences whose last request failed
        self._n_shown = 0  # of the folder's notes
        self.thread = ThreadPoolExecutor(1, thread)

    def before_prompt(self, sequence: int, prompt: Sequence[int]) -> None:
        """Restore and save conversations before a prompt is read into a sequence.

        The caller makes sure that nothing decodes on the sequence, and waits for the work. The
        prompt is empty if it is not known.
        """
        work = self._submitted(self._recall, sequence, prompt)
        if work is not None:
            work.result()

    def answered(self, sequences: Iterable[int], is_good: bool) -> None:
        """Called after a request, before another request gets its sequences.

        is_good: it did not fail; what a failed one left is not written.
        """
        for each in sequences:
            self._submitted(self._keep, each, is_good)

    def after_that(self, work: Callable[[], None]) -> bool:
        """Do some work after all work that was submitted before; False if the runtime ends."""
        return self._submitted(work) is not None

    def _submitted(self, work: Callable[..., None], *args: Any) -> Future[None] | None:
        try:
            return self.thread.submit(work, *args)
        except RuntimeError:
            return None  # the server ends

    def _recall(self, sequence: int, prompt: Sequence[int]) -> None:
        """Restore the longest part of the prompt that any file has.

        Before that, save the tokens of the sequence that this or the prompt replaces.
        """
        self._saved.setdefault(sequence, np.empty(0, np.int32))
        spared, is_another = self._native.match(sequence, prompt)
        best, n_usable = self._best(prompt, spared)
        if best is not None or is_another:
            held = self._native.tokens(sequence)
            if best is None or common_prefix(held, best.tokens) < len(held):
                self._write(sequence, held)
        if best is not None and self._bring(sequence, best, n_usable):
            self._saved[sequence] = best.tokens
        self._failed.discard(sequence)
        self._tell()

    def _best(self, prompt: Sequence[int], spared: int) -> tuple[Listed | None, int]:
        """Return the file that spares most of a prompt, and how many of its tokens can be used.

        Return None if `spared` tokens, which memory spares, are about as many.
        """
        best, most = None, spared + LEAST_TOKENS
        if len(prompt) <= most:
            return None, 0
        for each in self._folder.of(self._key):
            tokens = self._native.as_held(prompt, each.tokens.tolist())
            n_usable = each.usable(common_prefix(tokens[:-1], each.tokens))
            if n_usable > most:
                best, most = each, n_usable
        return best, most

    def _keep(self, sequence: int, is_good: bool) -> None:
        if not is_good:
            self._failed.add(sequence)
            return
        held = self._native.tokens(sequence)
        if is_worth_writing(len(held), common_prefix(held, self._saved.get(sequence, ()))):
            self._write(sequence, held)
        self._tell()

    def leave(self, end_s: float | None) -> None:
        """Ends the thread and writes everything, once the native server has returned.

        end_s: of the monotonic clock, when no further conversation is begun to be written.
        """
        self.thread.shutdown()
        for sequence in self._saved:
            if end_s is None or monotonic() <= end_s:
                self._write(sequence, self._native.tokens(sequence))
        self._tell()

    def _write(self, sequence: int, held: Sequence[int]) -> None:
        n = len(held)
        if n < LEAST_TOKENS or sequence in self._failed:
            return
        if common_prefix(held, self._saved[sequence]) == n or self._folder.has(self._key, held):
            return
        policy = self._driver.save_sequence(sequence)
        marks = () if policy is None else (Mark(n, None, policy),)

        def write(path: Path) -> Stored | None:
            n_bytes, n_tokens, parts = self._native.save(sequence, path)
            # llama.cpp empties a sequence to free memory for others.
            return Stored(n_bytes, parts) if n_tokens == n else None

        self._folder.save(self._key, held, self._native.has_part, marks, write)
        self._saved[sequence] = np.array(held, np.int32)

    def _bring(self, sequence: int, kept: Listed, n_usable: int) -> bool:
        """Replaces what a sequence holds by a file's conversation.

        n_usable: how many tokens of it the prompt goes on from.
        """
        marks = self._folder.load(
            kept, None, lambda path: self._native.restore(sequence, path, kept.file_marks())
        )
        if marks is None:
            return False
        known = [each.policy for each in marks if each.policy and each.length <= n_usable + 1]
        if known:
            with suppress(PolicyError):  # it is another policy's: this one starts anew
                self._driver.restore_sequence(sequence, known[-1])
        return True

    def _tell(self) -> None:
        for sentence in self._folder.notes[self._n_shown :]:
            self._note(sentence)
        self._n_shown = len(self._folder.notes)
