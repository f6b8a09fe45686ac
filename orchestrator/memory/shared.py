"""Memory that is given out as it is used: a context's cells and the scratch of a step come first,
and slots of experts have the rest."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gguf_tools.file.layout import pad

CELL_STEP = 256  # cells come in so many, as llama.cpp pads them
Line = tuple[int, float]  # bytes beside an empty context, and for each cell of it


def longest_context(most: int, step: int, too_long: Callable[[int], bool]) -> int:
    """The longest context in whole steps of tokens, and of `most` at most, that is not too long,
    as no shorter one is; 0 where there is none."""
    steps = range(1, -(-most // step) + 1)
    fitting = bisect_right(steps, False, key=lambda n: too_long(min(most, n * step)))
    return min(most, fitting * step)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """What slots, cells, scratch and copies of prompts share, in bytes.

    n_bytes: of all of them. least_slots: what a policy needs of them. all_slots: what every expert
    takes. cell_bytes: of one token of the context; cell_step: memory comes for so many cells at
    once. sequences: how many share the cells. scratch: by the most tokens of a step, the fewest
    first. prompts: the most that copies of prompts take.
    """

    n_bytes: int
    least_slots: int
    all_slots: int
    cell_bytes: float
    scratch: Mapping[int, Line]
    cell_step: int = CELL_STEP
    sequences: int = 1
    prompts: int = 0

    def slots(self, n_cells: int, n_tokens: int, held: int = 0, width: int = 0) -> int:
        """What is left for slots in a step of n_tokens that ends with n_cells in use. held: what an
        earlier step has left of its scratch. width: where the last of these cells may lie, where
        free ones lie before it: attention sees those, too."""
        empty, each = next(s for size, s in self.scratch.items() if size >= n_tokens)
        scratch = empty + int(max(pad(max(1, n_cells), self.cell_step), width) * each)
        return self.n_bytes - max(held, scratch) - self.cache_bytes(n_cells)

    def width(self, cells_end: int, n_tokens: int) -> int:
        """Where the last cell may lie behind so many tokens more. cells_end: behind the last one
        in use. Each of several sequences takes runs of free cells for itself, and may leave a part
        of one free."""
        runs = self.sequences + 1 if self.sequences > 1 else 0
        return cells_end + n_tokens + runs * CELL_STEP

    def cache_bytes(self, n_cells: int) -> int:
        """What so many cells take."""
        return int(pad(max(1, n_cells), self.cell_step) * self.cell_bytes)

    def cells(self, cache_bytes: int) -> int:
        """How many cells of the context take so much."""
        return int(cache_bytes / self.cell_bytes)

    def longest(self, most: int) -> int:
        """The longest context, of `most` tokens at most, at whose end a policy still has what it
        needs; 0 where there is none."""
        at_once, least = min(self.scratch), self.least_slots
        return longest_context(most, self.cell_step, lambda n: self.slots(n, at_once) < least)

    def may_read(self, n_cells: int, width: int = 0) -> list[int]:
        """How many tokens may be read at once so that the context then has n_cells: the least
        number always, since `longest` sees to it."""
        smallest, least = min(self.scratch), self.least_slots
        fits = (n for n in self.scratch if self.slots(n_cells, n, 0, width) >= least)
        return [smallest, *(n for n in fits if n != smallest)]

    def micro_batch(self, n_cells: int, n_tokens: int, again: float = 1.0, width: int = 0) -> int:
        """How many of n_tokens behind n_cells are best read at once: with which least comes from
        the disk.

        A micro-batch of hundreds of tokens uses nearly every expert, so that each one reads all
        that have no slot. Its scratch takes slots from experts, which are read `again` times behind
        the prompt. With n tokens, u at once, A bytes of all experts and S(u) of slots that is

            ceil(n / u) (A - S(u)) - again S(u)
        """
        end, every = n_cells + n_tokens, self.all_slots

        def read(size: int) -> float:
            slots = min(every, self.slots(end, size, 0, width))
            return -(-n_tokens // size) * (every - slots) - again * slots

        return min(self.may_read(end, width), key=read)
