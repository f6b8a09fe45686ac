"""Steps of the engine's own sequence: what the cache holds, and what a failed step undoes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from orchestrator.engine.driver import PlainDriver
from orchestrator.engine.sequences import Sequences
from orchestrator.engine.states import Mark, SequenceState
from orchestrator.errors import ConfigError, NativeError, PolicyError
from orchestrator.events import Phase
from orchestrator.native.llama import Context

_NO_ROOM = 1


class Steps:
    """The tokens that one context has read, and the steps that read more.

    cached: tokens of the engine's own sequence. marks: places that its memory can go back to, the
    shortest first. cancelled: set by cancel, from any thread, until the next begin.
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
        self.marks: list[Mark] = []
        self.state = SequenceState(context)
        self.cancelled = False
        # A copy that was brought back lacks what is needed for a cut before its end.
        self._least = 0
        self._context = context
        self._driver = driver
        self._sequences = sequences
        self._complaint = complaint
        self._asked_ctx = asked_ctx

    def begin(self) -> None:
        """Before the steps of one call: an earlier cancel no longer counts."""
        self._driver.end_idle()
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
        """Drops the cache beyond length tokens; where the model's memory cannot be cut there, back
        to the latest mark before it, or all of it."""
        if self.can_cut(length) and self._context.forget_from(length):
            self._cut(length)
            if length == 0:
                self._driver.sequence_end(0)
        elif not self._go_back(length):
            self.reset()

    def can_cut(self, length: int) -> bool:
        """Whether all is there that a cut needs; a recurrent memory refuses it all the same."""
        return length == 0 or length >= self._least

    def _go_back(self, length: int) -> bool:
        mark = self.mark_before(length)
        if mark is None or mark.part is None or not self.state.write(mark.part, part=True):
            return False
        if not self._context.forget_from(mark.length):
            return False
        self._cut(mark.length)
        self._least = mark.length
        return True

    def mark_before(self, length: int) -> Mark | None:
        """The latest mark of at most so many tokens with which the memory can go back."""
        found = [each for each in self.marks if each.part is not None and each.length <= length]
        return found[-1] if found else None

    def _cut(self, length: int) -> None:
        """The cache holds no more than length tokens."""
        dropped = length < len(self.cached)
        # Behind a prompt the policy knows one token more than an answer begins with.
        known = [each for each in self.marks if each.policy and each.length <= length + 1]
        self.marks = [each for each in self.marks if each.length <= length]
        del self.cached[length:]
        if length == 0:
            self._least = 0
        if dropped and length and known:
            self._tell_policy(known[-1])

    def mark(self, with_part: bool) -> None:
        """Marks the place where the cache ends, unless there is nothing to keep of it. with_part:
        of a memory that cannot be cut, too."""
        length = len(self.cached)
        if length == 0 or any(each.length == length for each in self.marks):
            return
        part = self.state.read(part=True) if with_part else None
        policy = self.policy_state()
        if part is not None or policy is not None:
            self.marks.append(Mark(length, part, policy))

    def policy_state(self) -> bytes | None:
        """What the policy knows of the engine's own sequence."""
        return self._driver.save_sequence(0)

    def hold(self, tokens: Sequence[int], marks: Sequence[Mark]) -> None:
        """A copy was brought back into the empty sequence: its tokens and its marks."""
        self.cached, self.marks = list(tokens), list(marks)
        self._least = len(tokens) if self.state.has_part else 0
        if marks:
            self._tell_policy(marks[-1])

    def _tell_policy(self, mark: Mark) -> None:
        """What it knew at a mark; where that was another policy's, it starts anew."""
        if mark.policy is not None:
            with suppress(PolicyError):
                self._driver.restore_sequence(0, mark.policy)

    def reset(self) -> None:
        """Forgets every token of every sequence."""
        self._context.forget_all()
        self._driver.sequence_end()
        self._sequences.forget()
        self.cached, self.marks, self._least = [], [], 0

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
