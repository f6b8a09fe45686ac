"""The model that answers: an engine, llama.cpp's server on it, and the thread that decodes."""

from __future__ import annotations

import re
import threading
import unicodedata
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from time import monotonic
from typing import Any

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.file.reader import metadata_value
from gguf_tools.process import peak_rss_bytes
from orchestrator.cache.profile import identity
from orchestrator.config import Config, native_log_enabled
from orchestrator.errors import ConfigError, MoeEdgeError, NativeError
from orchestrator.events import Phase
from orchestrator.memory.footprint import PROMPT_MARKS, part_bytes
from orchestrator.native import (
    FAILED,
    NO_ROOM,
    NativeRequest,
    NativeServer,
    ServerLibrary,
    native_config,
)
from orchestrator.native.llama import Bindings
from orchestrator.policy import policy_settings
from orchestrator.runtime.driver import PlainDriver
from orchestrator.runtime.engine import Engine
from orchestrator.runtime.report import StoreCosts
from orchestrator.serve.admission import (
    BODY_FACTOR,
    PROBS_BYTES,
    UNREAD_BYTES,
    WHOLE_FACTOR,
    bodies_bytes,
)
from orchestrator.serve.kept import KeptConversations
from orchestrator.serve.settings import LEAST_BODY_BYTES, ServeSettings
from orchestrator.settings import Settings

# What HTTP and llama.cpp's server take beside what a chat takes, and each answer that decodes at
# once. Measured with eight clients: 12.3 MiB, and 0.13 MiB more for each of eight answers.
PROCESS_BYTES = 15 * 2**20
ANSWER_BYTES = 2**19
# How far a stream that is being made may be ahead of its client: a stream further ahead ends. At
# worst it is there six times: twice while it grows, twice where it was taken from, and for Python
# and the socket.
AHEAD_BYTES = 2**19
AHEAD_COPIES = 6
# For each token of the vocabulary: a place among what an answer may go on with, and once among
# those whose probabilities are asked for (get_token_probabilities); and once, where a grammar
# refuses one, its code points and its places in the lists of those that are left
# (llama_grammar_apply_impl).
CANDIDATE_BYTES = 12
GRAMMAR_TOKEN_BYTES = 256
# A prompt is scored in parts of so many tokens at most. The memory for a grammar's look at each
# token of the vocabulary is free then, since nothing else decodes: the probabilities of one row are
# computed in it.
SCORED_TOKENS = 32
# How many of the likeliest tokens a score may come with: OpenAI's limit for completions. Of each
# token that was scored there is itself, its place, these, and their log-probabilities.
MOST_LIKELIEST = 5
# Sentences about requests that are remembered, so that each is in the log once.
MOST_NOTED = 256
SCORE_BYTES = 4 + 12 * (1 + MOST_LIKELIEST)
SCORED_MOST = 16384

# Tokens of a text are counted in pieces, so that counting takes no memory.
PIECE_CHARS = 8192
# Where llama.cpp cuts a text before it looks for merges in the parts, by `tokenizer.ggml.pre`: into
# clauses, since words are joined across spaces, or lines. Elsewhere it cuts words.
_BY_CLAUSE, _BY_LINE = ("exaone-moe", "deepseek-llm"), ("gemma4", "sarvam-moe")
# Where Unicode has marks, which are on the letter before.
_MARKED = range(0x300, 0x1F000)


class Stopped(Exception):
    """The server was told to end before it could answer."""


def most_scored(config: Config) -> int:
    """How many tokens a request may have scored. config: the model's, for one conversation."""
    return max(SCORED_MOST, config.ctx or 0)


