"""Several sequences that decode together, one token each a step, beside the engine's own one."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.errors import ConfigError
from orchestrator.native.llama import Context


class Sequences:
    """How far n sequences of one context have come. Number s, 0 to n - 1, is llama.cpp's s + 1;
    its 0 is the engine's own sequence. All share the context's cells."""

    def __init__(self, context: Context, n: int) -> None:
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
