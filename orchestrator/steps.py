"""Steps of the engine's own sequence: what the cache holds, and what a failed step undoes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.driver import PlainDriver
from orchestrator.errors import ConfigError, NativeError
from orchestrator.events import Phase
from orchestrator.llama import Context
from orchestrator.sequences import Sequences

_NO_ROOM = 1


class Steps:
    """The tokens that one context has read, and the steps that read more.

    cached: tokens of the engine's own sequence. cancelled: set by cancel, from any thread, until
    the next begin.
    """

    def __init__(
        self,
        context: Context,
        driver: PlainDriver,
        sequences: Sequences,
        complaint: Callable[[], str],
        asked_ctx: int,
    ) -> None:
        """complaint: what llama.cpp said last, in brackets. asked_ctx: the context that the user
        asked for, in tokens."""
        self.cached: list[int] = []
        self.cancelled = False
        self._context = context
        self._driver = driver
        self._sequences = sequences
        self._complaint = complaint
        self._asked_ctx = asked_ctx

    def begin(self) -> None:
        """Before the steps of one call: an earlier cancel no longer counts."""
        self.cancelled = False
        self._driver.cancel(False)

    def cancel(self) -> None:
        """Stops the running step soon; safe in a signal handler and from any thread."""
        self.cancelled = True
        self._driver.cancel(True)

    def more_context(self, else_do: str) -> str:
        """What to do about a context that is too short, as the end of a sentence."""
        if self._asked_ctx > self._context.n_ctx:
            return f", and the model was made for no more: {else_do}"
        return f": {else_do}, or raise --ctx"

    def keep_prefix(self, tokens: Sequence[int]) -> int:
        """Cuts the cache back to what it shares with tokens, one token short of all of them,
        since the last one's logits are needed. Returns how many tokens stay."""
        same = 0
        for ours, theirs in zip(self.cached, tokens[:-1], strict=False):
            if ours != theirs:
                break
            same += 1
        self.rewind(same)
        return len(self.cached)

    def rewind(self, length: int) -> None:
        """Drops the cache beyond length tokens; all of it where the model's memory cannot be
        cut in the middle."""
        if self._context.forget_from(length):
            del self.cached[length:]
            if length == 0:
                self._driver.sequence_end(0)
        else:
            self.reset()

    def reset(self) -> None:
        """Forgets every token of every sequence."""
        self._context.forget_all()
        self._driver.sequence_end()
        self._sequences.forget()
        self.cached = []

    def step(self, tokens: list[int], phase: Phase, all_logits: bool = False) -> bool:
        """One llama_decode. True when its logits are good, False when it was cancelled; the
        cache holds the tokens only in the first case. Raises what went wrong otherwise."""
        before = len(self.cached)
        good = self._run(
            phase,
            lambda: self._context.decode(
                tokens, before, all_logits, interruptible=phase is Phase.PREFILL
            ),
            lambda: self.rewind(before),
        )
        if good:
            self.cached += tokens
        return good

    def fork(self, number: int) -> None:
        """Lets another sequence go on from the engine's own one. Raises ConfigError for one that
        there is not."""
        self._sequences.check([0], [number])
        name = self._sequences.name_of(number)
        self._driver.sequence_end(name)
        self._sequences.fork(number, len(self.cached))
        known = self._driver.save_sequence(0)
        if known is not None:
            self._driver.restore_sequence(name, known)

    def step_each(self, tokens: Sequence[int], numbers: Sequence[int]) -> bool:
        """One token of each of several sequences; as step."""
        work = self._sequences
        work.check(tokens, numbers)
        good = self._run(
            Phase.DECODE,
            lambda: work.decode(tokens, numbers),
            lambda: work.undo(numbers),
        )
        if good:
            work.accept(numbers)
        return good

    def _run(self, phase: Phase, decode: Callable[[], int], undo: Callable[[], None]) -> bool:
        """One decode, which returns llama_decode's status. True when its logits are good, False
        when it was cancelled, and undone. Undoes it and raises what went wrong otherwise."""
        try:
            self._driver.begin(phase)
            status = decode()
            self._driver.check(status)
        except BaseException:
            undo()
            raise
        if status == 0:
            return True
        undo()
        if self.cancelled:
            return False
        if status == _NO_ROOM:
            n_ctx = self._context.n_ctx
            raise ConfigError(
                f"the context of {n_ctx} tokens is full{self.more_context('start anew')}"
            )
        raise NativeError(f"llama.cpp failed to evaluate{self._complaint()}")
