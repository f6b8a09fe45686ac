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
    bytes), shortest context first. Scratch is the memory of temporary buffers. Context lengths are
    rounded up as llama.cpp does.
    """

    by_tokens: Mapping[int, Sequence[tuple[int, int, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, sizes: Iterable[Size], count: Callable[[int, int], Size | None]) -> Counted:
        """Call `count` for several sizes, and return the results.

        sizes: pairs of (context length, micro-batch size). count: a function that returns the (KV
        cache bytes, scratch bytes) that llama.cpp needs for such a pair, or None if llama.cpp
        cannot count them.
        """
        found: dict[int, list[tuple[int, int, int]]] = {}
        for n_ctx, n_tokens in sorted({(pad(n_ctx, CELL_STEP), n) for n_ctx, n in sizes}):
            counted = count(n_ctx, n_tokens)
            if counted is not None:
                found.setdefault(n_tokens, []).append((n_ctx, *counted))
        return cls(found)

    def at(self, n_ctx: int, n_tokens: int) -> Size | None:
        """Return (KV cache bytes, scratch bytes) for a context length and a micro-batch size.

        Scratch is the memory of temporary buffers. For each micro-batch size, this object has the
        bytes that llama.cpp counted for some context lengths. For other lengths, the bytes are
        estimated linearly. The result is None if the object has no bytes for this micro-batch size.
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
    """The requirements of a user interface, such as the chat or the server, for a memory plan.

    - sequences: number of further sequences (such as conversations) that are decoded in parallel
      with the first.
    - conversations: whether the interface holds conversations. They get a prompt cache, and their
      context may grow at the expense of the expert cache.
    - scored: maximum number of prompt tokens whose logits are requested at once; 0 for none.
    - extra_bytes: additional memory of the process.
    - extra_token_bytes: additional memory for each token of the vocabulary.
    - image_tokens: maximum number of tokens of an image, if they must be computed in one
      micro-batch; otherwise 0.
    """

    sequences: int = 0
    conversations: bool = False
    scored: int = 0
    extra_bytes: int = 0
    extra_token_bytes: int = 0
    image_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request for a memory plan of a model.

    - config: the user's configuration.
    - needs: the requirements of the user interface, such as the number of parallel conversations.
    - more_scratch: bytes by which llama.cpp's temporary buffers exceeded an earlier estimate.
    - counted: memory sizes that llama.cpp counted. They replace estimates.
    """

    config: Config
    needs: Needs = Needs()
    more_scratch: int = 0
    counted: Counted = Counted()

    def plan_settings(self) -> dict[str, Any]:
        """Return all values of this request on which the plan of a run depends, as a dict by name.

        They are the user's settings that affect memory, and the requirements of the user interface,
        such as the number of parallel conversations.
        """
        return self.config.plan_settings() | asdict(self.needs)


def longest_context(most: int, step: int, too_long: Callable[[int], bool]) -> int:
    """Return the longest context that is not too long, in tokens; 0 if every context is too long.

    The result is a multiple of `step` or equal to `most`, which is the maximum. too_long(n) tells
    whether a context of n tokens is too long. If it is True for some n, it must be True for every
    larger n.
    """
    steps = range(1, -(-most // step) + 1)
    fitting = bisect_right(steps, False, key=lambda n: too_long(min(most, n * step)))
    return min(most, fitting * step)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The memory that expert slots share with the KV cache and with scratch, in bytes.

    A KV cell is the KV cache of one token. Scratch is the memory of a step's temporary buffers. The
    slots get the rest of the memory, so they shrink as the context grows.

    - n_bytes: size of the whole memory.
    - least_slots: minimum size of the slots.
    - all_slots: size of slots for every expert.
    - cell_bytes: size of a KV cell.
    """

    n_bytes: int
    least_slots: int
    all_slots: int
    cell_bytes: float
    # scratch[n] = (a, b): a step of at most n tokens needs a + b * (KV cells that attention covers)
    # bytes of scratch. Smallest n first.
    scratch: Mapping[int, Line]
    cell_step: int = CELL_STEP  # number of KV cells allocated at once
    sequences: int = 1  # number of sequences that share the cells
    prompts: int = 0  # maximum size of the prompt cache, which takes its memory from the slots

    def slots(self, n_cells: int, n_tokens: int, held: int = 0, width: int = 0) -> int:
        """Return how many bytes of the shared memory are left for expert slots during a step.

        The KV cache and scratch (temporary buffers) take the other bytes.

        - n_cells: the number of KV cells in use after the step.
        - n_tokens: the number of tokens in the step.
        - held: the bytes of scratch that are already allocated. Scratch never takes less.
        - width: the number of KV cells up to the last used one, including unused cells. Attention
          is computed over all of them, so scratch grows with `width`. 0 means that no cells are
          unused.
        """
        empty, each = next(s for size, s in self.scratch.items() if size >= n_tokens)
        scratch = empty + int(max(pad(max(1, n_cells), self.cell_step), width) * each)
        return self.n_bytes - max(held, scratch) - self.cache_bytes(n_cells)

    def width(self, cells_end: int, n_tokens: int) -> int:
        """Return an upper bound of the attention width after n_tokens more tokens, in KV cells.

        The attention width is the number of cells up to the last used one. Attention is computed
        over all of them, including unused cells. cells_end: the width before the new tokens.

        - With one sequence, the result is cells_end + n_tokens.
        - With several sequences, some cells stay unused, because each sequence reserves whole
          blocks of CELL_STEP cells. The result is then larger by a block for each sequence and one
          extra block.
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

    def fitting_micro_batches(self, n_cells: int, width: int = 0) -> list[int]:
        """Return the micro-batch sizes that leave enough memory for the minimum expert slots.

        A larger micro-batch needs larger temporary buffers. The smallest size is always the first
        item, even if it leaves too little.

        - n_cells: the number of KV cells in use at the end of the prompt. All sizes are tested with
          this number.
        - width: the number of KV cells up to the last used one, including unused cells between used
          ones. Attention is computed over all of them. 0 means that no cells are unused.
        """
        smallest, least = min(self.scratch), self.least_slots
        fits = (n for n in self.scratch if self.slots(n_cells, n, 0, width) >= least)
        return [smallest, *(n for n in fits if n != smallest)]

    def micro_batch(self, n_cells: int, n_tokens: int, again: float = 1.0, width: int = 0) -> int:
        """Return the micro-batch size with which a prompt and its answer read the fewest bytes.

        Each micro-batch reads nearly every expert that is not in memory. So fewer, larger
        micro-batches read less, but they leave less memory for experts.

        - n_cells: the number of KV cells in use now.
        - n_tokens: the number of prompt tokens that are still to be computed.
        - again: for each expert that is not in memory, the average number of reads by the whole
          answer. A larger number favors smaller micro-batches, which leave more memory for experts.
        - width: the number of KV cells up to the last used one at the end of the prompt, including
          unused cells. 0 means that no cells are unused.
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

        return min(self.fitting_micro_batches(end, width), key=read)


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
        """A BudgetError with the text and the needed bytes of this refusal, ready to be raised."""
        return BudgetError(self.text, self.needed_bytes)


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory plan of one model: the sizes of its parts in bytes.

    - managed: whether an expert store reads experts from disk into slots (memory for experts).
      Otherwise, all experts are in memory.
    - n_ctx, n_ubatch: context length and micro-batch size in tokens.
    - placement: the policy, its settings and its slots; None without a store.
    - shared: how slots and KV cache share memory; None if their sizes are fixed. Slots shrink as
      the context grows. The plan has the sizes of slots and KV cache for a short context.

    ram_bytes, prompt_bytes and host_bytes are in host memory. All other sizes are in the memory
    that holds the experts: GPU memory if `device` is set, otherwise host memory.
    """

    managed: bool
    n_ctx: int
    n_ubatch: int
    ram_bytes: int  # the limit of all host memory of the model
    cap_bytes: int  # the limit of the memory (device or host) that holds the experts
    dense_bytes: int
    kv_bytes: int
    scratch_bytes: int  # compute_bytes and other memory that is not weights, KV cache or slots
    compute_bytes: int  # temporary buffers of compute graphs
    device: Device | None = None
    prompt_bytes: int = 0  # the prompt cache, in host memory
    reason: str = ""
    tiers: tuple[FileTier, ...] = ()  # the precisions (tiers) of the file in use, best first
    tier_names: tuple[str, ...] = ()
    expert_bytes: int = 0  # all experts in all of these tiers
    skip: bool = False  # the policy may skip experts
    budget_bytes: int = 0  # the limit of the slots if the user set one, otherwise their size
    placement: Placement | None = None
    host_bytes: int = 0  # with a device, the expert cache in host memory
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
        """The bytes of everything except experts: dense weights, KV cache, scratch, prompt cache.

        If a GPU holds the experts, only GPU memory counts, otherwise only host memory. A prompt
        cache that shares memory with expert slots does not count.
        """
        elsewhere = self.device or (self.shared and self.shared.prompts)
        prompts = 0 if elsewhere else self.prompt_bytes
        return self.dense_bytes + self.kv_bytes + self.scratch_bytes + prompts

    @property
    def total_bytes(self) -> int:
        """The maximum memory of the model in bytes, including the experts or their slots.

        If a GPU holds the experts, only GPU memory counts, otherwise only host memory.
        """
        return self.fixed_bytes + (self.slots.total_bytes if self.slots else self.expert_bytes)

    @property
    def fits_whole(self) -> bool:
        """Whether the model runs without an expert store, because every expert fits in memory."""
        return not self.managed and self.total_bytes <= self.cap_bytes

    @property
    def absent_bytes(self) -> int:
        """The bytes of the experts that have no slot, and so must be read when a token needs them.

        The result is the size of all experts in the best tier (precision) in use, minus the size of
        the slots. It is 0 if every expert is in memory.
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
