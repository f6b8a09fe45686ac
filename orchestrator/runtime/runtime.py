"""The runtime: a loaded model, and the only way to compute with it.

Chat and server submit requests in the form of llama.cpp's server, and llama.cpp's server core
answers them on the runtime's decode thread. Programs that measure borrow the context instead, with
`Runtime.evaluator`. The runtime knows neither HTTP nor terminals.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np

from gguf_tools import interrupts
from gguf_tools.closing import Closing
from gguf_tools.experts import ExpertModel
from gguf_tools.process import peak_rss_bytes
from orchestrator.cache.profile import identity
from orchestrator.config import Config, native_log_enabled
from orchestrator.cost.planner import ResolvedPlan
from orchestrator.errors import MoeEdgeError, NativeError, sentence_of
from orchestrator.events import Phase
from orchestrator.native import (
    FAILED,
    CStats,
    NativeRequest,
    NativeServer,
    context_memory,
    native_config,
    server_library,
)
from orchestrator.native.llama import Bindings, Model
from orchestrator.plan.footprint import part_bytes
from orchestrator.plan.records import PlanRequest
from orchestrator.policy import PLAIN, policy_settings
from orchestrator.runtime import threads
from orchestrator.runtime.answer import Answer
from orchestrator.runtime.answering import AHEAD_BYTES, Answering, kept_prompts
from orchestrator.runtime.encoder import Encoder
from orchestrator.runtime.evaluator import Evaluator, Inside
from orchestrator.runtime.image_files import ImageLimits
from orchestrator.runtime.kept import KeptConversations, prompt_folder, state_key
from orchestrator.runtime.load import Loader, Progress
from orchestrator.runtime.report import StoreCosts, memory_now, status_line
from orchestrator.settings import Settings

CHAT = "/v1/chat/completions"
# How long one of Python's threads may keep the others waiting, in seconds: policies decide in
# Python between the layers of a step.
_SWITCH_S = 0.0005
# How much longer the end of a runtime waits for kept conversations to be written than for a step to
# end, in seconds. Together they stay below the ten seconds that a container usually has.
_WRITE_S = 7.0
# An answer that waits for an evaluation checks at this interval, in seconds, if it is cancelled.
_LOOK_S = 0.05


class _SwitchInterval:
    """Shortens the switch interval of Python's threads while any model is ready to answer requests.

    A thread then waits less for Python's lock, which policies need between the layers of a step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_quick, self._before_s = 0, 0.0

    def shorten(self) -> None:
        """Set the switch interval of Python's threads to at most _SWITCH_S.

        Each call needs one call of `restore` later.
        """
        with self._lock:
            if not self._n_quick:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before_s, _SWITCH_S))
            self._n_quick += 1

    def restore(self) -> None:
        """Undo one call of `shorten`, which shortens Python's thread switch interval.

        When all calls are undone, the interval (sys.getswitchinterval) is as before the first call.
        """
        with self._lock:
            self._n_quick -= 1
            if not self._n_quick:
                sys.setswitchinterval(self._before_s)


_switch_interval = _SwitchInterval()


@dataclass(frozen=True)
class About:
    """The properties of a loaded model.

    name: name for clients. digest: identifies the model file. modified_s: time of the file's last
    change, in seconds of the Unix clock. n_ctx: largest number of tokens of one conversation.
    n_cells: number of KV cells in the context, which all conversations share. policy: name of the
    policy. settings: settings of the policy; None for a model without an expert store.
    """

    name: str
    architecture: str
    digest: str
    modified_s: float
    n_ctx: int
    n_cells: int
    n_vocab: int
    policy: str
    settings: Settings | None


@dataclass(frozen=True)
class Stats:
    """A snapshot of a loaded model: the experts in memory, the use of experts, and counters.

    - mode: the status line, which tells the user how the model runs.
    - device_bytes: GPU memory in use.
    - policy: figures that the policy reports about its own work.
    - resident: the best tier (precision; 0 is the best) in which each expert is in memory, or
      ABSENT, uint8 [layers, experts].
    - used: how often tokens used each expert since loading, uint32 [layers, experts].
    - counts: the counters of the expert store since loading.

    Without an expert store, `resident`, `used` and `counts` are None.
    """

    mode: str
    device_bytes: int
    policy: dict[str, Any]
    resident: np.ndarray | None = None
    used: np.ndarray | None = None
    counts: CStats | None = None


