"""Memory shared at run time: KV cells and scratch come first, and expert slots get the rest."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gguf_tools.file.layout import pad

CELL_STEP = 256  # the step to which llama.cpp pads the number of cells
Line = tuple[int, float]  # bytes for an empty context, and bytes per cell


def longest_context(most: int, step: int, too_long: Callable[[int], bool]) -> int:
    """Return the longest context, in whole steps of tokens and up to `most`, that is not too long.

    Return 0 if there is none. too_long must be monotonic in the length.
    """
    steps = range(1, -(-most // step) + 1)
    fitting = bisect_right(steps, False, key=lambda n: too_long(min(most, n * step)))
    return min(most, fitting * step)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The memory that slots, KV cells, scratch and prompt copies share. Sizes are in bytes.

    n_bytes: the sum of all parts. least_slots: the minimum that a policy needs for slots.
    all_slots: slots for every expert. cell_bytes: one token of the context. cell_step: number of
    cells that are allocated at once. sequences: number of sequences that share the cells. scratch:
    maps the maximum number of tokens of a step to its scratch, smallest first. prompts: maximum
    size of prompt copies.
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
        """Return the bytes left for slots in a step of n_tokens that ends with n_cells in use.

        held: scratch still allocated by an earlier step. width: the position after the last used
        cell if free cells lie before it, because attention covers these too.
        """
        empty, each = next(s for size, s in self.scratch.items() if size >= n_tokens)
        scratch = empty + int(max(pad(max(1, n_cells), self.cell_step), width) * each)
        return self.n_bytes - max(held, scratch) - self.cache_bytes(n_cells)

    def width(self, cells_end: int, n_tokens: int) -> int:
        """Return an upper bound of the position after the last used cell, n_tokens tokens later.

        cells_end: the position after the last used cell now. Each of several sequences reserves
        runs of free cells and may leave part of a run free.
        """
        runs = self.sequences + 1 if self.sequences > 1 else 0
        return cells_end + n_tokens + runs * CELL_STEP

    def cache_bytes(self, n_cells: int) -> int:
        """Return the size of n_cells KV cells."""
        return int(pad(max(1, n_cells), self.cell_step) * self.cell_bytes)

    def cells(self, cache_bytes: int) -> int:
        """Return how many KV cells fit into cache_bytes."""
        return int(cache_bytes / self.cell_bytes)

    def longest(self, most: int) -> int:
        """Return the longest context that leaves the policy its minimum slots at its end.

        It has at most `most` tokens. Return 0 if there is none.
        """
        at_once, least = min(self.scratch), self.least_slots
        return longest_context(most, self.cell_step, lambda n: self.slots(n, at_once) < least)

    def may_read(self, n_cells: int, width: int = 0) -> list[int]:
        """Return the micro-batch sizes with which the context may reach n_cells.

        The smallest size is always included, because `longest` guarantees that it fits.
        """
        smallest, least = min(self.scratch), self.least_slots
        fits = (n for n in self.scratch if self.slots(n_cells, n, 0, width) >= least)
        return [smallest, *(n for n in fits if n != smallest)]

    def micro_batch(self, n_cells: int, n_tokens: int, again: float = 1.0, width: int = 0) -> int:
        """Return how many of n_tokens after n_cells to compute at once, to read the fewest bytes.

        A micro-batch of hundreds of tokens uses nearly every expert, so each one reads all
        experts without a slot. Its scratch takes memory from slots. The evicted experts are read
        `again` times after the prompt. With n tokens, u at once, A bytes of all experts and S(u)
        bytes of slots, the bytes read are, up to a constant

            ceil(n / u) (A - S(u)) - again S(u)
        """
        end, every = n_cells + n_tokens, self.all_slots

        def read(size: int) -> float:
            slots = min(every, self.slots(end, size, 0, width))
            return -(-n_tokens // size) * (every - slots) - again * slots

        return min(self.may_read(end, width), key=read)
