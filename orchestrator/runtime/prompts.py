"""The prompt cache: what of a prompt is in memory, on the shelf or on disk is not read again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from gguf_tools import built, interrupts
from gguf_tools.experts import ExpertModel
from orchestrator.cache.profile import identity
from orchestrator.config import Config
from orchestrator.memory.footprint import PROMPT_MARKS
from orchestrator.memory.plan import MemoryPlan
from orchestrator.native.llama import Model
from orchestrator.runtime.load import Loaded
from orchestrator.runtime.prompt_copies import (
    Copy,
    Listed,
    PromptFolder,
    Shelf,
    common_prefix,
    usable,
)
from orchestrator.runtime.steps import Mark, Steps
from orchestrator.runtime.store_layout import has_flash

_FORMAT = 1
# Fewer tokens are read again sooner than they are kept.
LEAST_TOKENS = 16
# A place where prompts went apart is marked where it spares this many tokens: a prompt is read in
# one step more for it.
_SPARED_TOKENS = 64
# So many tokens that are not on disk are written behind an answer, if they are half of it all.
_UNSAVED_TOKENS = 1024


class PromptCache:
    """Keeps the sequence of one loaded model, and brings kept ones back into it.

    A caller that reads a prompt calls recall, then reads up to each of stops and calls mark there,
    and answered behind the answer. Before the model goes it calls leave, or put_away where another
    one with the same shelf follows. Without a budget and a folder all of that does nothing.

    What a policy knew of a sequence is kept with it (Driver.save_sequence, Policy.save_sequence).
    """

    def __init__(
        self,
        steps: Steps,
        vocabulary: Model,
        n_ctx: int,
        shelf: Shelf,
        folder: PromptFolder | None,
        key: str,
    ) -> None:
        """key: all that a state depends on beside its tokens, as a text."""
        self._steps, self._vocabulary, self._n_ctx = steps, vocabulary, n_ctx
        self._shelf, self._folder, self._key = shelf, folder, key
        self._turn = 0  # tokens before the latest turn; 0 in a conversation's first one
        self._prompt_end = 0
        self._apart = 0  # where this prompt and a kept one go apart
        self._saved = 0  # tokens of the sequence that are on disk

    @classmethod
    def of(
        cls,
        config: Config,
        model: ExpertModel,
        loaded: Loaded,
        shelf: Shelf,
        folder: PromptFolder | None,
    ) -> PromptCache:
        """Of a model as it is loaded; the shelf gets the memory that its plan has for it."""
        plan = loaded.plan
        shelf.keep(plan.prompt_bytes)
        loaded.driver.set_prompts(plan.prompt_bytes, shelf.keep)
        key = ""
        if shelf.budget_bytes or folder:
            key = state_key(config, model, plan)
        return cls(loaded.steps, loaded.model, loaded.context.n_ctx, shelf, folder, key)

    @property
    def enabled(self) -> bool:
        return self._shelf.budget_bytes > 0 or self._folder is not None

    def recall(self, prompt: Sequence[int]) -> list[int]:
        """Makes the memory hold as much of a prompt as is kept anywhere. Returns the prompt in the
        tokens in which it was read, where those stand for the same text."""
        if not self.enabled:
            return list(prompt)
        while True:
            tokens, best = self._best(prompt, self._kept())
            if best is None or self._bring(best):
                break
        self._prompt_end = len(tokens)
        self._steps.keep_prefix(tokens)
        self._count_marks()
        return tokens

    def _best(
        self, prompt: Sequence[int], kept: Sequence[Copy | Listed]
    ) -> tuple[list[int], Copy | Listed | None]:
        """What of `kept` holds most of a prompt, and the prompt in its tokens; None where that is
        the sequence itself. What the prompt would take away of the sequence is put away."""
        cached = self._steps.cached
        self._apart = 0
        tokens, common = self._compared(prompt, cached)
        most, live_common = self._live_usable(common), common
        best: Copy | Listed | None = None
        for each in kept:
            other, common = self._compared(prompt, each.tokens.tolist())
            if len(each.tokens) < self._n_ctx and each.usable(common) > most:
                best, most, tokens = each, each.usable(common), other
        if best is None:
            if self._is_another(live_common):
                self.put_away()
            self._follow(live_common, len(tokens))
        else:
            self._prompt_end = 0
            self._turn = most if most == len(best.tokens) else 0
        return tokens, best

    def stops(self, prompt: Sequence[int]) -> list[int]:
        """Lengths of the prompt at which to stop and mark while it is read, the last one its own:
        where the model's memory cannot be cut, before its last token, from which the answer can be
        given again, and where it goes apart from another prompt."""
        end, done = len(prompt), len(self._steps.cached)
        self.mark()
        if not self._shelf.budget_bytes or not self._steps.state.has_part:
            return [end]
        apart = self._apart if self._apart >= done + _SPARED_TOKENS else 0
        return [each for each in sorted({apart, end - 1}) if each > done] + [end]

    def mark(self) -> None:
        """Marks the place that the sequence has come to, where there is memory for that."""
        steps = self._steps
        n = len(steps.cached)
        if not self.enabled or n == 0 or any(each.length == n for each in steps.marks):
            return
        # Behind its whole prompt an answer cannot begin: that needs the last token's logits.
        with_part = steps.state.has_part and n != self._prompt_end
        steps.mark(with_part and self._room_for(steps.state.n_bytes(part=True)))
        self._count_marks()

    def answered(self) -> None:
        """Behind an answer: what took long to read is written to the folder."""
        if self._folder is not None and is_worth_writing(len(self._steps.cached), self._saved):
            self._save()

    def put_away(self) -> None:
        """Keeps a copy of the sequence as it is."""
        steps, shelf = self._steps, self._shelf
        if not self.enabled or len(steps.cached) < LEAST_TOKENS:
            return
        tokens, marks = np.array(steps.cached, np.int32), self._marks_at_end()
        beside = tokens.nbytes + sum(each.n_bytes for each in marks)
        if shelf.make_room(steps.state.n_bytes() + beside):
            shelf.add(Copy(self._key, tokens, steps.state.read(), steps.state.has_part, marks))
        else:
            self._save()

    def leave(self) -> None:
        """Before the end, once: everything goes to the folder, where there is one."""
        if self._folder is not None:
            for copy in self._shelf.all():
                self._folder.save_copy(copy)
            self._save()
            self._folder = None

    def _kept(self) -> list[Copy | Listed]:
        kept: list[Copy | Listed] = list(self._shelf.of(self._key))
        if self._folder is not None:
            kept += self._folder.of(self._key)
        return kept

    def _compared(self, prompt: Sequence[int], held: Sequence[int]) -> tuple[list[int], int]:
        """The prompt as `held` has it, and how many tokens of it are the same. The last one of a
        prompt counts as another one, since its logits are needed."""
        tokens = as_held(prompt, held, self._vocabulary)
        if len(tokens) >= self._n_ctx:
            tokens = list(prompt)
        common = common_prefix(tokens[:-1], held)
        self._apart = max(self._apart, common)
        return tokens, common

    def _live_usable(self, common: int) -> int:
        steps = self._steps
        places = [each.length for each in steps.marks if each.part is not None]
        cut = not steps.state.has_part or (not steps.state.recurrent and steps.can_cut(common))
        return usable(len(steps.cached), not cut, places, common)

    def _is_another(self, common: int) -> bool:
        """Whether a prompt that shares so much with the sequence is no further turn of it, nor the
        latest one again."""
        n = len(self._steps.cached)
        again = common >= self._prompt_end - 1 or 0 < self._turn <= common
        return common < n and not again

    def _follow(self, common: int, n_tokens: int) -> None:
        if common >= self._prompt_end - 1 and n_tokens != self._prompt_end:
            self._turn = common
        elif not 0 < self._turn <= common:
            self._turn = 0
        self._saved = min(self._saved, common)

    def _bring(self, kept: Copy | Listed) -> bool:
        """Puts a copy in the place of the sequence, which is put away; False where it cannot be
        used, and is gone."""
        steps, shelf = self._steps, self._shelf
        if isinstance(kept, Copy):
            shelf.remove(kept)  # so that it does not go for the other one
            shelf.live_bytes += kept.n_bytes
        if common_prefix(steps.cached, kept.tokens) < len(steps.cached):
            self.put_away()
        marks: tuple[Mark, ...] | None
        with interrupts.held():
            steps.rewind(0)
            shelf.live_bytes = 0
            if isinstance(kept, Copy):
                marks = kept.marks if steps.state.write(kept.state) else None
            else:
                marks = self._load(kept)
            if marks is None:
                steps.rewind(0)
                return False
            steps.hold(kept.tokens.tolist(), marks)
        self._count_marks()
        self._saved = 0 if isinstance(kept, Copy) else len(kept.tokens)
        goes_apart = self._turn < len(kept.tokens)
        if isinstance(kept, Copy) and goes_apart and shelf.make_room(kept.n_bytes):
            shelf.add(kept)
        return True

    def _load(self, kept: Listed) -> tuple[Mark, ...] | None:
        assert self._folder is not None
        steps, shelf = self._steps, self._shelf
        room = max(0, shelf.budget_bytes - shelf.used_bytes)
        return self._folder.load(kept, room, lambda path: steps.state.load(path, kept.n_stored))

    def _marks_at_end(self) -> tuple[Mark, ...]:
        """The marks, and what the policy knows where the sequence ends."""
        steps = self._steps
        policy, n = steps.policy_state(), len(steps.cached)
        marks = [each for each in steps.marks if each.length < n or each.part is not None]
        return (*marks, Mark(n, None, policy)) if policy is not None else tuple(marks)

    def _save(self) -> None:
        steps, folder = self._steps, self._folder
        if folder is None or len(steps.cached) < LEAST_TOKENS:
            return
        if not folder.has(self._key, steps.cached):
            folder.save(
                self._key,
                steps.cached,
                steps.state.has_part,
                self._marks_at_end(),
                lambda path: steps.state.save(path, steps.cached),
            )
        self._saved = len(steps.cached)

    def _room_for(self, n_bytes: int) -> bool:
        """Room for a mark's part, in the place of copies and of older marks. The oldest mark goes
        last: other conversations often begin as far as that."""
        marks, shelf = self._steps.marks, self._shelf
        while len(marks) >= PROMPT_MARKS or not shelf.make_room(n_bytes):
            if not marks or n_bytes > shelf.budget_bytes:
                return False
            marks.pop(min(1, len(marks) - 1))
            self._count_marks()
        return True

    def _count_marks(self) -> None:
        self._shelf.live_bytes = sum(each.n_bytes for each in self._steps.marks)


def is_worth_writing(n_tokens: int, n_saved: int) -> bool:
    """Behind an answer: of a sequence of n_tokens, of which n_saved are on disk."""
    return n_tokens - n_saved >= max(_UNSAVED_TOKENS, n_tokens // 2)


def kept_prompts(config: Config) -> tuple[Shelf, PromptFolder | None]:
    """Where sequences are kept: in memory, what goes for want of room in the folder that config
    names. Raises ConfigError for a folder that cannot be."""
    if config.prompt_cache is None:
        return Shelf(), None
    folder = PromptFolder(config.prompt_cache, config.prompt_cache_limit)
    return Shelf(on_drop=folder.save_copy), folder


def state_key(config: Config, model: ExpertModel, plan: MemoryPlan) -> str:
    """The model's files, the precisions in which its experts are computed and who chooses among
    them, and how keys and values are laid out, as a text. Raises OSError.

    Where every expert is computed in one precision, no policy and no budget changes the state.
    Without flash attention values are transposed.
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