class Runtime(Closing):
    """A loaded model that answers requests and evaluates tokens.

    Open it with Runtime.open; free it with close or `with`. config: its settings, including those
    that were chosen automatically.
    """

    def __init__(
        self,
        request: PlanRequest,
        model: ExpertModel,
        progress: Progress | None,
        answering: Answering | None,
        ignore_unused: bool,
        say: Callable[[str], None],
    ) -> None:
        self._answering, self._say, self._needs = answering, say, request.needs
        self._ignore_unused = ignore_unused
        # The users that may compute: answers, or one evaluator.
        self._turns = threading.Condition()
        self._running: list[Answer] = []
        self._requests = set[NativeRequest]()  # of answers that have not ended
        self._lender: int | None = None  # the thread that evaluates, or loads the model again
        self._is_ending = False
        self._said = ""
        # The exception of a policy that failed the last step, with its traceback.
        self.policy_error: Exception | None = None
        self.config = request.config
        self._open(request.config, model, progress, ignore_unused)

    @classmethod
    def open(
        cls,
        config: Config | PlanRequest,
        progress: Progress | None = None,
        answering: Answering | None = None,
        ignore_unused: bool = False,
        say: Callable[[str], None] = lambda _sentence: None,
    ) -> Runtime:
        """Load a model into memory, and return the Runtime that computes with it.

        Raises MoeEdgeError if the model cannot be loaded.

        - config: the settings. A PlanRequest also says how much memory, and how many sequences of
          tokens, the caller needs.
        - progress: gets the name of the current work, and the finished share of it.
        - answering: the settings for answering requests. Without them, the runtime can only
          evaluate tokens.
        - ignore_unused: ignore settings that have no effect with the chosen policy, instead of
          raising an error.
        - say: gets sentences for the user, on any thread.
        """
        request = config if isinstance(config, PlanRequest) else PlanRequest(config)
        model = ExpertModel.open(request.config.model, request.config.low)
        try:
            return cls(request, model, progress, answering, ignore_unused, say)
        except BaseException:
            model.close()
            raise

    def _open(
        self, config: Config, model: ExpertModel, progress: Progress | None, ignore_unused: bool
    ) -> None:
        """Measure this machine, make a plan for the model, and load the model.

        ignore_unused: ignore settings that the policy does not have, instead of refusing them.
        """
        self._model = model
        if progress is not None:
            progress("Measuring this machine", None)
        request = self._request(config)
        self._loader = Loader(request, model)
        planner, wanted = self._loader.planner, request.config
        _ = planner.slow_disk  # before the model takes the memory
        runs = planner.compared(wanted) if ignore_unused else planner.runs(wanted)
        self._load(config, runs, progress)

    def _request(self, config: Config) -> PlanRequest:
        """Return a request to plan the model's memory with these settings."""
        if self._answering is None:
            return PlanRequest(config, self._needs)
        return self._answering.request(config)

    def _load(self, given: Config, runs: ResolvedPlan, progress: Progress | None) -> None:
        """Load the model as a plan says, and start to answer requests if the caller wants that.

        given: the settings before the plan changed them.
        """
        self._folder = prompt_folder(runs.config)
        self._loaded = self._loader.load(runs, progress)
        # The chosen settings, with the context of one answer instead of all answers.
        self.config = runs.config.with_changes(ctx=given.ctx)
        self._native: NativeServer | None = None
        self._encoder: Encoder | None = None
        self._kept: KeptConversations | None = None
        try:
            if self._answering is not None:
                self._start(self._answering)
        except BaseException:
            if self._native is None:
                self._loaded.close()
            else:
                self._unload()
            raise

    def _start(self, answering: Answering) -> None:
        """Open llama.cpp's server core on the loaded model, and start the decode thread."""
        self._encoder = answering.encoder(self.config)
        loaded, config, model = self._loaded, self._loaded.runs.config, self._model
        cache_mib, checkpoints = kept_prompts(
            loaded.plan.prompt_bytes, part_bytes(model, config), answering.parallel
        )
        spec = native_config(
            model_name=self._name,
            n_parallel=answering.parallel,
            n_slot_context=self._slot_context,
            n_batch=loaded.context.n_ubatch,
            n_threads=config.n_threads,
            max_tokens=config.max_tokens,
            seed=config.seed,
            temp=config.temp,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            chat_template=answering.chat_template,
            cache_mib=cache_mib,
            n_checkpoints=checkpoints,
            most_ahead=AHEAD_BYTES,
            loud=native_log_enabled(),
            mmproj=self._encoder.path if self._encoder else None,
            image_max_tokens=config.image_max_tokens,
        )
        library = server_library(self._loader.bindings)
        # llama.cpp decodes two tokens to learn whether the context's memory can drop tokens.
        with loaded.driver.warmup_mode():
            handles = loaded.model.handle, loaded.context.handle
            native = NativeServer(library, *handles, spec)
        native.note = self._say
        if self._folder is not None:
            key = state_key(config, model, loaded.plan, self._encoder)
            self._kept = KeptConversations(
                self._folder, key, loaded.driver, native, f"{answering.threads}kept", self._say
            )
            native.set_before_prompt(self._kept.before_prompt)
        if loaded.driver.keeps_sequences:
            native.keep_notes(loaded.driver.save_sequence, loaded.driver.restore_sequence)
        if loaded.driver.may_wait:
            native.set_before_step(
                lambda is_answer: loaded.driver.follow(Phase.DECODE if is_answer else Phase.PREFILL)
            )
        loaded.driver.set_prompts(cache_mib << 20, native.keep_prompts)
        self._decoding = threads.start(native.run, "decode")
        _switch_interval.shorten()
        self._native = native
        self._idle()

    @property
    def _name(self) -> str:
        given = self._answering.name if self._answering else ""
        return given or os.fsencode(self.config.model.stem).decode("utf-8", "replace")

    @property
    def _slot_context(self) -> int:
        """Largest number of tokens of one conversation."""
        n_cells = self._loaded.context.n_ctx
        own = self.config.ctx or self._model.hparams.context_length or n_cells
        return min(own, n_cells)

    @property
    def images(self) -> ImageLimits | None:
        """The limits for images in requests, or None if the model takes no images."""
        return self._encoder.limits if self._encoder is not None else None

    @property
    def _prompt_remedy(self) -> str:
        """Advice for a user whose prompt does not fit the context."""
        if self._slot_context == self._model.hparams.context_length:
            return "shorten the prompt: the model does not support a longer context"
        return "shorten the prompt, or increase the context with --ctx"

    @property
    def about(self) -> About:
        """The loaded model's name, architecture, context length, policy and other properties."""
        model, loaded = self._model, self._loaded
        policy = loaded.driver.policy
        return About(
            name=self._name,
            architecture=model.hparams.arch,
            digest=identity(model),
            modified_s=max(part.path.stat().st_mtime for part in model.parts),
            n_ctx=self._slot_context,
            n_cells=loaded.context.n_ctx,
            n_vocab=loaded.model.n_vocab,
            policy=policy.name if policy is not None else PLAIN,
            settings=policy.settings if policy is not None else None,
        )

    @property
    def model(self) -> ExpertModel:
        """The layout of the model's files: metadata, tensors and experts."""
        return self._model

    @property
    def plan(self) -> Any:
        """The memory plan: sizes of weights, expert slots and context."""
        return self._loaded.plan

    @property
    def note(self) -> str | None:
        """A sentence about settings that were ignored when the model was opened, or None."""
        return self._loader.planner.note

    @property
    def mode(self) -> str:
        """The status line, which names the policy, the precisions and the memory of the experts."""
        return status_line(self._loader, self._loaded)

    @property
    def inside(self) -> Inside:
        """The expert store, policy, memory plan and other internal objects of the loaded model.

        The returned Inside has them as attributes. It is for programs that measure or replace them.
        """
        return Inside(self._loaded, self._model, self._loader.planner.losses)

    @property
    def vocabulary(self) -> Model:
        """The model's tokenizer and vocabulary. Safe on any thread."""
        return self._loaded.model

    def submit(
        self,
        body: bytes,
        route: str = CHAT,
        sequences: Sequence[int] = (0,),
        settings: Settings | None = None,
        forget: Sequence[int] = (),
    ) -> Answer:
        """Start to answer a request to llama.cpp's HTTP server. Return the running answer.

        - body, route: body and path of the request.
        - sequences: numbers of llama.cpp's sequences in which the answers are computed. If the
          request has more answers than sequences, the answers take turns.
        - settings: new settings of the policy; None keeps the current settings.
        - forget: numbers of sequences to empty first, which frees memory.

        Raises NativeError if the route does not exist or memory is short. Raises OSError if no
        threads or file descriptors are left.
        """
        request = self._core.request(route, body, sequences)
        self._requests.add(request)
        driver = self._loaded.driver
        counted: list[Callable[[], dict[str, Any]]] = []

        def answer(this: Answer, ready: int) -> None:
            try:
                if not self._begin(this):
                    return
                try:
                    counted.append(self._counting())
                    for each in forget:
                        self._forget(each)
                    self._apply(settings)
                    request.run(ready)
                finally:
                    with suppress(Exception):  # later background reads are not among its costs
                        spent = counted[0]()
                        counted[:] = [lambda: spent]
                    self._end(this, sequences, request.status == 200)
            finally:
                request.close()
                with self._turns:
                    self._requests.discard(request)
                    self._turns.notify_all()

        def costs(this: Answer) -> dict[str, Any]:
            found = counted[0]() if counted else self._counting()()
            return {**found, "shared_steps": this.is_shared}

        core, first = self._core, sequences[0] if sequences else 0

        def stop_of() -> tuple[str, bool]:
            _, stop, is_full = core.look(first)
            return stop, is_full

        try:
            return Answer(
                *(request, answer, costs, self._failure, driver.tokens_done, stop_of),
                *(self.fault, self._prompt_remedy),
            )
        except OSError:
            self._requests.discard(request)
            raise

    def query(self, route: str, body: bytes = b"") -> NativeRequest:
        """Create a request to a route that computes no tokens, such as `/tokenize` or `/props`.

        The request does not run yet. Call whole() on the result to run it and get the answer.
        Raises NativeError if the route does not exist or memory is short.
        """
        return self._core.request(route, body)

    @property
    def _core(self) -> NativeServer:
        if self._native is None:
            raise NativeError(
                "the model was loaded for evaluation only, and cannot answer requests: give "
                "Runtime.open the argument `answering`"
            )
        return self._native

    def _begin(self, answer: Answer) -> bool:
        """Wait until an answer may begin: no evaluation and no background read is running.

        Returns False if the answer is cancelled meanwhile, or if the runtime ends.
        """
        with self._turns:
            while not self._turns.wait_for(lambda: self._lender is None, _LOOK_S):
                if answer.is_cancelled or self._is_ending:
                    return False
            self._running.append(answer)
            if len(self._running) > 1:
                for each in self._running:
                    each.is_shared = True
            self._loaded.driver.end_idle()
        return True

    def _end(self, answer: Answer, sequences: Sequence[int], is_good: bool) -> None:
        if self._kept is not None:
            self._kept.answered(sequences, is_good)
        with self._turns:
            self._running.remove(answer)
            self._turns.notify_all()
        self._idle()

    def _idle(self) -> None:
        """Start to read likely experts into free slots, if no request or evaluation is running."""
        if self._kept is None or not self._kept.after_that(self._read_ahead):
            self._read_ahead()

    def _read_ahead(self) -> None:
        if self._answering is None or not self._answering.reads_ahead:
            return
        with self._turns:
            if not (self._running or self._lender or self._is_ending or self._native is None):
                used = self._loader.history.usage.recall()
                self._loaded.driver.idle(used, self._native.settle)

    def _apply(self, settings: Settings | None) -> None:
        """Replace the settings of the policy; None leaves them unchanged.

        Raises PolicyError if the policy cannot work with the settings.
        """
        policy = self._loaded.driver.policy
        if settings is not None and policy is not None and settings != policy.settings:
            policy.update_settings(settings)

    def _forget(self, sequence: int) -> None:
        """Drop the tokens of a sequence. With --prompt-cache, save them to a file first.

        No request may decode on the sequence meanwhile.
        """
        if self._kept is not None:
            self._kept.before_prompt(sequence, [])
        self._core.forget(sequence)

    def _counting(self) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the costs from now on, by the names of GenerationStats."""
        driver, plan = self._loaded.driver, self._loaded.plan
        counted = StoreCosts(driver.store, plan.tier_names, plan.skip, driver.meter)

        def until_now() -> dict[str, Any]:
            return {
                **counted.fields(),
                "budget_bytes": plan.budget_bytes,
                "ram_bytes": plan.ram_bytes,
                "peak_rss_bytes": peak_rss_bytes(),
                "policy": driver.policy.name if driver.policy is not None else PLAIN,
            }

        return until_now

    def _failure(self) -> str | None:
        """Return a sentence that says why the last step failed, or None if the reason is unknown.

        A changed model file is reported first, because the store would report it as damaged.
        """
        if fault := self.fault():
            return fault
        driver = self._loaded.driver
        if driver.store is None:
            complaint = Bindings.load().complaint()
            return f"llama.cpp failed to evaluate tokens{complaint}" if complaint else None
        try:
            if self._core.error is not None:
                raise self._core.error
            driver.check(FAILED)
        except Exception as error:  # noqa: BLE001 - whatever a policy raised
            self.policy_error = None if isinstance(error, MoeEdgeError) else error
            return sentence_of(error)
        return None

    @contextmanager
    def evaluator(self) -> Iterator[Evaluator]:
        """Return a context manager that yields an Evaluator for the model's context.

        The `with` block begins after the running answers have ended, with empty sequences. Answers
        that are submitted during the block wait for its end. Afterwards, all sequences are emptied.

        In the block, the same thread gets a NativeError for a second evaluator, and for a change of
        settings that loads the model again.
        """
        with self._turns:
            self._refuse_lender()
            while not self._turns.wait_for(lambda: not (self._running or self._lender), _LOOK_S):
                interrupts.check()
            self._lender = threading.get_ident()
            self._loaded.driver.end_idle()
        try:
            self._empty()
            yield Evaluator(self.inside, self._counting())
        finally:
            with interrupts.held():
                if not self._is_ending:
                    self._loaded.steps.begin()  # a cancel counts for this evaluation only
                self._loaded.steps.reset()
                self._loaded.driver.clear_phase()
                with self._turns:
                    self._lender = None
                    self._turns.notify_all()
                if self._native is not None:
                    self._idle()

    def _refuse_lender(self) -> None:
        """Raise NativeError if this thread would wait for itself, inside its own evaluation."""
        if self._lender == threading.get_ident():
            raise NativeError(
                "this thread's evaluation has not ended: leave the `with` block of the evaluator "
                "first"
            )

    def _empty(self) -> None:
        if self._native is not None and self._answering is not None:
            for each in range(self._answering.parallel):
                self._forget(each)
        self._loaded.steps.reset()

    def set(self, **changes: Any) -> bool:
        """Change settings of the loaded model, by their names in Config.

        - If all of them are live settings (Setting.live), they apply from the next token on. The
          model stays loaded.
        - Otherwise, the model is loaded again after the running answers have ended, and all
          sequences are emptied. If loading fails, the former settings stay, and MoeEdgeError,
          OSError or KeyboardInterrupt is raised.

        Returns False if the change has no effect yet, because all changed settings are live
        settings of policies that are not in use. They apply when such a policy is chosen. Otherwise
        returns True.
        """
        config = self.config.with_changes(**changes)
        known = policy_settings()
        if all(name in known and known[name].live for name in changes):
            used = [self._loaded.driver.change(*each) for each in changes.items()]
            self.config = config
            return any(used)
        self._reopen(config)
        return True

    def _reopen(self, config: Config) -> None:
        before, former, planner = self.config, self._loaded.runs, self._loader.planner
        is_same = config.model == before.model and config.low == before.low
        # Refuse settings that cannot work before anything is freed. Another policy ignores settings
        # that only the policy before it has.
        runs = planner.compared(self._request(config).config) if is_same else None
        with self._turns:
            self._refuse_lender()
            self._turns.wait_for(lambda: not (self._running or self._lender))
            self._lender = threading.get_ident()
        try:
            self._unload()
            if runs is None:
                self._close_files()
            try:
                if runs is None:
                    model = ExpertModel.open(config.model, config.low)
                    self._open(config, model, None, self._ignore_unused)
                else:
                    self._load(config, runs, None)
            except BaseException:
                interrupts.forget()
                with interrupts.calling(lambda: None):
                    if runs is None:
                        self._model.close()
                        self._open(before, ExpertModel.open(before.model, before.low), None, True)
                    else:
                        self._load(before, former, None)
                raise
        finally:
            with self._turns:
                self._lender = None
                self._turns.notify_all()

    def stats(self) -> Stats:
        """Return which experts are in memory, how often tokens used each expert, and counters."""
        loaded = self._loaded
        device_bytes = context_memory(self._loader.bindings.library(), loaded.context.handle)[1]
        store = loaded.driver.store
        if store is None:
            return Stats(self.mode, device_bytes, loaded.driver.report())
        counts = store.stats()
        if loaded.plan.device:
            device_bytes += counts.slot_bytes_in_use
        return Stats(
            self.mode,
            device_bytes,
            loaded.driver.report(),
            store.resident(),
            loaded.driver.used(),
            counts,
        )

    def memory(self) -> dict[str, int]:
        """Return the host memory of the loaded model, divided by purpose, as {purpose: bytes}.

        All entries except "free" are memory in use. "free" is the unused part of the memory cap
        (--ram). The result is empty if the model is on a GPU. Safe on any thread.
        """
        library = self._loader.bindings.library()
        return memory_now(library, self._loaded, self._loaded.driver.prompts)

    def fault(self) -> str:
        """Return a sentence about a model file that was written to while it is in use, or "".

        Answers are wrong after such a change. The user gets the sentence once for each change.
        """
        sentence, is_fault = self._loader.files.look()
        if sentence and sentence != self._said:
            self._said = sentence
            self._say(sentence)
        return sentence if is_fault else ""

    def stop(self) -> None:
        """Make all answers and evaluations end soon, and refuse new ones. Safe on any thread."""
        self._is_ending = True
        self._loaded.driver.stop_waiting()
        if self._lender is not None:
            self._loaded.steps.cancel()
        if self._native is not None:
            self._native.stop()

    def close(self, end_s: float | None = None) -> bool:  # type: ignore[override]
        """Free the model, and save the recorded expert usage if the config asks for that.

        end_s: the time of the monotonic clock until which to wait for running steps. Returns False
        if a step still runs then. In that case only the usage is saved, and the caller should end
        the process. Safe to call twice. Raises OSError if a profile that the user named cannot be
        written.
        """
        if not self._unload(end_s):
            self._save_history()
            return False
        self._close_files()
        return True

    def _save_history(self) -> None:
        """Save the expert usage and the settings that the policy learned. Nothing is freed."""
        self._loader.history.learn(self._loaded.driver)
        self._loader.history.save()

    def _unload(self, end_s: float | None = None) -> bool:
        """End all computing, and free the loaded model.

        Returns False, and frees nothing, if a step still runs at end_s (a time of the monotonic
        clock).
        """
        self.stop()
        loaded = self._loaded
        with self._turns:  # _read_ahead may be starting a thread
            loaded.driver.end_idle()
        if self._native is not None:

            def left_s(more_s: float = 0.0) -> float | None:
                return None if end_s is None else max(0.0, end_s + more_s - monotonic())

            with self._turns:
                if not self._turns.wait_for(lambda: not self._requests, left_s()):
                    return False
            self._decoding.join(left_s())
            if self._decoding.is_alive():
                return False
            if self._kept is not None:
                written = threading.Event()
                if self._kept.after_that(written.set) and not written.wait(left_s(_WRITE_S)):
                    return False
                self._kept.thread.shutdown()
                self._kept.leave(end_s and end_s + _WRITE_S)
            self._native.close()
            self._native = None
            _switch_interval.restore()
        self._loader.history.learn(loaded.driver)
        loaded.close()
        self._is_ending = False
        return True

    def _close_files(self) -> None:
        """Save the expert usage and the settings that the policy learned, and close the files."""
        try:
            self._loader.history.save()
        finally:
            self._model.close()
