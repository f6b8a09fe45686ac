"""Extends the sequences of one context in steps, for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.errors import ConfigError, MoeEdgeError, NativeError
from orchestrator.events import Phase
from orchestrator.native import NO_ROOM
from orchestrator.native.llama import LlamaContext
from orchestrator.runtime.driver import BaseDriver


class Sequences:
    """The additional sequences of a llama.cpp context: all except its main sequence.

    The main sequence has llama.cpp's id 0 and no number here. The additional sequences are numbered
    from 0. All sequences share the KV cells of the context.

    lengths: number of tokens of each additional sequence.
    """

    def __init__(self, context: LlamaContext, n: int) -> None:
        self._context = context
        self.lengths = [0] * n

    def name_of(self, number: int) -> int:
        """Return llama.cpp's id of a sequence: number + 1, because the main sequence has id 0."""
        return number + 1

    def check(self, tokens: Sequence[int], sequences: Sequence[int]) -> None:
        """Raise ConfigError if a step cannot append one token to each of these sequences.

        A step cannot do so if a sequence does not exist or is named twice, or if the tokens exceed
        a micro-batch. The numbers of tokens and sequences must be equal.
        """
        if not sequences or len(tokens) != len(sequences):
            raise ConfigError(
                f"{len(tokens)} tokens for {len(sequences)} sequences: give one token for each "
                "sequence"
            )
        if len(set(sequences)) < len(sequences):
            raise ConfigError("a sequence is named twice in one step: name each sequence once")
        for number in sequences:
            if not 0 <= number < len(self.lengths):
                raise ConfigError(
                    f"there is no sequence {number}, because the model was loaded with "
                    f"{len(self.lengths)} sequences: load it with more"
                )
        if len(sequences) > self._context.n_ubatch:
            raise ConfigError(
                f"a step takes at most {self._context.n_ubatch} tokens, and {len(sequences)} "
                "sequences need one token each: raise --ubatch"
            )

    def fork(self, number: int, length: int) -> None:
        """Make a sequence share the first `length` tokens of the main sequence."""
        self._context.share(self.name_of(number))
        self.lengths[number] = length

    def decode(self, tokens: Sequence[int], sequences: Sequence[int]) -> int:
        """Append one token to each of the given sequences. Return the status of llama_decode."""
        positions = [self.lengths[number] for number in sequences]
        return self._context.decode_each(
            tokens, positions, [self.name_of(number) for number in sequences]
        )

    def accept(self, sequences: Sequence[int]) -> None:
        """Add 1 to the length of each given sequence, after a successful step."""
        for number in sequences:
            self.lengths[number] += 1

    def undo(self, sequences: Sequence[int]) -> None:
        """Drop the tokens that a failed step has added to the sequences.

        A sequence is emptied completely if the model cannot drop only these tokens.
        """
        for number in sequences:
            if not self._context.forget_from(self.lengths[number], self.name_of(number)):
                self._context.forget_from(0, self.name_of(number))
                self.lengths[number] = 0

    def forget(self) -> None:
        """Set the recorded lengths of the additional sequences to 0, after the context was cleared.

        Additional sequences are all except the main sequence, which `Steps` records.
        """
        self.lengths = [0] * len(self.lengths)


class Steps:
    """Evaluates tokens in steps, and keeps track of the tokens in a llama.cpp context.

    A context has a main sequence of tokens, and may have additional sequences that continue it
    (`fork`). cached: tokens of the main sequence. cancelled: whether the current evaluation, which
    starts with `begin`, was cancelled.
    """

    def __init__(
        self,
        context: LlamaContext,
        driver: BaseDriver,
        sequences: Sequences,
        complaint: Callable[[], str],
        asked_ctx: int,
        check_files: Callable[[], None],
    ) -> None:
        """Begin with an empty main sequence. sequences: the further sequences of the context.

        complaint: returns llama.cpp's latest error message in parentheses, or "". asked_ctx: the
        context length that the user asked for. check_files: raises ChangedError if a model file was
        written to after it was opened.
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
        """Prepare to evaluate: clear an earlier cancel, and end background reads of experts."""
        self.cancelled = False
        self._driver.cancel(False)
        self._driver.end_idle()

    def cancel(self) -> None:
        """Make the running step, in which the model evaluates tokens, end soon.

        Safe in a signal handler and on any thread.
        """
        self.cancelled = True
        self._driver.cancel(True)

    def rewind(self, length: int) -> None:
        """Truncate the main sequence to its first `length` tokens.

        If the model cannot truncate a sequence at that point, drop all tokens of all sequences.
        """
        if not self._context.forget_from(length):
            self.reset()
            return
        del self.cached[length:]
        if length == 0:
            self._driver.sequence_end(0)

    def reset(self) -> None:
        """Empty the llama.cpp context: drop all tokens of all its sequences from the KV cache."""
        self._context.forget_all()
        self._driver.sequence_end()
        self._sequences.forget()
        self.cached = []

    def step(self, tokens: list[int], phase: Phase, all_logits: bool = False) -> bool:
        """Append tokens to the main sequence and evaluate them in one step.

        tokens: at most a micro-batch. Returns False if the step was cancelled; the tokens are then
        dropped again. Raises the error that made the step fail, such as ConfigError for a full
        context.
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
        """Make another sequence continue from the tokens of the main sequence.

        number: number of the other sequence, from 0. Raises ConfigError if it does not exist.
        """
        self._sequences.check([0], [number])
        name = self._sequences.name_of(number)
        self._driver.sequence_end(name)
        self._sequences.fork(number, len(self.cached))
        known = self._driver.save_sequence(0)
        if known is not None:
            self._driver.restore_sequence(name, known)

    def step_each(self, tokens: Sequence[int], numbers: Sequence[int]) -> bool:
        """Append one token to each of several additional sequences, and evaluate them in one step.

        tokens: one token for each entry of `numbers`. numbers: numbers of the sequences, as in
        `Sequences`: 0 is the first additional sequence, and the main sequence has no number.
        Returns False if the step was cancelled; the tokens are then dropped again. Raises the error
        that made the step fail.
        """
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
        """Run one step, and handle its failure. Returns False if the step was cancelled.

        decode: computes the step, and returns the status of llama_decode. undo: drops the tokens of
        the step; it is called after a cancel and after a failure. Raises the cause of a failure. If
        a model file was written to, ChangedError is raised in preference to other errors.
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
                f"the context of {self._context.n_ctx} tokens is full: {self._remedy()}"
            )
        raise NativeError(f"llama.cpp failed to evaluate tokens{self._complaint()}")

    def _remedy(self) -> str:
        """Return advice for a user whose context is full."""
        if self._asked_ctx > self._context.n_ctx:
            return "evaluate fewer tokens: the model does not support a longer context"
        return "evaluate fewer tokens, or increase the context with --ctx"
