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
    """A device, such as a GPU, with its own memory for experts.

    name: such as "cuda0". memory_bytes: free memory when the device was probed. flash: the device
    supports flash attention for the model.
    """

    name: str
    description: str
    memory_bytes: int
    total_bytes: int
    flash: bool = False

    @property
    def usable_bytes(self) -> int:
        """Free memory of the device, minus a reserve for the display."""
        return _less_headroom(self.memory_bytes)


@dataclass(frozen=True, slots=True)
class Machine:
    """The memory of this machine, as measured before planning.

    memory_bytes: free memory, or the unused part of a cgroup's limit if that is less. Memory that
    this process already uses counts as free. device: the device that holds the experts; None if
    host memory holds them.
    """

    memory_bytes: int
    device: Device | None = None

    @property
    def usable_bytes(self) -> int:
        """Free memory of this machine, minus a reserve for other programs."""
        return _less_headroom(self.memory_bytes)


def _less_headroom(free: int) -> int:
    low, high = _HEADROOM_BYTES
    return max(0, free - min(max(int(free * _HEADROOM_SHARE), low), high))


@dataclass(frozen=True, slots=True)
class Counted:
    """The host memory that llama.cpp counted for a model at some context lengths, in bytes.

    by_tokens maps each micro-batch size to a list of (context length, KV cache bytes, scratch
    bytes), shortest context first. Context lengths are padded as llama.cpp pads them. For a context
    between two of these lengths, the bytes are interpolated linearly.
    """

    by_tokens: Mapping[int, Sequence[tuple[int, int, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, sizes: Iterable[Size], count: Callable[[int, int], Size | None]) -> Counted:
        """Count the memory for several sizes.

        sizes: pairs of (context length, micro-batch size). count: returns (KV cache bytes, scratch
        bytes) for such a pair, or None if llama.cpp cannot count them.
        """
        found: dict[int, list[tuple[int, int, int]]] = {}
        for n_ctx, n_tokens in sorted({(pad(n_ctx, CELL_STEP), n) for n_ctx, n in sizes}):
            counted = count(n_ctx, n_tokens)
            if counted is not None:
                found.setdefault(n_tokens, []).append((n_ctx, *counted))
        return cls(found)

    def at(self, n_ctx: int, n_tokens: int) -> Size | None:
        """Return (KV cache bytes, scratch bytes) for a context length and a micro-batch size.

        The bytes are interpolated between the counted context lengths. The result is None if
        nothing was counted for this micro-batch size.
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
    """The memory and the sequences that a front end needs in addition to the model.

    - sequences: the number of sequences that may decode in parallel, in addition to sequence 0. All
      sequences share the context.
    - conversations: the front end holds conversations. Memory is then reserved for the prompt
      cache, and the KV cache and the scratch take memory from expert slots as they grow.
    - scored: the maximum number of prompt tokens whose logits are in memory at once while a prompt
      is scored. It is 0 if the front end scores no prompts.
    - extra_bytes: memory of the front end's process that a plain chat does not need.
    - extra_token_bytes: further memory of that process for each token of the vocabulary.
    - image_tokens: the micro-batch must have at least this size, because the model computes all
      tokens of an image at once. It is 0 for other models, and without images.

    The defaults suit a program that evaluates one sequence.
    """

    sequences: int = 0
    conversations: bool = False
    scored: int = 0
    extra_bytes: int = 0
    extra_token_bytes: int = 0
    image_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request for a memory plan.

    config: the user's configuration. needs: the memory and sequences that the front end needs.
    more_scratch: bytes by which llama.cpp's scratch exceeded an earlier estimate. counted: memory
    sizes that llama.cpp counted, which replace estimates.
    """

    config: Config
    needs: Needs = Needs()
    more_scratch: int = 0
    counted: Counted = Counted()

    def of_run(self) -> dict[str, Any]:
        """Return all settings of this request that can change the resolved plan, by name.

        They are settings of the configuration, and the needs of the front end.
        """
        return self.config.of_run() | asdict(self.needs)


def longest_context(most: int, step: int, too_long: Callable[[int], bool]) -> int:
    """Return the longest context that is not too long, in tokens; 0 if every context is too long.

    The context is a multiple of `step` and at most `most` tokens. too_long(n) tells whether a
    context of n tokens is too long. Every longer context must then be too long as well.
    """
    steps = range(1, -(-most // step) + 1)
    fitting = bisect_right(steps, False, key=lambda n: too_long(min(most, n * step)))
    return min(most, fitting * step)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The memory that expert slots, KV cells, scratch and the prompt cache share, in bytes.

    - n_bytes: the sum of all parts.
    - least_slots: the size of the fewest slots with which the policy works.
    - all_slots: the size of slots for every expert.
    - cell_bytes: the KV cache of one token.
    - scratch: maps the maximum number of tokens in a step to the step's scratch, smallest number
      first. The scratch is a pair: the bytes for an empty context, and the further bytes per KV
      cell.
    - cell_step: the number of KV cells that are allocated at once.
    - sequences: the number of sequences that share the cells.
    - prompts: the maximum size of all copies in the prompt cache.
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
        """Return the bytes that are left for expert slots in a step of n_tokens tokens.

        - n_cells: the number of KV cells in use after the step.
        - held: scratch bytes that an earlier step still occupies.
        - width: the number of KV cells that attention covers, if this is more than n_cells.
          Attention also covers the free cells before the last used one.
        """
        empty, each = next(s for size, s in self.scratch.items() if size >= n_tokens)
        scratch = empty + int(max(pad(max(1, n_cells), self.cell_step), width) * each)
        return self.n_bytes - max(held, scratch) - self.cache_bytes(n_cells)

    def width(self, cells_end: int, n_tokens: int) -> int:
        """Return how far the used KV cells can reach after n_tokens more tokens.

        The result is an upper bound for the position after the last used cell. If several sequences
        share the cells, each of them reserves blocks of cells, and the bound includes the free
        cells in these blocks. cells_end: the position after the last used cell before these tokens.
        """
        runs = self.sequences + 1 if self.sequences > 1 else 0
        return cells_end + n_tokens + runs * CELL_STEP

    def cache_bytes(self, n_cells: int) -> int:
        """Return the bytes of n_cells KV cells, rounded up to whole allocations."""
        return int(pad(max(1, n_cells), self.cell_step) * self.cell_bytes)

    def cells(self, cache_bytes: int) -> int:
        """Return how many KV cells fit into cache_bytes."""
        return int(cache_bytes / self.cell_bytes)

    def longest(self, most: int) -> int:
        """Return the longest context, up to `most` tokens, that leaves the policy enough slots.

        The policy needs its minimum slots even when the context is full. The result is 0 if every
        context is too long.
        """
        at_once, least = min(self.scratch), self.least_slots
        return longest_context(most, self.cell_step, lambda n: self.slots(n, at_once) < least)

    def may_read(self, n_cells: int, width: int = 0) -> list[int]:
        """Return the micro-batch sizes that leave the policy its minimum slots, smallest first.

        The smallest size is always included, because `longest` guarantees that it fits. n_cells:
        the number of KV cells in use after the micro-batch. width: the number of KV cells that
        attention covers, if this is more than n_cells.
        """
        smallest, least = min(self.scratch), self.least_slots
        fits = (n for n in self.scratch if self.slots(n_cells, n, 0, width) >= least)
        return [smallest, *(n for n in fits if n != smallest)]

    def micro_batch(self, n_cells: int, n_tokens: int, again: float = 1.0, width: int = 0) -> int:
        """Return the micro-batch size with which the rest of a prompt reads the fewest bytes.

        With larger micro-batches, experts that have no slot are read less often. But a larger
        micro-batch needs more scratch, which takes memory from slots and so evicts experts.

        - n_cells: the number of KV cells in use.
        - n_tokens: the number of prompt tokens that are left.
        - again: how often an expert that was evicted for scratch is read again after the prompt.
        - width: the number of KV cells that attention covers, if this is more than the cells in
          use.
        """
        # A micro-batch of hundreds of tokens uses nearly every expert, so each micro-batch reads
        # every expert that has no slot. With n tokens, u tokens at once, A bytes of all experts and
        # S(u) bytes of slots, the bytes read are, up to a constant:
        #
        #     ceil(n / u) (A - S(u)) - again S(u)
        end, every = n_cells + n_tokens, self.all_slots

        def read(size: int) -> float:
            slots = min(every, self.slots(end, size, 0, width))
            return -(-n_tokens // size) * (every - slots) - again * slots

        return min(self.may_read(end, width), key=read)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a model cannot be planned in the given memory.

    text: a sentence for the user, with the remedy. option: the option that sets the memory limit.
    needed_bytes: the smallest value of this option that works, or a lower bound of that value.
    """

    text: str
    needed_bytes: int
    option: str

    @property
    def error(self) -> BudgetError:
        """The error that a front end raises for this refusal."""
        return BudgetError(self.text, self.needed_bytes)


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory plan of one model: the sizes of its parts, in bytes.

    - managed: the model runs with an expert store.
    - n_ubatch: the micro-batch size in tokens.
    - ram_bytes: the limit of all host memory of the model.
    - cap_bytes: the limit of the memory (device or host) that holds the experts.
    - compute_bytes: the part of scratch_bytes that compute graphs take.
    - prompt_bytes: host memory for the prompt cache.
    - tiers: the precisions (tiers) of the file in use, best first.
    - skip: the policy may skip experts.
    - placement: the policy's choice of slots; None without an expert store.
    - budget_bytes: the limit of the slots if the user set one, otherwise the size of the slots.
    - shared: how slots and KV cache share memory; None if their sizes are fixed.

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
        """Names of the precisions (tiers) in which an expert may be computed, best first.

        The last name is "skip" if experts may be skipped.
        """
        return [*self.tier_names, *([SKIP_TIER] if self.skip else [])]

    @property
    def fixed_bytes(self) -> int:
        """The bytes of everything except experts in the memory that holds the experts."""
        elsewhere = self.device or (self.shared and self.shared.prompts)
        prompts = 0 if elsewhere else self.prompt_bytes
        return self.dense_bytes + self.kv_bytes + self.scratch_bytes + prompts

    @property
    def total_bytes(self) -> int:
        """The most bytes that the model takes in the memory that holds its experts."""
        return self.fixed_bytes + (self.slots.total_bytes if self.slots else self.expert_bytes)

    @property
    def fits_whole(self) -> bool:
        """Whether the model runs without an expert store, because every expert fits in memory."""
        return not self.managed and self.total_bytes <= self.cap_bytes

    @property
    def absent_bytes(self) -> int:
        """The size of all experts in the best tier in use, minus the size of the slots.

        The result is 0 if every expert is resident.
        """
        placement = self.placement
        if placement is None or placement.wants.all_resident:
            return 0
        return max(0, placement.shape.all_slot_bytes() - placement.slots.total_bytes)

    def micro_batch(self, n_cells: int, n_tokens: int) -> int:
        """Return how many of the next n_tokens tokens of a prompt to compute at once.

        n_cells: number of KV cells that are already in use.
        """
        return self.shared.micro_batch(n_cells, n_tokens) if self.shared else self.n_ubatch

    def slots_after(self, n_cells: int) -> SlotPlan | None:
        """Return the expert slots that an answer can use while n_cells KV cells are in use.

        If slots share memory with the KV cache, a longer context leaves fewer slots. The result is
        None without an expert store.
        """
        shared = self.shared
        if shared is None or self.slots is None:
            return self.slots
        copy = min(shared.prompts, shared.cache_bytes(n_cells))
        share = min(1.0, (shared.slots(n_cells, 1) - copy) / self.slots.total_bytes)
        groups = (replace(g, n_slots=max(1, int(share * g.n_slots))) for g in self.slots.groups)
        return replace(self.slots, groups=tuple(groups))
