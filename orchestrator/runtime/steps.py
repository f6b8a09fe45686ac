"""The sequences of one context, and the steps that extend them, for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.errors import ConfigError, MoeEdgeError, NativeError
from orchestrator.events import Phase
from orchestrator.native import NO_ROOM
from orchestrator.native.llama import LlamaContext
from orchestrator.runtime.driver import NoopDriver


class Sequences:
    """The lengths of n further sequences of a context.

    Number s, 0 to n - 1, is llama.cpp's sequence s + 1: its sequence 0 is the evaluator's own. All
    of them share the context's KV cells. lengths: the tokens of each.
    """

    def __init__(self, context: LlamaContext, n: int) -> None:
        self._context = context
        self.lengths = [0] * n

    def name_of(self, number: int) -> int:
        """Return llama.cpp's id of a sequence."""
        return number + 1

    def check(self, tokens: Sequence[int], sequences: Sequence[int]) -> None:
        """Raise ConfigError if tokens of these sequences cannot be computed in one step."""
        if not sequences or len(tokens) != len(sequences):
            raise ConfigError(
                f"a step takes one token for each sequence, not {len(tokens)} for {len(sequences)}"
            )
        if len(set(sequences)) < len(sequences):
            raise ConfigError("a step takes one token of a sequence, and one is named twice")
        for number in sequences:
            if not 0 <= number < len(self.lengths):
                raise ConfigError(
                    f"there is no sequence {number}: the model was loaded with the setting "
                    f"'sequences' at {len(self.lengths)}"
                )
        if len(sequences) > self._context.n_ubatch:
            raise ConfigError(
                f"{len(sequences)} sequences are more than the {self._context.n_ubatch} tokens of "
                f"one step: raise --ubatch"
            )

    def fork(self, number: int, length: int) -> None:
        """Let a sequence share the first `length` tokens of the evaluator's own one."""
        self._context.share(self.name_of(number))
        self.lengths[number] = length

    def decode(self, tokens: Sequence[int], sequences: Sequence[int]) -> int:
        """Compute one token of each sequence. Returns llama_decode's status."""
        positions = [self.lengths[number] for number in sequences]
        return self._context.decode_each(
            tokens, positions, [self.name_of(number) for number in sequences]
        )

    def accept(self, sequences: Sequence[int]) -> None:
        """Count the tokens of a step that succeeded."""
        for number in sequences:
            self.lengths[number] += 1

    def undo(self, sequences: Sequence[int]) -> None:
        """Drop the tokens of a failed step, or the whole sequence if its memory cannot be cut."""
        for number in sequences:
            if not self._context.forget_from(self.lengths[number], self.name_of(number)):
                self._context.forget_from(0, self.name_of(number))
                self.lengths[number] = 0

    def forget(self) -> None:
        """Set all lengths to 0, after the context was cleared."""
        self.lengths = [0] * len(self.lengths)


class Steps:
    """The tokens of an evaluation, and the steps that evaluate more.

    cached: tokens of the evaluator's own sequence. cancelled: set by `cancel`, until the next
    `begin`.
    """

    def __init__(
        self,
        context: LlamaContext,
        driver: NoopDriver,
        sequences: Sequences,
        complaint: Callable[[], str],
        asked_ctx: int,
        check_files: Callable[[], None],
    ) -> None:
        """complaint: returns llama.cpp's last error in brackets.

        asked_ctx: the context that the user asked for, in tokens. check_files: raises ChangedError
        if a model file was written to since it was opened.
        """
        self.cached: list[int] = []
        self.cancelled = False
        self._context = context
        self._driver = driver
        self._sequences = sequences
        self._complaint = complaint
        self._asked_ctx = asked_ctx
        self._check_files = check_files

    def begin(self) -> None:
        """Prepare the steps of one call: forget an earlier cancel, and end idle reads.

        A cancel during the wait for the end of idle reads counts for this call.
        """
        self.cancelled = False
        self._driver.cancel(False)
        self._driver.end_idle()

    def cancel(self) -> None:
        """End the running step soon; safe in a signal handler and from any thread."""
        self.cancelled = True
        self._driver.cancel(True)

    def rewind(self, length: int) -> None:
        """Drop the tokens after the first `length` ones; all if the memory cannot be cut there."""
        if not self._context.forget_from(length):
            self.reset()
            return
        del self.cached[length:]
        if length == 0:
            self._driver.sequence_end(0)

    def reset(self) -> None:
        """Forget every token of every sequence."""
        self._context.forget_all()
        self._driver.sequence_end()
        self._sequences.forget()
        self.cached = []

    def step(self, tokens: list[int], phase: Phase, all_logits: bool = False) -> bool:
        """Compute at most a micro-batch of tokens of the own sequence in one llama_decode.

        Returns whether its logits are good; False if it was cancelled. `cached` has the tokens only
        in the first case. Raises the error of a step that failed otherwise.
        """
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
        """Let another sequence continue from the evaluator's own one.

        Raises ConfigError if the sequence does not exist.
        """
        self._sequences.check([0], [number])
        name = self._sequences.name_of(number)
        self._driver.sequence_end(name)
        self._sequences.fork(number, len(self.cached))
        known = self._driver.save_sequence(0)
        if known is not None:
            self._driver.restore_sequence(name, known)

    def step_each(self, tokens: Sequence[int], numbers: Sequence[int]) -> bool:
        """Compute a step, as `step` does, with one token of each of several sequences."""
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
        """Run one decode, which returns llama_decode's status.

        Returns True if its logits are good, False if it was cancelled and undone. Otherwise undoes
        it and raises the cause; ChangedError first, because every other failure may follow from a
        changed file, and good logits may come from one.
        """
        try:
            self._driver.begin(phase)
            status = decode()
            if status == 0:
                self._check_files()
            self._driver.check(status)
        except MoeEdgeError:
            undo()
            self._check_files()
            raise
        except BaseException:
            undo()
            raise
        if status == 0:
            return True
        undo()
        if self.cancelled:
            return False
        if status == NO_ROOM:
            raise ConfigError(
                f"the context of {self._context.n_ctx} tokens is full{self._more_context()}"
            )
        raise NativeError(f"llama.cpp failed to evaluate{self._complaint()}")

    def _more_context(self) -> str:
        """Return the remedy for a context that is full."""
        if self._asked_ctx > self._context.n_ctx:
            return ", and the model was made for no more: start anew"
        return ": start anew, or raise --ctx"