def server_config(
    config: Config,
    parallel: int,
    longest_body_bytes: int = LEAST_BODY_BYTES,
    body_factor: int = BODY_FACTOR,
) -> Config:
    """The model's config for so many conversations at once. They share the context, each with as
    much of it as was asked for, and the memory for prompts that were read before. body_factor: what
    reading a body takes for each byte of the longest."""
    bodies = bodies_bytes(longest_body_bytes, parallel, body_factor)
    each = ANSWER_BYTES + PROBS_BYTES + AHEAD_COPIES * AHEAD_BYTES
    answers = each * parallel + UNREAD_BYTES
    return config.with_changes(
        ctx=config.ctx and config.ctx * parallel,
        sequences=parallel - 1,
        scored=SCORED_TOKENS,
        beside=PROCESS_BYTES + bodies + answers + SCORE_BYTES * most_scored(config),
        beside_token=GRAMMAR_TOKEN_BYTES + CANDIDATE_BYTES * (parallel + 1),
        conversations=True,
    )


def kept_prompts(n_bytes: int, part: int, parallel: int) -> tuple[int, int]:
    """What llama.cpp may keep of prompts within so many bytes: (MiB of copies of conversations,
    places of a running one to which its memory can go back). part: the bytes of such a place, 0 for
    models whose memory can be cut anywhere."""
    places = min(PROMPT_MARKS, n_bytes // 2 // (part * parallel)) if part else 0
    return (n_bytes - places * part * parallel) >> 20, places


class Words:
    """The parts of a text in which a tokenizer looks for merges. They are no shorter than
    llama.cpp's: letters and digits with the marks on them, and what is between; or clauses, or
    lines. is_whole: it looks for merges in the whole text."""

    def __init__(self, kind: str, cut: str) -> None:
        """kind, cut: `tokenizer.ggml.model` and `tokenizer.ggml.pre` of a model."""
        self.is_whole = kind not in ("gpt2", "gemma4")
        # Each byte is a symbol, but where lines are cut each character is one.
        self._by_byte = kind == "gpt2" and cut not in _BY_LINE
        self._joins_spaces = cut in _BY_CLAUSE

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        """Made for the first long text: looking for all marks takes 0.05 s."""
        if not self._by_byte:
            return [re.compile(r"[^\n]+"), re.compile(r"\n+")]
        marks = "".join(chr(n) for n in _MARKED if unicodedata.category(chr(n)).startswith("M"))
        spaces = r"|[^\S\r\n]" if self._joins_spaces else ""
        letters = re.compile(rf"(?:[^\W_]|[{marks}]{spaces})+")
        return [letters, re.compile(r"[\W_]+")]

    def longest(self, text: str) -> int:
        """Return the length of the longest word of a text, in bytes or in characters.

        The text is searched in pieces, because a regular expression lets no other thread run. Each
        pattern repeats a class of single characters, so a word may continue in the next piece.
        """
        return max((self._longest_of(each, text) for each in self._patterns), default=0)

    def _longest_of(self, pattern: re.Pattern[str], text: str) -> int:
        longest = 0
        begun = 0  # length of a word that reaches the end of the piece before
        for at in range(0, len(text), PIECE_CHARS):
            piece = text[at : at + PIECE_CHARS]
            goes_on = False
            for found in pattern.finditer(piece):
                word = found[0]
                length = len(word.encode() if self._by_byte else word)
                if found.start() == 0:
                    length += begun
                longest = max(longest, length)
                if found.end() == len(piece):
                    begun, goes_on = length, True
            begun = begun if goes_on else 0
        return longest


def sentence_of(error: Exception) -> str:
    """Why a step failed: the store's reason, or what a policy raised."""
    if isinstance(error, MoeEdgeError):
        return str(error)
    return f"the policy failed: {type(error).__name__}: {error}"


class Backend:
    """A loaded model and its native server. Free it with close.

    The native server computes on a thread of its own, which calls the policy back.
    """

    def __init__(
        self,
        config: Config,
        settings: ServeSettings,
        library: ServerLibrary,
        progress: Callable[[str, float | None], None],
        threads: str = "",
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Loads the model; what progress raises comes through. threads: how the names of its
        threads begin that are in llama.cpp for a request; note gets what is to be said while it
        serves. Raises MoeEdgeError in one of its forms."""
        self.name = settings.alias or config.model.stem
        self._note, self._noted = note, ""
        self._noted_once: set[str] = set()
        self.parallel, self.max_tokens = settings.parallel, config.max_tokens
        template = settings.chat_template_text()
        self.most_body_bytes = settings.most_body_bytes(config.ctx)
        self.most_scored = most_scored(config)
        model = ExpertModel.open(config.model, config.low)
        try:
            self.architecture, self.digest = model.hparams.arch, identity(model)
            self.modified_s = max(part.path.stat().st_mtime for part in model.parts)
            keys = ("tokenizer.ggml.model", "tokenizer.ggml.pre")
            self._words = Words(*(metadata_value(model.parts[0], key, str, "") for key in keys))
            self.body_factor = WHOLE_FACTOR if self._words.is_whole else BODY_FACTOR
            made = server_config(config, settings.parallel, self.most_body_bytes, self.body_factor)
            self.engine = Engine(made, model, progress)
        except BaseException:
            model.close()
            raise
        try:
            engine = self.engine
            self.cells, self.n_vocab = engine.n_ctx, engine.llama.n_vocab
            own_length = config.ctx or engine.model.hparams.context_length or engine.n_ctx
            self.slot_context = min(own_length, engine.n_ctx)
            plan = engine.plan
            cache_mib, checkpoints = kept_prompts(
                plan.prompt_bytes,
                part_bytes(engine.model, engine.config),
                settings.parallel,
            )
            spec = native_config(
                model_name=self.name,
                n_parallel=settings.parallel,
                n_slot_context=self.slot_context,
                n_batch=engine.context.n_ubatch,
                n_threads=config.n_threads,
                max_tokens=config.max_tokens,
                seed=config.seed,
                temp=config.temp,
                top_k=config.top_k,
                top_p=config.top_p,
                min_p=config.min_p,
                chat_template=template,
                cache_mib=cache_mib,
                n_checkpoints=checkpoints,
                most_ahead=AHEAD_BYTES,
                loud=native_log_enabled(),
            )
            # llama.cpp decodes two tokens to learn whether the context's memory can drop tokens.
            driver = engine.driver if engine.managed else PlainDriver()
            with driver.few_experts():
                handles = engine.llama.handle, engine.context.handle
                self._native = NativeServer(library, *handles, spec)
            self._native.note = note
            self.kept: KeptConversations | None = None
            if engine.prompt_folder is not None:
                self.kept = KeptConversations(engine, self._native, f"{threads}kept", note)
                self._native.set_before_prompt(self.kept.before_prompt)
        except BaseException:
            self.engine.close()
            raise
        if engine.managed:
            if engine.driver.may_wait:
                self._native.set_before_step(self._before_step)
            engine.driver.set_prompts(cache_mib << 20, self._native.keep_prompts)
            engine.driver.settle = self._native.settle
        self._settings: Settings | None = engine.policy.settings if engine.managed else None
        self._thread = threading.Thread(target=self._native.run, name="decode", daemon=True)
        self._thread.start()
        # Whether a request is in flight; and who begins or ends to be idle.
        self._is_asked, self._ends, self._turns = False, False, threading.Lock()
        engine.idle()  # until the first request

    def attend(self) -> None:
        """Before a request decodes: nothing goes on beside it. It waits for the step of one that
        was given up, for the expert that is read; for a thread."""
        self._is_asked = True
        with self._turns:
            self.engine.end_idle()

    def idle(self) -> None:
        """After the last request in flight and until attend, read experts that are likely to be
        used into free slots. Returns at once."""
        self._is_asked = False
        if self.kept is None or not self.kept.behind(self._idle):
            self._idle()

    def _idle(self) -> None:
        with self._turns:
            if not (self._is_asked or self._ends):
                self.engine.idle()

    def _before_step(self, is_answer: bool) -> None:
        self.engine.driver.follow(Phase.DECODE if is_answer else Phase.PREFILL)

    def request(self, route: str, body: bytes, sequences: Sequence[int] = ()) -> NativeRequest:
        """A request that has not begun; any thread may run it. sequences: those that it takes,
        where it decodes: behind attend, and before idle."""
        return self._native.request(route, body, sequences)

    def note_once(self, sentence: str) -> None:
        """Write a sentence to the log, unless it is one of those that were written last."""
        if sentence not in self._noted_once:
            if len(self._noted_once) >= MOST_NOTED:
                self._noted_once.clear()
            self._noted_once.add(sentence)
            self._note(sentence)

    def fault(self) -> str:
        """Why nothing that comes of the model's files can be right; empty where it can. What
        happened to them is noted, once."""
        sentence, is_fault = self.engine.look_at_files()
        if sentence and sentence != self._noted:
            self._noted = sentence
            self._note(sentence)
        return sentence if is_fault else ""

    def answered(self, sequences: Sequence[int], is_good: bool) -> None:
        """A request has ended, whose sequences nobody has taken yet. is_good: it did not fail."""
        if self.kept is not None:
            self.kept.answered(sequences, is_good)

    def forget(self, sequence: int) -> bool:
        """Drops what a sequence holds that nobody decodes on, behind attend; False at the end of
        the server."""
        if self.kept is not None:
            self.kept.before_prompt(sequence, [])
        return self._native.forget(sequence)

    def score(
        self, tokens: np.ndarray, sequence: int, goes_on: Callable[[], bool]
    ) -> Iterator[np.ndarray]:
        """Logits float32 [n, n_vocab] of each token of a prompt, int32, part by part: views, valid
        until the next one. For a thread beside the one that decodes, behind attend, while no
        request does; the sequence loses what it held, and others do where there is no room
        beside that. goes_on: asked before each part.

        Raises Stopped, MoeEdgeError, and whatever a policy raised."""
        engine = self.engine
        context, driver = engine.context, engine.driver if engine.managed else PlainDriver()
        others = [each for each in range(self.parallel) if each != sequence]
        if not self.forget(sequence):
            raise Stopped
        try:
            for start in range(0, len(tokens), context.outputs):
                if not goes_on():
                    raise Stopped
                part = tokens[start : start + context.outputs].tolist()
                driver.begin(Phase.PREFILL)
                places = range(start, start + len(part))
                status = context.decode_each(part, places, [sequence] * len(part))
                while status == NO_ROOM and others and self.forget(others.pop()):
                    status = context.decode_each(part, places, [sequence] * len(part))
                driver.check(status)
                if status and not goes_on():
                    raise Stopped
                if status:
                    raise NativeError("llama.cpp failed to evaluate")
                yield context.logits(len(part))
        finally:
            context.forget_from(0, sequence)
            driver.sequence_end(sequence)

    def count_tokens(self, text: str) -> tuple[int, int]:
        """About how many tokens a text is, and how long the longest part of it is in which its
        tokenizer looks for merges; (0, 0) where body_factor is enough for any text. For a thread.
        """
        if self._words.is_whole:
            return 0, 0
        model = self.engine.llama
        n_tokens = sum(
            len(model.tokenize(text[at : at + PIECE_CHARS], add_special=False, parse_special=True))
            for at in range(0, len(text), PIECE_CHARS)
        )
        return n_tokens, self._words.longest(text)

    def tokens_done(self) -> float:
        """As Store.tokens_done; 0 on the plain path."""
        return self.engine.store.tokens_done if self.engine.managed else 0.0

    def costs(self) -> Callable[[], dict[str, Any]]:
        """Counts from here on; what it returns gives the costs until then, for `timings`."""
        engine = self.engine
        plan = engine.plan
        store = engine.store if engine.managed else None
        losses = engine.driver.meter if engine.managed else None
        counted = StoreCosts(store, plan.tier_names, plan.skip, losses)

        def until_now() -> dict[str, Any]:
            return {
                **counted.fields(),
                "budget_bytes": plan.budget_bytes,
                "ram_bytes": plan.ram_bytes,
                "peak_rss_bytes": peak_rss_bytes(),
                "policy": engine.policy.name if engine.managed else "plain",
            }

        return until_now

    def settings_for(self, changes: Mapping[str, Any]) -> Settings | None:
        """What the policy goes by for a request; None where no expert is managed. changes: other
        values of live settings, for one that runs alone. Raises ConfigError where that cannot
        be."""
        usual = self._settings
        if not changes:
            return usual
        if usual is None:
            raise ConfigError("the plain path has no policy: leave moe_edge out")
        if self.parallel > 1:
            raise ConfigError("settings of one request are for --parallel 1: here steps are shared")
        known, own = policy_settings(), usual.declared()
        for name in changes:
            if name not in known or not known[name].live:
                raise ConfigError(f"'{name}' is no setting that a request may change")
            if name not in own:
                raise ConfigError(f"the policy {self.engine.policy.name} has no setting '{name}'")
        return replace(usual, **changes)

    def go_by(self, settings: Settings | None) -> None:
        """Has the policy decide by what settings_for gave. Raises PolicyError where it cannot."""
        if settings is not None and settings != self.engine.policy.settings:
            self.engine.policy.update_settings(settings)

    def picture(self) -> dict[str, Any]:
        """Return what the page shows: the model, where each expert is, how often tokens used it,
        hits and bytes, and what memory is in use.

        resident and used: uint8 and little-endian uint32 [layers, experts] in base64.
        streams_below: without managed experts, a --ram in bytes with which some of them come from
        the disk.
        """
        engine, plan = self.engine, self.engine.plan
        about = {"model": self.name, "mode": engine.mode, "memory": engine.memory()}
        if not engine.managed:
            return about | {"layers": 0, "streams_below": plan.total_bytes - plan.expert_bytes // 2}
        store = engine.store
        stats = store.stats()
        resident = store.resident()
        used = np.asarray(engine.driver.used(), "<u4")
        read = [*stats.demand_bytes, *stats.prefetch_bytes, stats.transition_bytes]
        return {
            **about,
            "layers": resident.shape[0],
            "experts": resident.shape[1],
            "tiers": list(engine.plan.tier_names),
            "resident": b64encode(resident.tobytes()).decode(),
            "used": b64encode(used.tobytes()).decode(),
            "requests": sum(stats.requests),
            "hits": sum(stats.hits),
            "bytes_read": sum(read),
        }

    def device_bytes(self) -> int:
        """Return how many bytes of a device's memory the model uses now; 0 on the CPU."""
        engine = self.engine
        slots = engine.managed and engine.plan.device
        return engine.device_bytes + (engine.store.stats().slot_bytes_in_use if slots else 0)

    def failure(self) -> str | None:
        """Return why the last step failed, in a sentence; None if nothing says why. A changed file
        comes first, because what the store reads of it looks like damage."""
        if fault := self.fault():
            return fault
        if not self.engine.managed:
            complaint = Bindings.load().complaint()
            return f"llama.cpp failed to evaluate{complaint}" if complaint else None
        try:
            if self._native.error is not None:
                raise self._native.error
            self.engine.driver.check(FAILED)
        except Exception as error:  # noqa: BLE001 - whatever a policy raised
            return sentence_of(error)
        return None

    def stop(self) -> None:
        """Ends the running step and every request soon; from any thread."""
        self._ends = True
        self._native.stop()
        if self.engine.managed:
            self.engine.driver.stop_waiting()

    def close(self, end_s: float | None = None) -> bool:
        """Frees everything, once each request is closed. end_s: of the monotonic clock, when
        nobody waits any longer for a step that does not end. Returns whether it has ended; else
        nothing is freed. Raises OSError where a named profile cannot be written."""
        self.stop()
        with self._turns:
            self.engine.end_idle()
        self._thread.join(None if end_s is None else max(0.0, end_s - monotonic()))
        if self._thread.is_alive():
            return False
        if self.kept is not None:
            self.kept.leave(end_s)
        self._native.close()
        self.engine.close()
        return True
