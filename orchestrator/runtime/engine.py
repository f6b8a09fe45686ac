"""The engine: a model in memory, and what is asked of it.

The loop between the policy and the store is Driver.on_route of orchestrator/runtime/driver.py.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gguf_tools.closing import Closing
from gguf_tools.experts import ExpertModel
from orchestrator.config import Config, Sampling
from orchestrator.cost.losses import LossModel
from orchestrator.errors import ConfigError, NativeError
from orchestrator.events import GenerationStats, Phase
from orchestrator.memory.plan import MemoryPlan
from orchestrator.native import Store, context_memory
from orchestrator.native.llama import LlamaContext, Model, SamplerChain
from orchestrator.policy import Policy
from orchestrator.runtime.driver import Driver
from orchestrator.runtime.load import Loader, Progress
from orchestrator.runtime.prompts import PromptCache, kept_prompts
from orchestrator.runtime.report import Meter, StoreCosts, memory_now, mode_line
from orchestrator.runtime.steps import Steps
from orchestrator.runtime.texts import ChatTemplate, StopTexts

__all__ = ["Engine", "GenerationStats", "Sampling"]


class Engine(Closing):
    """One model ready to answer. Make it with Engine.open; free it with close or `with`.

    last_stats: the latest answer's costs, or None; prompt_folder: that of --prompt-cache. One
    generation at a time.
    """

    def __init__(
        self,
        config: Config,
        model: ExpertModel,
        progress: Progress | None,
        compared: bool = False,
    ) -> None:
        self.model = model
        self.last_stats: GenerationStats | None = None
        if progress is not None:
            progress("Measuring this machine", None)
        self._loader = Loader(config, model)
        planner = self._loader.planner
        _ = planner.slow_disk  # before the model takes the memory
        runs = planner.compared(config) if compared else planner.runs(config)
        self.config = config = runs.config
        self._shelf, self.prompt_folder = kept_prompts(config)
        self._loaded = self._loader.load(runs, progress)
        llama = self._loaded.model
        bos, eos = llama.named_token("bos"), llama.named_token("eos")
        self._template = ChatTemplate(llama.chat_template(), bos, eos)
        self._prompts = self._prompt_cache()
        # Tokens of the running prompt that were read before its running step, and those in it.
        self._read = (0, 0)

    @classmethod
    def open(
        cls,
        config: Config,
        progress: Progress | None = None,
        compared: bool = False,
    ) -> Engine:
        """Reads the file's layout, plans the memory and loads the dense weights.

        compared: as Planner.compared. Raises MoeEdgeError in one of its forms.
        """
        model = ExpertModel.open(config.model, config.low)
        try:
            return cls(config, model, progress, compared)
        except BaseException:
            model.close()
            raise

    def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Iterator[str]:
        """Streams the answer to a prompt as whole characters.

        What the cache holds of the prompt already is not evaluated again. on_prefill gets
        (tokens done, tokens to do). Ends at the model's end token, before a stop text of sampling,
        after max_tokens, when the context is full, or after cancel; last_stats.finish says which:
        "end", "stop", "length", "context" or "cancelled". Afterwards, closed early included, the
        engine is ready for the next call and last_stats is set.

        Raises ConfigError for a prompt that leaves no room for an answer, NativeError for a failed
        step, and whatever a policy raised.
        """
        if not tokens:
            raise ConfigError("the prompt is empty")
        if len(tokens) >= self.n_ctx:
            raise ConfigError(
                f"the prompt has {len(tokens)} tokens, the context holds {self.n_ctx}"
                f"{self._steps.more_context('shorten it')}"
            )
        steps, plan, driver = self._steps, self.plan, self._loaded.driver
        steps.begin()
        store = driver.store if isinstance(driver, Driver) else None
        costs = StoreCosts(store, plan.tier_names, plan.skip, driver.meter)
        meter = Meter(costs, len(tokens))
        chain = SamplerChain(self._loaded.context, sampling)
        text = codecs.getincrementaldecoder("utf-8")("replace")
        stop = StopTexts(sampling.stop)
        try:
            if not self._prefill(list(tokens), meter, on_prefill):
                return
            token = -1
            for _ in range(max_tokens):
                if meter.tokens and not steps.step([token], Phase.DECODE):
                    return
                token = chain.sample()
                meter.token(is_end := self._loaded.model.is_end(token))
                if is_end:
                    meter.finish = "end"
                    break
                piece = stop.feed(text.decode(self._loaded.model.piece(token)))
                if piece:
                    yield piece
                if stop.found:
                    meter.finish = "stop"
                    return
                if steps.cancelled:
                    return
                if len(steps.cached) >= self.n_ctx:
                    meter.finish = "context"
                    break
            else:
                meter.finish = "length"
            rest = stop.feed(text.decode(b"", final=True)) + stop.rest()
            if rest:
                yield rest
            self._prompts.answered()
        finally:
            chain.close()
            self.last_stats = meter.stats(self.mode, plan.budget_bytes, driver.report())

    def _prefill(
        self, tokens: list[int], meter: Meter, on_prefill: Callable[[int, int], None] | None
    ) -> bool:
        """Evaluates what the cache does not hold; False when cancelled on the way."""
        steps, prompts = self._steps, self._prompts
        tokens = prompts.recall(tokens)
        before = steps.keep_prefix(tokens)
        meter.evaluated_tokens = todo = len(tokens) - before
        at_once = self.plan.micro_batch(before, todo)
        for stop in prompts.stops(tokens):
            while (start := len(steps.cached)) < stop:
                if on_prefill is not None:
                    on_prefill(start - before, todo)
                part = tokens[start : min(stop, start + at_once)]
                self._read = (start - before, len(part))
                if steps.cancelled or not steps.step(part, Phase.PREFILL):
                    return False
            prompts.mark()
        if on_prefill is not None:
            on_prefill(todo, todo)
        return True

    def prompt_done(self) -> float:
        """Return how many tokens of the running prompt are read, of those that had to be.

        The running step counts by its MoE layers, where the store has the experts: it may take
        minutes, and it may be all of the prompt. From any thread.
        """
        done, in_step = self._read
        return done + min(in_step, self._loaded.driver.tokens_done())

    def _prompt_cache(self) -> PromptCache:
        """The prompt cache of the model as it is loaded."""
        return PromptCache.of(
            self.config, self.model, self._loaded, self._shelf, self.prompt_folder
        )

    def idle(self) -> None:
        """Read the experts that earlier runs and this one used most into free slots, until end_idle
        or the next request. Returns at once."""
        self._loaded.driver.idle(self._loader.history.usage.recall())

    def look_at_files(self) -> tuple[str, bool]:
        """Of the model's, as InUse.look."""
        return self._loader.files.look()

    def end_idle(self) -> None:
        """Ends idle: what decodes without generate, eval or decode_batch calls it before a step.
        It waits for one expert's read at most."""
        self._loaded.driver.end_idle()

    def cancel(self) -> None:
        """Stops the running generation soon; safe in a signal handler and from any thread."""
        self._steps.cancel()

    def eval(self, tokens: Sequence[int], pos: int, phase: Phase | None = None) -> np.ndarray:
        """Evaluates tokens at positions pos, pos+1, ... after dropping the cache from pos on.

        Returns float32 logits [1, n_vocab] of the last token, a copy. phase None: decode for a
        single token, prefill for more. More than n_ubatch tokens take several steps."""
        for _ in self._evaluated(tokens, pos, phase):
            pass
        logits: np.ndarray = self._loaded.context.logits().copy()
        return logits

    def eval_each(
        self, tokens: Sequence[int], pos: int, phase: Phase | None = None
    ) -> Iterator[np.ndarray]:
        """As eval, with the logits of every token, float32 [n, n_vocab] of each step: views, valid
        until the next one. Raises ConfigError for an engine that was opened without logits_all."""
        if not self.config.logits_all:
            raise ConfigError("the engine was opened without logits_all")
        for n in self._evaluated(tokens, pos, phase, each=True):
            yield self._loaded.context.logits(n)

    def _evaluated(
        self, tokens: Sequence[int], pos: int, phase: Phase | None, each: bool = False
    ) -> Iterator[int]:
        """How many tokens each step evaluated, once it has."""
        steps = self._steps
        if not tokens or not 0 <= pos <= len(steps.cached):
            raise ConfigError(f"cannot evaluate {len(tokens)} tokens at position {pos}")
        if phase is None:
            phase = Phase.DECODE if len(tokens) == 1 else Phase.PREFILL
        steps.begin()
        steps.rewind(pos)
        if len(steps.cached) != pos:
            raise NativeError("this model's memory cannot be cut in the middle")
        at_once = self.plan.micro_batch(pos, len(tokens))
        for start in range(0, len(tokens), at_once):
            part = list(tokens[start : start + at_once])
            if not steps.step(part, phase, each):
                raise NativeError("the evaluation was cancelled")
            yield len(part)

    def fork(self, sequence: int) -> None:
        """Lets a sequence of decode_batch go on from what eval or generate has read. It drops what
        it held; the tokens are shared, not copied. Raises ConfigError for a sequence that the
        engine was not opened with."""
        self._steps.fork(sequence)

    def decode_batch(self, tokens: Sequence[int], sequences: Sequence[int]) -> np.ndarray:
        """One token more for each of several sequences, 0 to config.sequences - 1, in one step.

        Returns float32 logits [len(tokens), n_vocab], a copy. A step that fails leaves the
        sequences as they were. Raises ConfigError for sequences that cannot be one step and for
        a full context, NativeError for a failed one.
        """
        self._steps.begin()
        if not self._steps.step_each(tokens, sequences):
            raise NativeError("the evaluation was cancelled")
        logits: np.ndarray = self._loaded.context.logits(len(tokens)).copy()
        return logits

    def reset(self) -> None:
        """Forgets every token of every sequence; the experts in memory stay."""
        self._steps.reset()

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; special: names of control tokens become those tokens, and the
        begin token that the model wants stands first."""
        return self._loaded.model.tokenize(text, add_special=special, parse_special=special)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation, [{"role": ..., "content": ...}], up to where the answer
        starts. Raises MoeEdgeError where the model's template refuses it."""
        text = self._template.render(messages)
        model = self._loaded.model
        bos = model.bos()
        add_bos = model.adds_bos() and not (bos and text.startswith(bos))
        return model.tokenize(text, add_special=add_bos, parse_special=True)

    def set_policy(self, name: str) -> None:
        """Starts over with another policy; the conversation is evaluated again by the next
        call. Raises before anything changes where the policy cannot work."""
        self._restart(self.config.with_changes(policy=name))

    def change(self, name: str, value: Any) -> bool:
        """Changes a live setting of a policy from the next token on; False where the policy that
        runs has no such setting, so that it waits for another one."""
        config = self.config.with_changes(**{name: value})
        used = self._loaded.driver.change(name, value)
        self.config = config
        return used

    def _restart(self, config: Config) -> None:
        self.end_idle()
        runs = self._loader.planner.compared(config)
        before = self._loaded.runs._replace(config=self.config)  # with what was changed live
        self._loader.history.learn(self._loaded.driver)
        self._prompts.put_away()
        self._loaded.close()
        try:
            self._loaded = self._loader.load(runs)
            self.config = runs.config
        except BaseException:
            self._loaded = self._loader.load(before)
            raise
        finally:
            self._prompts = self._prompt_cache()

    @property
    def _steps(self) -> Steps:
        return self._loaded.steps

    @property
    def plan(self) -> MemoryPlan:
        """Where everything lies."""
        return self._loaded.plan

    @property
    def managed(self) -> bool:
        """Whether the experts live in the native store; False on the plain upstream path."""
        return self._loaded.driver.managed

    @property
    def driver(self) -> Driver:
        """The policy and the store. Raises ConfigError on the plain path, which has neither."""
        driver = self._loaded.driver
        if not isinstance(driver, Driver):
            raise ConfigError("the plain path has no policy and no store")
        return driver

    @property
    def policy(self) -> Policy:
        """As driver."""
        return self.driver.policy

    @property
    def store(self) -> Store:
        """As driver."""
        return self.driver.store

    @property
    def llama(self) -> Model:
        """llama.cpp's model and vocabulary, until the engine is closed or changes its policy."""
        return self._loaded.model

    @property
    def context(self) -> LlamaContext:
        """llama.cpp's context; as llama. Who decodes with it keeps to its own sequences."""
        return self._loaded.context

    @property
    def losses(self) -> LossModel:
        return self._loader.planner.losses

    @property
    def note(self) -> str | None:
        """What was left aside when the engine was opened."""
        return self._loader.planner.note

    def prompt_notes(self) -> list[str]:
        """Return the notes of the prompt cache since the last call: sentences for the user."""
        if self.prompt_folder is None:
            return []
        said = list(self.prompt_folder.notes)
        self.prompt_folder.notes.clear()
        return said

    @property
    def n_ctx(self) -> int:
        """Tokens that a conversation may have, answers included."""
        return self._loaded.context.n_ctx

    @property
    def n_cached(self) -> int:
        """Tokens of the conversation that the KV cache holds."""
        return len(self._steps.cached)

    @property
    def device_bytes(self) -> int:
        """What llama.cpp takes of a device's memory, without expert slots and what kernels take."""
        library = self._loader.bindings.library()
        return context_memory(library, self._loaded.context.handle)[1]

    def memory(self) -> dict[str, int]:
        """As memory_now. From any thread."""
        prompts = self._shelf.used_bytes or self._loaded.driver.prompts
        return memory_now(self._loader.bindings.library(), self._loaded, prompts)

    @property
    def mode(self) -> str:
        """One line: what runs, and why or how."""
        return mode_line(self.config, self._loader, self._loaded)

    def close(self) -> None:
        """Free everything, and keep what the run learned if the config asks for that. Safe to call
        twice. Raises OSError if a named profile cannot be written."""
        history = self._loader.history
        self.end_idle()
        history.learn(self._loaded.driver)
        self._prompts.leave()
        self._loaded.close()
        try:
            history.save()
        finally:
            self.model.close()

    def keep(self) -> None:
        """Keep what the run learned if the config asks for that, and free nothing: for a process
        that ends while a step runs. Raises OSError if a named profile cannot be written."""
        self._loader.history.learn(self._loaded.driver)
        self._loader.history.save()
