"""What one context has read: states and marks, sequences, and the steps that read more."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from orchestrator.errors import ConfigError, MoeEdgeError, NativeError, PolicyError
from orchestrator.events import Phase
from orchestrator.native import NO_ROOM
from orchestrator.native.llama import LlamaContext
from orchestrator.runtime.driver import PlainDriver

# A copy in memory begins with a magic and the sequence's number, which a file lacks.
COPY_HEAD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a sequence to which its memory can go back.

    length: the tokens before it. part: what cannot be had by cutting, uint8; None where everything
    can. policy: what the policy knew of the sequence there.
    """

    length: int
    part: np.ndarray | None
    policy: bytes | None

    @property
    def n_bytes(self) -> int:
        return (0 if self.part is None else self.part.nbytes) + len(self.policy or b"")


class SequenceState:
    """The state of one sequence of a context, whole or in part.

    The part is what attention over the whole context does not hold: the states of recurrent
    layers, and the keys and values of layers with a window. It is small, and the rest can be cut.
    """

    def __init__(self, context: LlamaContext, sequence: int = 0) -> None:
        self._context = context
        self._sequence = sequence

    @cached_property
    def recurrent(self) -> bool:
        """As of Model."""
        return self._context.model.is_recurrent

    @cached_property
    def has_part(self) -> bool:
        """As of Model."""
        return self._context.model.has_part

    def n_bytes(self, part: bool = False) -> int:
        """What read takes."""
        context, flags = self._context, self._flags(part)
        size = context.api.llama_state_seq_get_size_ext(context.handle, self._sequence, flags)
        return int(size)

    def read(self, part: bool = False) -> np.ndarray:
        """A copy, uint8. Raises NativeError."""
        api = self._context.api
        data = np.empty(self.n_bytes(part), np.uint8)
        done = api.llama_state_seq_get_data_ext(
            self._context.handle, _pointer(data), data.nbytes, self._sequence, self._flags(part)
        )
        if done != data.nbytes:
            raise NativeError("llama.cpp cannot copy a conversation's memory")
        return data

    def write(self, data: np.ndarray, part: bool = False) -> bool:
        """Puts a copy in the place of what the sequence holds; False where it does not go in, and
        the sequence is then no longer what it was."""
        api = self._context.api
        done = api.llama_state_seq_set_data_ext(
            self._context.handle, _pointer(data), data.nbytes, self._sequence, self._flags(part)
        )
        return int(done) == data.nbytes

    def save(self, path: Path, tokens: Sequence[int]) -> int:
        """Writes tokens and the whole state to a file, which it replaces, a layer at a time.
        Returns its bytes; 0 where that failed."""
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        return int(
            self._context.api.llama_state_seq_save_file(
                self._context.handle, os.fsencode(path), self._sequence, array, len(tokens)
            )
        )

    def load(self, path: Path, n_tokens: int) -> bool:
        """As write, from a file that save made of so many tokens; more may follow in it."""
        tokens, count = (ctypes.c_int32 * n_tokens)(), ctypes.c_size_t()
        done = self._context.api.llama_state_seq_load_file(
            self._context.handle,
            os.fsencode(path),
            self._sequence,
            tokens,
            n_tokens,
            ctypes.byref(count),
        )
        return bool(done) and count.value == n_tokens

    def _flags(self, part: bool) -> int:
        return int(self._context.api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) if part else 0


def _pointer(data: np.ndarray) -> ctypes._Pointer[ctypes.c_uint8]:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


class Sequences:
    """How far n sequences of one context have come. Number s, 0 to n - 1, is llama.cpp's s + 1;
    its 0 is the engine's own sequence. All share the context's cells."""

    def __init__(self, context: LlamaContext, n: int) -> None:
        self._context = context
        self.lengths = [0] * n  # tokens that each one holds

    def name_of(self, number: int) -> int:
        """What llama.cpp calls a sequence."""
        return number + 1

    def check(self, tokens: Sequence[int], sequences: Sequence[int]) -> None:
        """Raises ConfigError for what cannot be one step."""
        if not sequences or len(tokens) != len(sequences):
            raise ConfigError(
                f"a step takes one token for each sequence, not {len(tokens)} for {len(sequences)}"
            )
        if len(set(sequences)) < len(sequences):
            raise ConfigError("a step takes one token of a sequence, and one is named twice")
        for number in sequences:
            if not 0 <= number < len(self.lengths):
                raise ConfigError(
                    f"there is no sequence {number}: the engine was opened with the setting "
                    f"'sequences' at {len(self.lengths)}"
                )
        if len(sequences) > self._context.n_ubatch:
            raise ConfigError(
                f"{len(sequences)} sequences are more than the {self._context.n_ubatch} tokens of "
                f"one step: raise --ubatch"
            )

    def fork(self, number: int, length: int) -> None:
        """Lets a sequence go on from the engine's own one, which holds `length` tokens; they
        share the cells."""
        self._context.share(self.name_of(number))
        self.lengths[number] = length

    def decode(self, tokens: Sequence[int], sequences: Sequence[int]) -> int:
        """llama_decode's status. Nothing counts as held before accept."""
        positions = [self.lengths[number] for number in sequences]
        return self._context.decode_each(
            tokens, positions, [self.name_of(number) for number in sequences]
        )

    def accept(self, sequences: Sequence[int]) -> None:
        """The step is good: each holds one token more."""
        for number in sequences:
            self.lengths[number] += 1

    def undo(self, sequences: Sequence[int]) -> None:
        """Drops what a failed step left; of a memory that cannot be cut, the whole sequence."""
        for number in sequences:
            if not self._context.forget_from(self.lengths[number], self.name_of(number)):
                self._context.forget_from(0, self.name_of(number))
                self.lengths[number] = 0

    def forget(self) -> None:
        """The context was cleared."""
        self.lengths = [0] * len(self.lengths)


class Steps:
    """The tokens that one context has read, and the steps that read more.

    cached: tokens of the engine's own sequence. marks: places that its memory can go back to, the
    shortest first. cancelled: set by cancel, from any thread, until the next begin.
    """

    def __init__(
        self,
        context: LlamaContext,
        driver: PlainDriver,
        sequences: Sequences,
        complaint: Callable[[], str],
        asked_ctx: int,
        check_files: Callable[[], None],
    ) -> None:
        """complaint: what llama.cpp said last, in brackets. asked_ctx: the context that the user
        asked for, in tokens. check_files: raises ChangedError if a file of the model was written
        to since it was opened."""
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
        self._check_files = check_files

    def begin(self) -> None:
        """Prepares the steps of one call: forgets an earlier cancel, and ends the work of idle.

        A cancel that comes while this waits for idle to end counts for the steps of this call.
        """
        self.cancelled = False
        self._driver.cancel(False)
        self._driver.end_idle()

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
        """Run one decode, which returns llama_decode's status.

        Returns True if its logits are good, False if it was cancelled and undone. Otherwise undoes
        it and raises what went wrong; ChangedError in the first place, because every other failure
        may follow from a changed file, and good logits may be made from it.
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
            n_ctx = self._context.n_ctx
            raise ConfigError(
                f"the context of {n_ctx} tokens is full{self.more_context('start anew')}"
            )
        raise NativeError(f"llama.cpp failed to evaluate{self._complaint()}")