def as_held(prompt: Sequence[int], held: Sequence[int], vocabulary: Model) -> list[int]:
    """The prompt with the tokens of `held` wherever both stand for the same text.

    A model often answers in other tokens than its tokenizer makes of the answer's text, so that the
    next prompt would differ from what was read. Texts are compared between control tokens, where no
    token crosses.
    """
    whole = list(prompt)
    done = common_prefix(whole, held)
    at = done
    while done < len(whole) and at < len(held):
        if whole[done] == held[at]:
            done, at = done + 1, at + 1
            continue
        end, held_end = _span(whole, done, vocabulary), _span(held, at, vocabulary)
        text = _text(whole[done:end], vocabulary)
        held_text = _text(held[at:held_end], vocabulary)
        rest: list[int] | None = []
        if text != held_text:
            # The last token of an answer may not have been read, where the sequence ends.
            starts = held_end == len(held) and held_text and text.startswith(held_text)
            rest = _exact_tokens(text[len(held_text) :], vocabulary) if starts else None
        if rest is None or held_end == at:
            break
        whole[done:end] = [*held[at:held_end], *rest]
        done += held_end - at
        at = held_end
    return whole


def _span(tokens: Sequence[int], start: int, vocabulary: Model) -> int:
    """Where the text ends that begins at start: at the next control token."""
    for i in range(start, len(tokens)):
        if vocabulary.is_control(tokens[i]):
            return i
    return len(tokens)


def _text(tokens: Sequence[int], vocabulary: Model) -> bytes:
    return b"".join(vocabulary.piece(token, True) for token in tokens)


def _exact_tokens(text: bytes, vocabulary: Model) -> list[int] | None:
    """Tokens that stand for exactly this text; None where the tokenizer makes no such."""
    try:
        tokens = vocabulary.tokenize(text.decode(), add_special=False, parse_special=False)
    except UnicodeDecodeError:
        return None
    return tokens if _text(tokens, vocabulary) == text else None
