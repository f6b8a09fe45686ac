"""Sequences that are kept in memory, within a budget: the least recently used one goes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.engine.prompts.matching import common_prefix
from orchestrator.engine.states import Mark


def usable(length: int, has_part: bool, marks: Sequence[int], common: int) -> int:
    """How many tokens of a copy of `length` tokens can be gone on from, where the prompt has
    `common` of them: all of those, or as far as the latest mark where the copy cannot be cut.
    marks: lengths of those with which a memory goes back."""
    if common >= length:
        return length
    if not has_part:
        return common
    return max((each for each in marks if each <= common), default=0)


@dataclass(frozen=True, eq=False, slots=True)
class Copy:
    """A sequence: its tokens, int32 [n], its state, uint8, and its marks. key: what else the state
    depends on."""

    key: str
    tokens: np.ndarray
    state: np.ndarray
    has_part: bool
    marks: tuple[Mark, ...]

    @property
    def n_bytes(self) -> int:
        return int(
            self.tokens.nbytes + self.state.nbytes + sum(each.n_bytes for each in self.marks)
        )

    def usable(self, common: int) -> int:
        places = [each.length for each in self.marks if each.part is not None]
        return usable(len(self.tokens), self.has_part, places, common)


class Shelf:
    """Copies of sequences, the latest used one last.

    budget_bytes: what they and the marks of the sequence that runs (live_bytes) take together at
    most. on_drop: gets each copy that goes for want of room.
    """

    def __init__(
        self, budget_bytes: int = 0, on_drop: Callable[[Copy], None] = lambda _copy: None
    ) -> None:
        self.budget_bytes = budget_bytes
        self.live_bytes = 0
        self._on_drop = on_drop
        self._copies: list[Copy] = []

    @property
    def used_bytes(self) -> int:
        return self.live_bytes + sum(each.n_bytes for each in self._copies)

    def of(self, key: str) -> Iterator[Copy]:
        """Copies that go with this key, the latest used one first."""
        return (each for each in reversed(list(self._copies)) if each.key == key)

    def make_room(self, n_bytes: int) -> bool:
        """Lets copies go until there is room for so many bytes more; False where there never
        is. Nothing goes then."""
        if self.live_bytes + n_bytes > self.budget_bytes:
            return False
        while self.used_bytes + n_bytes > self.budget_bytes:
            self._on_drop(self._copies.pop(0))
        return True

    def add(self, copy: Copy) -> None:
        """Keeps a copy that there is room for, in the place of those that it goes on from."""
        self._copies = [each for each in self._copies if not _goes_on(copy, each)]
        self._copies.append(copy)

    def use(self, copy: Copy) -> None:
        self._copies.remove(copy)
        self._copies.append(copy)

    def remove(self, copy: Copy) -> None:
        self._copies.remove(copy)

    def all(self) -> list[Copy]:
        """Every copy, the latest used one last."""
        return list(self._copies)


def _goes_on(new: Copy, old: Copy) -> bool:
    n = len(old.tokens)
    return new.key == old.key and common_prefix(new.tokens, old.tokens) == n
