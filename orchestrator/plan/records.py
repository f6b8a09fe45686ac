"""The records of memory planning: the machine, the request, and the plan or the refusal."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gguf_tools.file.layout import pad
from orchestrator.allocation.slots import FileTier, SlotPlan
from orchestrator.config import Config
from orchestrator.errors import BudgetError
from orchestrator.events import SKIP_TIER
from orchestrator.policy.base import Placement

CELL_STEP = 256  # the step to which llama.cpp pads the number of cells
Line = tuple[int, float]  # bytes for an empty context, and bytes per cell
# Context length and micro-batch size, in tokens.
Size = tuple[int, int]
_HEADROOM_SHARE = 0.1
_HEADROOM_BYTES = (256 * 2**20, 2 * 2**30)


@dataclass(frozen=True, slots=True)
class Device:
    """A device with its own memory for experts.

    name: such as "cuda0". memory_bytes: free memory when it was probed. flash: it supports flash
    attention for the model.
    """

    name: str
    description: str
    memory_bytes: int
    total_bytes: int
    flash: bool = False

    @property
    def usable_bytes(self) -> int:
        """Free memory minus headroom for the display."""
        return _less_headroom(self.memory_bytes)


@dataclass(frozen=True, slots=True)
class Machine:
    """A probed machine.

    memory_bytes: free memory, or the rest of a cgroup's limit if that is less. Memory that this
    process uses already counts as free. device: the device that holds the experts; None for host
    memory.
    """

    memory_bytes: int
    device: Device | None = None

    @property
    def usable_bytes(self) -> int:
        """Free memory minus headroom for other programs."""
        return _less_headroom(self.memory_bytes)


def _less_headroom(free: int) -> int:
    low, high = _HEADROOM_BYTES
    return max(0, free - min(max(int(free * _HEADROOM_SHARE), low), high))


@dataclass(frozen=True, slots=True)
class Counted:
    """Host memory as llama.cpp counts it, in bytes.

    by_tokens: maps a micro-batch size to (context length, KV cache bytes, scratch bytes) for some
    contexts, shortest first. Context lengths are padded as llama.cpp pads them. Between two of
    them, both sizes are interpolated linearly.
    """

    by_tokens: Mapping[int, Sequence[tuple[int, int, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, sizes: Iterable[Size], count: Callable[[int, int], Size | None]) -> Counted:
        """Count several sizes. count: returns the bytes of KV cache and scratch for a context
        length and a micro-batch size, or None if llama.cpp cannot count them.
        """
        found: dict[int, list[tuple[int, int, int]]] = {}
        for n_ctx, n_tokens in sorted({(pad(n_ctx, CELL_STEP), n) for n_ctx, n in sizes}):
            counted = count(n_ctx, n_tokens)
            if counted is not None:
                found.setdefault(n_tokens, []).append((n_ctx, *counted))
        return cls(found)

    def at(self, n_ctx: int, n_tokens: int) -> Size | None:
        """Return the bytes of KV cache and scratch; None if nothing was counted for this
        micro-batch size.
        """
        points, n_ctx = self.by_tokens.get(n_tokens, ()), pad(n_ctx, CELL_STEP)
        if len(points) < 2:
            return points[0][1:] if points else None
        after = min(max(1, bisect_left(points, (n_ctx,))), len(points) - 1)
        (start, *low), (end, *high) = points[after - 1], points[after]
        pairs = zip(low, high, strict=True)
        # Round up.
        kv, scratch = (a - (n_ctx - start) * (a - b) // (end - start) for a, b in pairs)
        return max(0, kv), max(0, scratch)


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of a front end beside the model. The defaults are those of a program that evaluates
    one sequence.

    sequences: number of sequences that may decode in parallel in addition to number 0; they share
    the context. conversations: reserve memory for the prompt cache, and let the KV cache and
    scratch take memory from expert slots as they grow. scored: maximum number of prompt tokens
    whose logits are in memory at once while a prompt is scored in parts; 0 if prompts are not
    scored.

    beside: bytes of the front end's process in addition to the model and a chat. beside_token: the
    same for each token of the vocabulary.
    """

    sequences: int = 0
    conversations: bool = False
    scored: int = 0
    beside: int = 0
    beside_token: int = 0


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request for a memory plan.

    config: the user's configuration. needs: what the front end needs beside the model.
    more_scratch: bytes that llama.cpp took beyond the estimate. counted: memory counted by
    llama.cpp, which replaces estimates.
    """

    config: Config
    needs: Needs = Needs()
    more_scratch: int = 0
    counted: Counted = Counted()

    def of_run(self) -> dict[str, Any]:
        """Return everything in the request that can change the resolved plan, as Config.of_run."""
        return self.config.of_run() | asdict(self.needs)


def longest_context(most: int, step: int, too_long: Callable[[int], bool]) -> int:
    """Return the longest context, in whole steps of tokens and up to `most`, that is not too long;
    0 if there is none. too_long must be monotonic in the length.
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
        """Return the longest context up to `most` tokens at whose end the policy still has its
        minimum slots; 0 if there is none.
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


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why there is no plan.

    text: a sentence for the user, with the remedy. needed_bytes: the smallest value of the limit
    that works, or a lower bound of it. option: the option that sets the limit.
    """

    text: str
    needed_bytes: int
    option: str

    @property
    def error(self) -> BudgetError:
        """The error that a front end raises."""
        return BudgetError(self.text, self.needed_bytes)


