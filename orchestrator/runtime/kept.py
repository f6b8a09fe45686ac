"""Saves conversations to files, from which another sequence or a later run can continue them.

The files are in the folder of --prompt-cache.
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
from orchestrator.runtime.driver import BaseDriver
from orchestrator.runtime.encoder import Encoder
from orchestrator.runtime.prompt_copies import Listed, Mark, PromptFolder, Stored, common_prefix
from orchestrator.runtime.store_layout import has_flash

_FORMAT = 1
# Shorter conversations are not saved, because computing them again is fast.
LEAST_TOKENS = 16
# A sequence is saved after an answer if at least this many of its tokens, and at least half of
# them, are in no file.
_UNSAVED_TOKENS = 1024


def prompt_folder(config: Config) -> PromptFolder | None:
    """Open the folder of --prompt-cache. Return None if the option was not given.

    Raises ConfigError if the folder cannot be used.
    """
    if config.prompt_cache is None:
        return None
    return PromptFolder(config.prompt_cache, config.prompt_cache_limit)


def state_key(
    config: Config, model: ExpertModel, plan: Plan, encoder: Encoder | None = None
) -> str:
    """Return a key for saved sequences. A saved sequence is only valid for a run with the same key.

    The key describes the model's files, the layout of the KV cache, and the precisions (tiers) in
    use. If experts can have several precisions or be skipped, it also describes the policy. With an
    image encoder, it describes that file and the size of images. Raises OSError if a model file
    cannot be read.
    """
    files = [(path.stat().st_size, path.stat().st_mtime_ns) for path in model.files]
    parts: dict[str, Any] = {
        "format": _FORMAT,
        "llama": built.stamp().get("version"),
        "model": identity(model),
        "files": files,
        "kv": config.kv,
        "flash": has_flash(config, plan),  # without flash attention, values are transposed
        "tiers": plan.tier_names,
    }
    if encoder is not None:
        stat = encoder.path.stat()
        parts["images"] = stat.st_size, stat.st_mtime_ns, config.image_max_tokens
    placement = plan.placement
    if placement is not None and (len(plan.tiers) > 1 or plan.skip):
        settings = placement.settings
        names = [name for name, each in settings.declared().items() if each.recorded]
        parts["policy"] = placement.name, plan.skip, config.renormalize, config.exact_tiers
        parts["settings"] = {name: str(getattr(settings, name)) for name in sorted(names)}
    return json.dumps(parts, sort_keys=True)


def is_worth_writing(n_tokens: int, n_saved: int) -> bool:
    """Return whether to save a sequence to a file after an answer.

    This is worth the time if many of its tokens are new. n_tokens: number of tokens of the
    sequence. n_saved: how many of these a file already holds.
    """
    return n_tokens - n_saved >= max(_UNSAVED_TOKENS, n_tokens // 2)


class KeptConversations:
    """Saves conversations to files, and restores them when a prompt continues them.

    A conversation is the contents of a sequence. It is saved before another conversation replaces
    it, and when the server ends. It is also saved after an answer, if many of its tokens are in no
    file. One thread (`thread`) does all reading and writing.
    """

    def __init__(
        self,
        folder: PromptFolder,
        key: str,
        driver: BaseDriver,
        native: NativeServer,
        thread: str,
        note: Callable[[str], None],
    ) -> None:
        """Prepare to save and restore the sequences of a server.

        key: the result of state_key, which describes the run. native: llama.cpp's server core.
        thread: name of the thread that does the work. note: gets sentences for the log.
        """
        self._folder, self._key, self._driver = folder, key, driver
        self._native, self._note = native, note
        # The tokens of each sequence that are in a file.
        self._saved: dict[int, np.ndarray] = {}
        self._failed: set[int] = set()  # sequences whose last request failed
        self._n_shown = 0  # of the folder's notes
        self.thread = ThreadPoolExecutor(1, thread)

    def before_prompt(self, sequence: int, prompt: Sequence[int]) -> None:
        """Restore the saved conversation that a prompt continues, before the prompt is computed.

        The conversation that is replaced in the sequence is saved first. The caller blocks until
        this is done. No request may decode on the sequence meanwhile. prompt: the tokens of the
        prompt. If they are not known, the list is empty, and nothing is restored.
        """
        work = self._submitted(self._recall, sequence, prompt)
        if work is not None:
            work.result()

    def answered(self, sequences: Iterable[int], is_good: bool) -> None:
        """Save the conversations of a finished request to files, in the background.

        A conversation is saved if at least half of its tokens, and at least _UNSAVED_TOKENS tokens,
        are not in a file yet. Call this before another request uses the sequences. sequences: the
        numbers of the sequences that hold the conversations. is_good: whether the request
        succeeded; conversations of a failed request are not saved.
        """
        for each in sequences:
            self._submitted(self._keep, each, is_good)

    def after_that(self, work: Callable[[], None]) -> bool:
        """Call `work` on the background thread that reads and writes conversations.

        The thread first completes all work that was submitted before. Returns False, and does not
        call `work`, if the thread has been shut down.
        """
        return self._submitted(work) is not None

    def _submitted(self, work: Callable[..., None], *args: Any) -> Future[None] | None:
        try:
            return self.thread.submit(work, *args)
        except RuntimeError:
            return None  # the server ends

    def _recall(self, sequence: int, prompt: Sequence[int]) -> None:
        """Restore the file that holds the longest part of a prompt into a sequence.

        If the file or the prompt replaces other tokens in the sequence, these are saved first.
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
        """Return (the saved file from which a prompt can reuse most tokens, number of tokens).

        A file is returned only if it saves computing more than LEAST_TOKENS tokens beyond those
        that memory saves. Otherwise, None is returned instead of a file. spared: number of prompt
        tokens that are in memory and need not be computed.
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
        """Save all conversations when the server ends, and end the background thread.

        This thread saves and restores conversations while the server runs. Call this after
        llama.cpp's server core has ended. end_s: the time (of time.monotonic) after which no
        further conversation is saved; None for no limit.
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
        is_whole = False

        def write(path: Path) -> Stored | None:
            nonlocal is_whole
            n_bytes, n_tokens, parts = self._native.save(sequence, path)
            # llama.cpp empties a sequence to free memory for others, and saves nothing while it
            # ends. `leave` saves the sequence then.
            is_whole = n_tokens == n
            return Stored(n_bytes, parts) if is_whole else None

        self._folder.save(self._key, held, self._native.needs_checkpoints, marks, write)
        if is_whole:
            self._saved[sequence] = np.array(held, np.int32)

    def _bring(self, sequence: int, kept: Listed, n_usable: int) -> bool:
        """Replace the contents of a sequence with a saved conversation. Return False on failure.

        n_usable: number of tokens of the conversation that the prompt reuses.
        """
        marks = self._folder.load(
            kept, None, lambda path: self._native.restore(sequence, path, kept.file_marks())
        )
        if marks is None:
            return False
        known = [each.policy for each in marks if each.policy and each.length <= n_usable + 1]
        if known:
            with suppress(PolicyError):  # another policy made the state, so it is not used
                self._driver.restore_sequence(sequence, known[-1])
        return True

    def _tell(self) -> None:
        for sentence in self._folder.notes[self._n_shown :]:
            self._note(sentence)
        self._n_shown = len(self._folder.notes)
