"""The engine: a model, a policy, a store, and the loop between them.

router -> on_route: the policy decides -> the store acts -> experts compute
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.process import default_threads
from gguf_tools.units import format_size
from orchestrator import hardware
from orchestrator.accelerator import check_misses, find_gpu, one_of_several, serve_misses
from orchestrator.choice import check_unused
from orchestrator.config import Config
from orchestrator.errors import ConfigError, NativeError
from orchestrator.events import (
    ComputedStep,
    GenerationStats,
    Phase,
    RouteEvent,
    StepReport,
    expert_states,
)
from orchestrator.llama import Bindings, Context, Model, SamplerChain
from orchestrator.meter import Meter
from orchestrator.native import FAILED, Misses, Store, taken_by
from orchestrator.plan import Plan, importance_window, make_plan, store_spec
from orchestrator.policy import Counting, Policy
from orchestrator.profile import Memory
from orchestrator.sampling import Sampling
from orchestrator.sequences import Sequences
from orchestrator.template import ChatTemplate

__all__ = ["Engine", "GenerationStats", "Sampling"]

_NO_ROOM = 1


class Engine:
    """One model ready to answer. Make it with Engine.open; free it with close or `with`.

    plan: where everything lies. last_stats: the latest answer's costs, or None. policy and
    store exist in managed mode only. One generation at a time.
    """

    policy: Policy
    store: Store

    def __init__(
        self, config: Config, model: ExpertModel, progress: Callable[[float], None] | None
    ) -> None:
        self.config = config
        self.model = model
        self.last_stats: GenerationStats | None = None
        self._cached: list[int] = []
        self._cancelled = False
        self._memory = Memory(config, model)
        self._parts: list[Context | Store | Model] = []
        self._bindings = Bindings.load()
        self._gpu = find_gpu(self._bindings, config.device, config.vram)
        check_misses(self._gpu, config)
        self._machine = hardware.probe(self._gpu.device if self._gpu else None)
        self._start(make_plan(config, model, self._machine), progress)

    @classmethod
    def open(cls, config: Config, progress: Callable[[float], None] | None = None) -> Engine:
        """Reads the file's layout, plans the memory and loads the dense weights.

        progress gets the loaded share, 0 to 1. Raises MoeEdgeError in one of its forms.
        """
        check_unused(config)
        model = ExpertModel.open(config.model, config.low)
        try:
            return cls(config, model, progress)
        except BaseException:
            model.close()
            raise

    def on_route(self, event: RouteEvent) -> None:
        """Once per MoE layer: the policy decides, the store acts."""
        self.policy.decide(event, self.store.view, self.store.decision)
        self.store.apply(self.store.decision)

    def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        on_prefill: Callable[[int, int], None] | None = None,
        retention: float | None = None,
    ) -> Iterator[str]:
        """Streams the answer to a prompt as whole characters.

        What the cache holds of the prompt already is not evaluated again. on_prefill gets
        (tokens done, tokens to do). retention: another share of critical experts than the
        configured one, for this answer alone. Ends at the model's end token, after max_tokens, when
        the context is full, or after cancel; last_stats.finish says which: "end", "length",
        "context" or "cancelled". Afterwards, closed early included, the engine is ready for
        the next call and last_stats is set.

        Raises ConfigError for a prompt that leaves no room for an answer and for a retention
        outside 0 to 1, NativeError for a failed step, and whatever a policy raised.
        """
        if not tokens:
            raise ConfigError("the prompt is empty")
        if len(tokens) >= self.n_ctx:
            raise ConfigError(
                f"the prompt has {len(tokens)} tokens, the context holds {self.n_ctx}"
                f"{self._more_context('shorten it')}"
            )
        if retention is not None:
            self.config.with_changes(retention=retention)  # checks it
        before = self.policy.retention if self.managed else None
        self._begin()
        meter = Meter(self.store if self.managed else None, len(tokens))
        chain = SamplerChain(self._context, sampling)
        text = codecs.getincrementaldecoder("utf-8")("replace")
        try:
            if retention is not None and before is not None:
                self.policy.set_retention(retention)
            if not self._prefill(list(tokens), meter, on_prefill):
                return
            token = -1
            for _ in range(max_tokens):
                if meter.tokens and not self._step([token], Phase.DECODE):
                    return
                token = chain.sample()
                meter.token(is_end := self._model.is_end(token))
                if is_end:
                    meter.finish = "end"
                    break
                piece = text.decode(self._model.piece(token))
                if piece:
                    yield piece
                if self._cancelled:
                    return
                if len(self._cached) >= self.n_ctx:
                    meter.finish = "context"
                    break
            else:
                meter.finish = "length"
            rest = text.decode(b"", final=True)
            if rest:
                yield rest
        finally:
            chain.close()
            report = self.policy.report() if self.managed else {}
            self.last_stats = meter.stats(self.mode, self.plan.budget_bytes, report)
            if retention is not None and before is not None:
                self.policy.set_retention(before)

    def _begin(self) -> None:
        self._cancelled = False
        if self.managed:
            self.store.cancel(False)

    def _prefill(
        self, tokens: list[int], meter: Meter, on_prefill: Callable[[int, int], None] | None
    ) -> bool:
        """Evaluates what the cache does not hold; False when cancelled on the way."""
        kept = self._keep_prefix(tokens)
        todo = tokens[kept:]
        meter.evaluated_tokens = len(todo)
        for start in range(0, len(todo), self._context.n_ubatch):
            if on_prefill is not None:
                on_prefill(start, len(todo))
            part = todo[start : start + self._context.n_ubatch]
            if self._cancelled or not self._step(part, Phase.PREFILL):
                return False
        if on_prefill is not None:
            on_prefill(len(todo), len(todo))
        return True

    def _keep_prefix(self, tokens: list[int]) -> int:
        """Cuts the cache back to what it shares with tokens, one token short of all of them,
        since the last one's logits are needed. Returns how many tokens stay."""
        same = 0
        for ours, theirs in zip(self._cached, tokens[:-1], strict=False):
            if ours != theirs:
                break
            same += 1
        self._rewind(same)
        return len(self._cached)

    def _rewind(self, length: int) -> None:
        """Drops the cache beyond length tokens; all of it where the model's memory cannot be
        cut in the middle."""
        if self._context.forget_from(length):
            del self._cached[length:]
            if length == 0 and self.managed:
                self.store.sequence_end(0)
        else:
            self.reset()

    def _step(self, tokens: list[int], phase: Phase, all_logits: bool = False) -> bool:
        """One llama_decode. True when its logits are good, False when it was cancelled; the
        cache holds the tokens only in the first case. Raises what went wrong otherwise."""
        before = len(self._cached)
        good = self._run(
            phase,
            lambda: self._context.decode(
                tokens, before, all_logits, interruptible=phase is Phase.PREFILL
            ),
            lambda: self._rewind(before),
        )
        if good:
            self._cached += tokens
        return good

    def _run(self, phase: Phase, decode: Callable[[], int], undo: Callable[[], None]) -> bool:
        """One decode, which returns llama_decode's status. True when its logits are good, False
        when it was cancelled, and undone. Undoes it and raises what went wrong otherwise."""
        try:
            if self.managed:
                self.store.set_phase(phase)
            status = decode()
            if self.managed and status == FAILED:
                self.store.check_step()
        except BaseException:
            undo()
            raise
        if status == 0:
            return True
        undo()
        if self._cancelled:
            return False
        if status == _NO_ROOM:
            raise ConfigError(
                f"the context of {self.n_ctx} tokens is full{self._more_context('start anew')}"
            )
        raise NativeError(f"llama.cpp failed to evaluate{self._bindings.complaint()}")

    def _more_context(self, else_do: str) -> str:
        """What to do about a full context, as the end of a sentence."""
        if self.config.ctx > self.plan.n_ctx:
            return f", and the model was made for no more: {else_do}"
        return f": {else_do}, or raise --ctx"

    def _step_done(self, step: ComputedStep) -> None:
        """Once per step: the policy learns, and may start transitions."""
        counts = states = None
        if self._counting is not None:
            counts, states = self.store.take_counts(), expert_states(self.store.states())
        moves = self.policy.step_done(
            StepReport(
                step.phase,
                step.n_tokens,
                step.us,
                counts,
                states,
                step.starts,
                step.prompt_ends,
                step.ends,
            )
        )
        if moves:
            self.store.transition(moves)

    def cancel(self) -> None:
        """Stops the running generation soon; safe in a signal handler and from any thread."""
        self._cancelled = True
        if self.managed:
            self.store.cancel(True)

    def _should_stop(self) -> bool:
        return self._cancelled

    def eval(
        self,
        tokens: Sequence[int],
        pos: int,
        want_all_logits: bool = False,
        phase: Phase | None = None,
    ) -> np.ndarray:
        """Evaluates tokens at positions pos, pos+1, ... after dropping the cache from pos on.

        Returns float32 logits [n_out, n_vocab], a copy: of the last token, or of all of them
        where the engine was opened with logits_all. phase None: decode for a single token,
        prefill for more. More than n_ubatch tokens are evaluated in several steps.
        """
        if not tokens or not 0 <= pos <= len(self._cached):
            raise ConfigError(f"cannot evaluate {len(tokens)} tokens at position {pos}")
        if want_all_logits and not self.config.logits_all:
            raise ConfigError("the engine was opened without logits_all")
        if phase is None:
            phase = Phase.DECODE if len(tokens) == 1 else Phase.PREFILL
        self._begin()
        self._rewind(pos)
        if len(self._cached) != pos:
            raise NativeError("this model's memory cannot be cut in the middle")
        results = []
        todo = list(tokens)
        for start in range(0, len(todo), self._context.n_ubatch):
            part = todo[start : start + self._context.n_ubatch]
            if not self._step(part, phase, want_all_logits):
                raise NativeError("the evaluation was cancelled")
            if want_all_logits:
                results.append(self._context.logits(len(part)).copy())
        return np.concatenate(results) if results else self._context.logits().copy()

    def fork(self, sequence: int) -> None:
        """Lets a sequence of decode_batch go on from what eval or generate has read. It drops what
        it held; the tokens are shared, not copied. Raises ConfigError for a sequence that the
        engine was not opened with."""
        self._sequences.check([0], [sequence])
        if self.managed:
            self.store.sequence_end(sequence)
        self._sequences.fork(sequence, len(self._cached))

    def decode_batch(self, tokens: Sequence[int], sequences: Sequence[int]) -> np.ndarray:
        """One token more for each of several sequences, 0 to config.sequences - 1, in one step.

        Returns float32 logits [len(tokens), n_vocab], a copy. A step that fails leaves the
        sequences as they were. Raises ConfigError for sequences that cannot be one step and for
        a full context, NativeError for a failed one.
        """
        work = self._sequences
        work.check(tokens, sequences)
        self._begin()
        good = self._run(
            Phase.DECODE,
            lambda: work.decode(tokens, sequences),
            lambda: work.undo(sequences),
        )
        if not good:
            raise NativeError("the evaluation was cancelled")
        work.accept(sequences)
        logits: np.ndarray = self._context.logits(len(tokens)).copy()
        return logits

    def reset(self) -> None:
        """Forgets every token of every sequence; the experts in memory stay."""
        self._context.forget_all()
        if self.managed:
            self.store.sequence_end()
        self._sequences.forget()
        self._cached = []

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; special: names of control tokens become those tokens, and the
        begin token that the model wants stands first."""
        return self._model.tokenize(text, add_special=special, parse_special=special)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation, [{"role": ..., "content": ...}], up to where the answer
        starts. Raises MoeEdgeError where the model's template refuses it."""
        text = self._template.render(messages)
        bos = self._model.bos()
        add_bos = self._model.adds_bos() and not (bos and text.startswith(bos))
        return self._model.tokenize(text, add_special=add_bos, parse_special=True)

    def set_policy(self, name: str) -> None:
        """Starts over with another policy; the conversation is evaluated again by the next
        call. Raises before anything changes where the policy cannot work."""
        self._restart(self.config.with_changes(policy=name))

    def set_retention(self, retention: float) -> bool:
        """Changes the share of critical experts from the next token on; False where the policy
        that runs has no use for it, so that it waits for another one."""
        config = self.config.with_changes(retention=retention)
        used = self.managed and self.policy.set_retention(retention)
        self.config = config
        return used

    def _restart(self, config: Config) -> None:
        plan = make_plan(config, self.model, self._machine)
        old_config, old_plan = self.config, self.plan
        self._learn()
        self._stop()
        self.config = config
        try:
            self._start(plan)
        except BaseException:
            self.config = old_config
            self._start(old_plan)
            raise

    @property
    def managed(self) -> bool:
        """Whether the experts live in the native store; False on the plain upstream path."""
        return self.plan.managed

    @property
    def note(self) -> str | None:
        """What was left aside when the engine was opened."""
        notes = (self._memory.note, one_of_several(self._bindings, self._gpu))
        return " ".join(filter(None, notes)) or None

    @property
    def n_ctx(self) -> int:
        """Tokens that a conversation may have, answers included."""
        return self._context.n_ctx

    @property
    def device_bytes(self) -> int:
        """What llama.cpp takes of a device's memory, without expert slots and what kernels take."""
        return taken_by(self._bindings.library(), self._context.handle)[1]

    @property
    def mode(self) -> str:
        """One line: what runs, and why or how."""
        if not self.managed:
            return f"plain upstream path: {self.plan.reason}"
        slots = format_size(self.plan.slots.total_bytes) if self.plan.slots else "no"
        stats = self.store.stats()
        direct = "direct I/O" if stats.direct_io else "buffered I/O"
        on_gpu = self._gpu is not None and self._gpu.index is not None
        pageable = ", host memory not pinned" if on_gpu and not stats.host_pinned else ""
        text = f"managed: {self.policy.describe()}, {slots} of expert slots, {direct}{pageable}"
        return text + self._served

    @cached_property
    def _misses(self) -> Misses:
        """Measured for the first store: where everything fits, nothing is missed."""
        return serve_misses(self._bindings, self._gpu, self.config)

    @property
    def _served(self) -> str:
        """For the mode: how a GPU gets the experts that it lacks."""
        if self._gpu is None:
            return ""
        asked, served = self._misses.mode, self.store.misses()
        return f", misses: {served}" + (f" ({asked} cannot be had)" if served != asked else "")

    def _start(self, plan: Plan, progress: Callable[[float], None] | None = None) -> None:
        """Loads what is planned; a second time where llama.cpp takes more of a GPU's memory than
        was estimated, so that the cap holds."""
        self._load(plan, progress)
        if self._gpu is None or self._gpu.index is None:
            return
        beyond = self.device_bytes - plan.llama_bytes
        if beyond > 0:
            self._stop()
            self._load(make_plan(self.config, self.model, self._machine, beyond), progress)

    def _load(self, plan: Plan, progress: Callable[[float], None] | None) -> None:
        config, bindings = self.config, self._bindings
        self.plan = plan
        extra = config.use_extra_bufts
        self._counting = plan.policy if isinstance(plan.policy, Counting) else None
        if self._counting is not None:
            known = self._memory.recall()
            if known is not None:
                self._counting.set_hotness(known)
        # of the time that loading takes; the experts are read before the first token, or never
        share = 0.5 if self._counting is not None else 1.0
        try:
            if plan.policy is not None:
                self.policy = plan.policy
                spec = store_spec(config, self.model, plan, self._misses)
                self.store = Store.create(bindings.library(), spec)
                self._parts.append(self.store)
            self._model = Model(
                bindings,
                config.model,
                managed=plan.managed,
                use_extra_bufts=not plan.managed if extra is None else extra,
                use_mmap=not plan.managed and config.ram is None and len(self.model.tiers) == 1,
                gpu=self._gpu.index if self._gpu else None,
                buffer_type=self._gpu.buffer_type if self._gpu else None,
                progress=(lambda done: progress(share * done)) if progress else None,
            )
            self._parts.append(self._model)
            if plan.policy is not None:
                self.set_route()
                self.store.set_step_done(self._step_done)
                if self._counting is not None:
                    self._warm(self._counting, share, progress)
            self._context = Context(
                bindings,
                self._model,
                n_ctx=plan.n_ctx,
                n_ubatch=min(config.n_ubatch, plan.n_ctx),
                threads=config.threads or default_threads(),
                all_logits=config.logits_all,
                flash_attention=importance_window(config, plan) >= 0,
                should_stop=self._should_stop,
                on_gpu=self._gpu is not None,
                sequences=config.sequences,
            )
            self._parts.append(self._context)
            self._sequences = Sequences(self._context, config.sequences)
        except BaseException:
            self._stop()
            raise
        self._cached = []
        loaded = self._model
        self._template = ChatTemplate(loaded.chat_template(), loaded.bos(), loaded.eos())

    def set_route(self) -> None:
        """Lets the policy decide, in the way it does: by on_route, or by its default tier."""
        tier = self._counting.default_tier if self._counting is not None else 0
        self.store.set_route(self.on_route if self.policy.needs_callback else None, tier)

    def _warm(
        self, policy: Counting, share: float, progress: Callable[[float], None] | None
    ) -> None:
        """Reads every expert in its first version, so that no token waits for one."""
        self.store.set_transition_rate(self.config.transition_bytes_per_s)
        self.store.warm(
            policy.start(),
            (lambda done: progress(share + (1 - share) * done)) if progress else None,
        )
        self.store.reset_stats()

    def _learn(self) -> None:
        """What the policy that runs knows about the model, for the next one."""
        if self._parts and self._counting is not None:
            self._memory.learn(self._counting.hotness)

    def _stop(self) -> None:
        """The context goes first, then the store, then the model that it was attached to."""
        order = (Context, Store, Model)
        for part in sorted(self._parts, key=lambda each: order.index(type(each))):
            part.close()
        self._parts = []

    def close(self) -> None:
        """Frees everything, and keeps the hotness where that is asked for; safe to call twice.
        Raises OSError where a named profile cannot be written."""
        self._learn()
        self._stop()
        try:
            self._memory.save()
        finally:
            self.model.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