@dataclass(frozen=True, slots=True)
class Plan:
    """The division of memory for one model. Sizes are in bytes.

    n_ubatch: micro-batch size in tokens. ram_bytes: cap on all host memory of the model. cap_bytes:
    cap on the memory that holds the experts (device or host). compute_bytes: the part of
    scratch_bytes that compute graphs take. prompt_bytes: host memory for the prompt cache.

    tiers: tiers of the file in use, best first. skip: experts may be skipped. placement and slots
    are None on llama.cpp's own path. budget_bytes: the cap of the slots if the user set one,
    otherwise the size of the slots.

    With a device, dense_bytes, kv_bytes, scratch_bytes and the slots are in device memory, and
    host_bytes is the size of the expert cache in host memory.
    """

    managed: bool
    n_ctx: int
    n_ubatch: int
    ram_bytes: int
    cap_bytes: int
    dense_bytes: int
    kv_bytes: int
    scratch_bytes: int
    compute_bytes: int
    device: Device | None = None
    prompt_bytes: int = 0
    reason: str = ""
    tiers: tuple[FileTier, ...] = ()
    tier_names: tuple[str, ...] = ()
    expert_bytes: int = 0
    skip: bool = False
    budget_bytes: int = 0
    placement: Placement | None = None
    host_bytes: int = 0
    shared: SharedMemory | None = None

    @property
    def slots(self) -> SlotPlan | None:
        return self.placement.slots if self.placement else None

    @property
    def versions(self) -> list[str]:
        """Names of the tiers in which an expert may be computed, best first, followed by "skip" if
        experts may be skipped.
        """
        return [*self.tier_names, *([SKIP_TIER] if self.skip else [])]

    @property
    def fixed_bytes(self) -> int:
        """Everything except experts in the memory that holds the experts."""
        elsewhere = self.device or (self.shared and self.shared.prompts)
        prompts = 0 if elsewhere else self.prompt_bytes
        return self.dense_bytes + self.kv_bytes + self.scratch_bytes + prompts

    @property
    def total_bytes(self) -> int:
        """The maximum that the model takes of the memory that holds its experts."""
        return self.fixed_bytes + (self.slots.total_bytes if self.slots else self.expert_bytes)

    @property
    def fits_whole(self) -> bool:
        """Whether llama.cpp's own path can hold every expert in the best tier."""
        return not self.managed and self.total_bytes <= self.cap_bytes

    @property
    def absent_bytes(self) -> int:
        """The size of all experts in the best tier in use minus the size of the slots; 0 if every
        expert is resident.
        """
        placement = self.placement
        if placement is None or placement.wants.all_resident:
            return 0
        return max(0, placement.shape.all_slot_bytes() - placement.slots.total_bytes)

    def micro_batch(self, n_cells: int, n_tokens: int) -> int:
        """Return how many of the next n_tokens of a prompt to compute at once after n_cells of
        context.
        """
        return self.shared.micro_batch(n_cells, n_tokens) if self.shared else self.n_ubatch

    def slots_after(self, n_cells: int) -> SlotPlan | None:
        """Return the slots that remain for an answer with n_cells of the context in use."""
        shared = self.shared
        if shared is None or self.slots is None:
            return self.slots
        copy = min(shared.prompts, shared.cache_bytes(n_cells))
        share = min(1.0, (shared.slots(n_cells, 1) - copy) / self.slots.total_bytes)
        groups = (replace(g, n_slots=max(1, int(share * g.n_slots))) for g in self.slots.groups)
        return replace(self.slots, groups=tuple(groups))
