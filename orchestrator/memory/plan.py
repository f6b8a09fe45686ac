"""How a model is laid out in memory: plain or managed, which tiers, which slots; how long a context
and how large a micro-batch, where these were not asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

from gguf_tools.experts import KV_TYPES, ExpertModel
from gguf_tools.file.layout import BLOCK, EMBEDDINGS, pad
from gguf_tools.units import format_least, format_size
from gguf_tools.verify.structure import foreign_problems
from orchestrator.allocation.slots import FileTier, SlotPlan
from orchestrator.config import Config
from orchestrator.errors import BudgetError, ConfigError
from orchestrator.events import SKIP_TIER
from orchestrator.memory import footprint
from orchestrator.memory.choice import choose, make_policy, wants_plain
from orchestrator.memory.footprint import LEAST_CONTEXT, SIZES
from orchestrator.memory.machine import Device, Machine
from orchestrator.memory.shared import CELL_STEP, Line, SharedMemory, longest_context
from orchestrator.policy import BASELINE, DEFAULT, PLAIN, Policy, policy_class

# The KV cache may take this share of what is left behind the weights that are not experts. The
# expert cache hits about as often with the other fifteen sixteenths, and a step reads the KV cache
# only as far as it is filled.
SHARE = 1 / 16

# How often an answer reads an expert without a slot, for each token of its prompt and relative to
# the mean of all. An answer is an eighth as long: the medians of conversations in Splitwise (ISCA
# 2024, Figure 3) are 129 and 1,020 tokens. Such experts are those that were used least; half is on
# the safe side (docs/experiments/prompts.md, "Micro-batches by memory").
ABSENT_USE = 1 / 8 / 2


# Bytes that no machine has, and how often a lower bound of the smallest cap is corrected.
_NO_END = 1 << 62
_MOST_TRIES = 8


class _TooSmallError(BudgetError):
    """A cap that is too small for a policy's slots beside a room, before the user is told."""

    def __init__(self, policy: Policy, needed_bytes: int) -> None:
        super().__init__(f"the policy {policy.name} needs {needed_bytes} bytes", needed_bytes)
        self.policy = policy


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where everything goes. Sizes in bytes.

    n_ubatch: tokens of a prompt that are computed at once. ram_bytes is the cap over all that the
    host's memory takes, cap_bytes that of the memory that experts live in. compute_bytes: the part
    of the scratch that graphs take. prompt_bytes: of the host's memory, for prompts that were read
    before. tiers: the tiers of the file in use, best first; skip: experts may be skipped; policy
    and slots are None in plain mode. budget_bytes is the cap of the slots where one was asked for,
    else what they take.

    On a device, dense_bytes, kv_bytes, scratch_bytes and the slots are its memory, and host_bytes
    is the cache of experts in the host's memory behind it.
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
    policy: Policy | None = None
    slots: SlotPlan | None = None
    host_bytes: int = 0
    shared: SharedMemory | None = None

    @property
    def versions(self) -> list[str]:
        """Names of what an expert may be computed in, the best first and skipping last."""
        return [*self.tier_names, *([SKIP_TIER] if self.skip else [])]

    @property
    def fixed_bytes(self) -> int:
        """All that is not experts in the memory that they live in."""
        elsewhere = self.device or (self.shared and self.shared.prompts)
        prompts = 0 if elsewhere else self.prompt_bytes
        return self.dense_bytes + self.kv_bytes + self.scratch_bytes + prompts

    @property
    def total_bytes(self) -> int:
        """The most that the model takes of the memory that its experts live in."""
        return self.fixed_bytes + (self.slots.total_bytes if self.slots else self.expert_bytes)

    @property
    def fits_whole(self) -> bool:
        """Whether llama.cpp's own path has room for every expert in the best tier."""
        return not self.managed and self.total_bytes <= self.cap_bytes

    @property
    def absent_bytes(self) -> int:
        """How far the slots fall short of every expert in the best tier in use; 0 where each
        expert is in memory."""
        if self.policy is None or self.slots is None or self.policy.wants.all_resident:
            return 0
        return max(0, self.policy.shape.all_slot_bytes() - self.slots.total_bytes)

    def micro_batch(self, n_cells: int, n_tokens: int) -> int:
        """How many of n_tokens of a prompt behind n_cells of context are read at once."""
        return self.shared.micro_batch(n_cells, n_tokens) if self.shared else self.n_ubatch

    def slots_behind(self, n_cells: int) -> SlotPlan | None:
        """What of the slots an answer has with so much of the context in use."""
        shared = self.shared
        if shared is None or self.slots is None:
            return self.slots
        copy = min(shared.prompts, shared.cache_bytes(n_cells))
        share = min(1.0, (shared.slots(n_cells, 1) - copy) / self.slots.total_bytes)
        groups = (replace(g, n_slots=max(1, int(share * g.n_slots))) for g in self.slots.groups)
        return replace(self.slots, groups=tuple(groups))


def plan_memory(config: Config, model: ExpertModel, machine: Machine) -> MemoryPlan:
    """As MemoryPlanner, with no more known than what the file says."""
    return MemoryPlanner(config, model, machine).plan()


def notes_of(config: Config, model: ExpertModel) -> list[str]:
    """Return what a user has to know of a model before it runs: that --ctx is above the context
    which it was trained with, and that a part of another quantization is among its parts, which
    runs but is probably a mistake."""
    own, asked, notes = model.hparams.context_length, config.ctx, []
    if own and asked is not None and asked > own:
        notes.append(f"--ctx {asked}: the model was made for {own} tokens, and gets as many.")
    for parts in model.split_files:
        notes += [f"{each.text}." for each in foreign_problems(parts)]
    return notes


def scratch_bytes(model: ExpertModel, config: Config) -> int:
    """All that a model takes beside its weights and its KV cache where a policy looks ahead."""
    return MemoryPlanner(config.compared(policy=DEFAULT), model, Machine(0)).room().scratch_bytes


@dataclass(frozen=True)
class MemoryPlanner:
    """Lays a model out in memory: that of the machine's device, where it has one, with the host's
    behind it.

    Without a policy: the plain upstream path where everything fits and nothing asks for less or for
    slots; else the baseline where the high tier fits whole and nothing asks for less, so that there
    is nothing to decide; else the default policy. That is lossless unless less is asked for.

    more_scratch: bytes that llama.cpp was seen to take beyond the estimate. count: the cache and
    scratch in the host's memory for a context of so many tokens and so many at once as llama.cpp
    counts them, in the place of estimates; None where it cannot say. teach: tells a policy, before
    it plans, what earlier runs learned of the model in these tiers.
    """

    config: Config
    model: ExpertModel
    machine: Machine
    more_scratch: int = 0
    count: Callable[[int, int], tuple[int, int] | None] | None = None
    teach: Callable[[Policy, tuple[str, ...]], None] | None = None

    def plan(self) -> MemoryPlan:
        """Return the plan. Raises BudgetError naming the smallest budget that works, PolicyError
        and ConfigError for a policy, tiers, or a precision of keys and values that do not go with
        the model."""
        _check_kv(self.config, self.model)
        try:
            return self._laid_out()
        except _TooSmallError as error:
            raise self._refusal(error) from None

    def _laid_out(self) -> MemoryPlan:
        """Return the plan. Raises BudgetError with the fewest bytes that may be enough."""
        usual = self.room(managed=not wants_plain(self.config, self.model))
        try:
            plan = self.shared(usual)
        except _TooSmallError as error:
            # A policy that keeps every expert in memory does not share it.
            with suppress(BudgetError):
                return self.divided(usual)
            raise error from None
        return plan or self.divided(usual)

    def least(self, needed_bytes: int = 1) -> MemoryPlan:
        """Return the plan under the smallest cap that works. needed_bytes: a lower bound of that
        cap. Raises BudgetError if no cap works within a few corrections of the bound."""
        capped = "vram" if self.machine.device else "ram"
        device = self.machine.device
        without_end = Machine(_NO_END, device and replace(device, memory_bytes=_NO_END))
        for tries_left in reversed(range(_MOST_TRIES)):
            config = self.config.with_changes(**{capped: needed_bytes})
            try:
                return replace(self, config=config, machine=without_end)._laid_out()
            except BudgetError as error:
                if not tries_left:
                    raise
                # Each refusal is right for the context that it was counted for.
                needed_bytes = max(error.needed_bytes, needed_bytes + 1)
        raise AssertionError

    @property
    def _own_context(self) -> int:
        """The longest context that the model was made for, of each of the sequences that share it;
        0 where it does not say."""
        return self.model.hparams.context_length * (1 + self.config.sequences)

    @property
    def _asked(self) -> int | None:
        """The cap on the memory that experts live in, as far as one was asked for."""
        return self.config.vram if self.machine.device else self.config.ram

    def room(self, n_ctx: int = 0, n_tokens: int = 0, managed: bool = True) -> MemoryPlan:
        """A plan without slots. n_ctx, n_tokens: of the context and of a micro-batch, in the place
        of what was asked for, or else the least, as far as the model was made for it."""
        config, model, device = self.config, self.model, self.machine.device
        usual = config.ctx or LEAST_CONTEXT
        n_ctx = n_ctx or min(usual, self._own_context or usual)
        n_tokens = min(n_tokens or config.ubatch or SIZES[0], n_ctx)
        found = self.count(n_ctx, n_tokens) if self.count else None
        kv, graph = found or (model.kv_bytes(n_ctx, config.kv), None)
        compute = footprint.compute_bytes(model, config, n_ctx, n_tokens, graph)
        compute, beside = compute + self.more_scratch, 0
        if managed and policy_class(config.policy or DEFAULT).wants.asked_in:
            # Copies of routers in half precision, which a policy looks ahead with.
            routers = (model.n_layers - 1) * model.n_expert
            beside = 2 * routers * model.hparams.embedding_length
        if device is None:
            beside += footprint.process_bytes(model, config)
            kv += footprint.copying_bytes(model, config, n_ctx)
        else:
            flash = device.flash and config.importance != "exact"
            # Without a cap, ggml's pool makes room for itself where the device is full.
            piles = config.vram is not None and not managed
            compute += footprint.kernel_bytes(model, config, n_ctx, n_tokens, flash, piles)
        return MemoryPlan(
            managed=managed,
            n_ctx=n_ctx,
            n_ubatch=n_tokens,
            ram_bytes=_cap(self.machine, config.ram),
            cap_bytes=_cap(device or self.machine, self._asked),
            dense_bytes=model.dense_bytes - (model.lookup_bytes if managed else 0),
            kv_bytes=kv,
            scratch_bytes=compute + beside,
            compute_bytes=compute,
            device=device,
            tiers=(FileTier(0),),
            tier_names=(model.tiers[0].name,),
            expert_bytes=model.tier_bytes[0],
        )

    def shared(self, usual: MemoryPlan) -> MemoryPlan | None:
        """The plan whose context and scratch take from the slots what they need when they need it;
        None where memory is divided once. usual: with the least context.

        Raises BudgetError for a context that was asked for and is too long, with the longest one.
        """
        config = self.config
        once = config.policy == PLAIN or config.expert_ram or self.machine.device
        if once or not config.conversations or usual.fits_whole:
            return None
        least = min(SIZES[0], usual.n_ubatch)
        room = self.room(max(CELL_STEP, least), least)
        plan = self.try_in((room, self._prompt_bytes(usual)), (room, config.cache_ram or 0))
        policy, prompts = plan.policy, plan.prompt_bytes
        if policy is None or type(policy).wants.all_resident:
            return None
        own = 0 if footprint.part_bytes(self.model, config) else prompts
        if own:  # no copy has more than its cells
            plan = self._plan_in(room, 0)
        most = usual.n_ctx if config.ctx else self._own_context or usual.n_ctx
        shared = self._sharing(plan, most, own)
        longest, each = shared.longest(most), most // (1 + config.sequences) if config.ctx else 0
        if longest < each:
            raise BudgetError(
                f"--ctx {each} is too long for {self._given(room).rstrip(',')}: the longest "
                f"context beside the fewest experts of the policy {policy.name} has {longest} "
                f"tokens",
                room.cap_bytes + shared.least_slots - shared.slots(each, 1),
            )
        n_ubatch = max(shared.scratch)
        return replace(plan, n_ctx=longest, n_ubatch=n_ubatch, prompt_bytes=prompts, shared=shared)

    def divided(self, usual: MemoryPlan) -> MemoryPlan:
        """The plan whose parts stay as they are: with the context and the memory for prompts that
        were asked for, or that cost little, and with less of these where the policy has no room
        beside them; and with the micro-batch with which least is read for the tokens of a prompt
        and of its answer. Where nothing is absent, that is the smallest."""
        config, model, asked = self.config, self.model, self.config.cache_ram or 0
        room = usual if config.ctx else self._longer(usual)
        plan = self.try_in((room, self._prompt_bytes(room)), (room, asked), (usual, asked))
        if config.ubatch or config.expert_ram or not plan.absent_bytes:
            return plan
        n, again = SIZES[-1], SIZES[-1] * ABSENT_USE * model.n_expert_used / model.n_expert
        n_tokens = self._sharing(plan, plan.n_ctx).micro_batch(plan.n_ctx - n, n, again)
        if n_tokens != plan.n_ubatch:
            with suppress(BudgetError):
                return self._plan_in(self.room(plan.n_ctx, n_tokens), plan.prompt_bytes)
        return plan

    def _sharing(self, plan: MemoryPlan, most: int, prompts: int = 0) -> SharedMemory:
        """What the slots of a plan, a context of `most` tokens at most, scratch and copies of
        prompts take in turn."""
        config, policy, slots = self.config, plan.policy, plan.slots
        assert policy is not None and slots is not None
        least = config.ubatch or SIZES[0]
        sizes = sorted({least, *(n for n in SIZES if n <= min(config.ubatch or most, most))})
        lines = {size: self._line(lambda room: room.compute_bytes, size, most) for size in sizes}
        # What is there beside no cell stays.
        states, cell_bytes = self._line(lambda room: room.kv_bytes, least, most)
        # Behind the last layer of attention, recurrent ones compute where its mask lay.
        twice = 2 if states else 1
        shared = SharedMemory(
            plan.cap_bytes - plan.fixed_bytes + plan.kv_bytes + plan.compute_bytes - states,
            max(least_slots(policy), sum(group.slot_bytes for group in slots.groups)),
            policy.shape.all_slot_bytes(),
            cell_bytes,
            {size: (twice * empty, each) for size, (empty, each) in lines.items()},
            # Values that are transposed grow by a page for each of their dimensions.
            CELL_STEP if config.importance != "exact" else 8 * CELL_STEP,
            1 + config.sequences,
            prompts,
        )
        # A larger one may have room for a prompt that is shorter than itself, and none for its own.
        scratch = {n: each for n, each in shared.scratch.items() if n in shared.may_read(n)}
        return replace(shared, scratch=scratch)

    def _line(self, part: Callable[[MemoryPlan], int], n_tokens: int, most: int) -> Line:
        """A part of a room for so many tokens at once, beside no cell and for every cell. It is the
        largest of sums that grow evenly with the context, and so never above the line from the
        shortest to the longest one."""
        short = pad(n_tokens, CELL_STEP)
        long = max(pad(most, CELL_STEP), short + CELL_STEP)
        at_short, at_long = (part(self.room(n, n_tokens)) for n in (short, long))
        each = max(0.0, (at_long - at_short) / (long - short))
        return int(at_short - each * short), each

    def _longer(self, least: MemoryPlan) -> MemoryPlan:
        """With the context where none was asked for. Where everything fits beside the least one, it
        still does beside this one; a conversation gets the longest such, since it takes nothing
        until it is used."""
        left, estimating = least.cap_bytes - least.fixed_bytes, replace(self, count=None)
        allowed = int((left + least.kv_bytes) * SHARE) - least.kv_bytes
        if least.fits_whole:
            allowed = min(allowed, left - least.expert_bytes)
            if self.config.conversations and not least.device:
                allowed = left - least.expert_bytes - self._prompt_bytes(least)

        def taken(n_ctx: int) -> int:
            return estimating.room(n_ctx, managed=least.managed).fixed_bytes

        most = allowed + taken(least.n_ctx)
        longest = longest_context(self._own_context, CELL_STEP, lambda n_ctx: taken(n_ctx) > most)
        return self.room(max(least.n_ctx, longest), managed=least.managed)

    def _prompt_bytes(self, room: MemoryPlan) -> int:
        """What prompts that were read before may take of the host's memory: what was asked for,
        or, for conversations, one more context and some marks, as far as that costs little and
        what fits whole still does."""
        config, model = self.config, self.model
        if config.cache_ram is not None or not config.conversations:
            return config.cache_ram or 0
        left = room.cap_bytes - room.fixed_bytes
        if room.device:
            left = room.ram_bytes - footprint.process_bytes(model, config, on_gpu=True)
        most = int(left * footprint.PROMPT_SHARE)
        if room.fits_whole and not room.device:
            most = min(most, left - room.expert_bytes)
        marks = footprint.PROMPT_MARKS * footprint.part_bytes(model, config)
        return max(0, min(room.kv_bytes + marks, most))

    def try_in(self, *rooms: tuple[MemoryPlan, int]) -> MemoryPlan:
        """The plan in the first room that is large enough, each with so many bytes for prompts.
        Raises the last one's BudgetError."""
        for each in rooms[:-1]:
            with suppress(BudgetError):
                return self._plan_in(*each)
        return self._plan_in(*rooms[-1])

    def _plan_in(self, room: MemoryPlan, prompts: int) -> MemoryPlan:
        """Managed where a plain one does not fit and is not asked for. Raises BudgetError."""
        config, model, asked = self.config, self.model, self._asked
        room = replace(room, prompt_bytes=prompts)
        if not room.managed:
            fits, needed = room.fits_whole, room.total_bytes
            if not fits and config.policy == PLAIN and asked:
                raise BudgetError(
                    f"{self._given(room)} is too little for the policy plain, which keeps "
                    f"everything in memory: it needs at least {format_least(needed)} with a "
                    f"context of {room.n_ctx} tokens; the other policies keep experts on disk",
                    needed,
                )
            if fits or config.policy == PLAIN:
                why = "everything fits" if fits else "asked for"
                amounts = f"{format_size(needed)} of {format_size(room.cap_bytes)}"
                return replace(room, reason=f"{why} ({amounts})")
            room = replace(self.room(room.n_ctx), prompt_bytes=prompts)

        rest = room.cap_bytes - room.fixed_bytes
        budget = min(config.expert_ram or rest, rest) if asked else config.expert_ram or rest
        shapes = model.shapes if room.device else ()
        shape_of = partial(footprint.model_shape, model, shapes=shapes)
        choice = choose(config, model, shape_of, budget)
        policy = make_policy(config, choice, shape_of(choice.tiers))
        if self.teach is not None:
            self.teach(policy, policy.shape.tiers)
        try:
            slots = policy.plan(max(0, budget))
        except BudgetError as error:
            raise self._too_small(room, policy, error.needed_bytes) from None
        return replace(
            room,
            reason=policy.describe(),
            tiers=choice.tiers,
            tier_names=policy.shape.tiers,
            expert_bytes=sum(model.tier_bytes[tier] for tier in choice.tiers),
            skip=choice.skip,
            budget_bytes=budget if config.expert_ram or asked else slots.total_bytes,
            policy=policy,
            slots=slots,
            host_bytes=self._host_bytes(room, policy, slots) if room.device else 0,
        )

    def _host_bytes(self, room: MemoryPlan, policy: Policy, slots: SlotPlan) -> int:
        """The cache of experts in the host's memory behind a device, beside slots there: what is
        left, as far as there are experts. Raises BudgetError where not even reads in flight find
        room."""
        config, model = self.config, self.model
        fixed = footprint.process_bytes(model, config, on_gpu=True) + room.prompt_bytes
        fixed += slots.host_bytes + footprint.copying_bytes(model, config, room.n_ctx)
        # llama.cpp keeps embeddings there, but for those that stay on disk.
        if all(table.info.name != EMBEDDINGS for table in model.lookup):
            tables = (part.tensors.get(EMBEDDINGS) for part in model.parts)
            fixed += max((each.nbytes for each in tables if each), default=0)
        if slots.host_bytes:
            fixed += footprint.exchange_bytes(model, room.n_ubatch)
        groups, layers = slots.groups, policy.shape.host_slots
        staged = {tier for (*_, tier), at in slots.group_of.items() if not groups[at].on_host}
        sizes = [size for each in layers for tier in staged for size in each[tier].values()]
        # Every size has slots of its own, two at least.
        in_flight = max(2 * config.io_threads * max(sizes), 2 * sum(set(sizes)))
        needed = fixed + in_flight
        if room.ram_bytes < needed:
            raise BudgetError(
                f"--ram {format_size(room.ram_bytes)} is too little beside a GPU: the smallest "
                f"that works is {format_least(needed)}",
                needed,
            )
        return min(room.ram_bytes, model.n_expert * sum(sizes) + needed) - fixed

    def _given(self, room: MemoryPlan) -> str:
        """The cap that binds, for a message."""
        if self._asked == room.cap_bytes:
            return f"{'--vram' if room.device else '--ram'} {format_size(room.cap_bytes)}"
        of = f" of {room.device.name}" if room.device else ""
        return f"free memory{of}, {format_size(room.cap_bytes)},"

    def _too_small(self, room: MemoryPlan, policy: Policy, slots: int) -> BudgetError:
        """Return the error for a budget below what the policy needs. slots: the fewest bytes of
        slots with which the policy works, beside the room."""
        expert_ram = self.config.expert_ram
        if expert_ram is None or (self._asked is not None and expert_ram >= slots):
            return _TooSmallError(policy, room.fixed_bytes + slots)
        least = least_slots(policy_class(BASELINE)(policy.shape))
        works = f"; --policy {BASELINE} works from {format_least(least)}" if least < slots else ""
        return BudgetError(
            f"--expert-ram {format_size(expert_ram)} is too small: the smallest that works with "
            f"the policy {policy.name} is {format_least(slots)}{works}",
            slots,
        )

    def _refusal(self, error: _TooSmallError) -> BudgetError:
        """Return the error that tells the user the smallest cap that works, with its context, or
        names --cache-ram if that alone leaves too little."""
        option = "--vram" if self.machine.device else "--ram"
        plan = self.least(error.needed_bytes)
        if self.config.cache_ram:
            without = self.config.with_changes(cache_ram=None)
            with suppress(BudgetError):
                replace(self, config=without)._laid_out()
                return self._cache_too_large(option, plan.cap_bytes)
        policy = plan.policy or error.policy
        parts = (
            f"with a context of {plan.n_ctx} tokens "
            f"({format_size(plan.fixed_bytes)} for dense weights, KV cache and scratch, "
            f"{format_size(plan.total_bytes - plan.fixed_bytes)} for the fewest experts"
        )
        parts += ")" if plan.shared else "; a smaller --ctx needs less)"
        if policy.name != BASELINE:
            with suppress(BudgetError):
                other = replace(self, config=self.config.compared(policy=BASELINE)).least()
                if format_least(other.cap_bytes) != format_least(plan.cap_bytes):
                    parts += f"; --policy {BASELINE} works from {format_least(other.cap_bytes)}"
        return BudgetError(
            f"{self._given(self.room())} is too little: the smallest {option} that works with the "
            f"policy {policy.name} is {format_least(plan.cap_bytes)}, {parts}",
            plan.cap_bytes,
        )

    def _cache_too_large(self, option: str, needed_bytes: int) -> BudgetError:
        """Return the error for --cache-ram, without which the model fits."""
        text = (
            f"--cache-ram {format_size(self.config.cache_ram or 0)} is too much for "
            f"{self._given(self.room()).rstrip(',')}: lower it, leave it out, or "
        )
        if self._asked is None:
            return BudgetError(f"{text}free memory", needed_bytes)
        return BudgetError(f"{text}give {option} {format_least(needed_bytes)}", needed_bytes)


def _cap(there: Machine | Device, asked: int | None) -> int:
    return min(asked, there.memory_bytes) if asked else there.usable_bytes


def least_slots(policy: Policy) -> int:
    """Bytes of the fewest slots with which a policy works."""
    try:
        return deepcopy(policy).plan(0).total_bytes
    except BudgetError as error:
        return error.needed_bytes


def _check_kv(config: Config, model: ExpertModel) -> None:
    """Raises ConfigError where keys and values cannot be stored in blocks of this type."""
    block, needs = BLOCK[KV_TYPES[config.kv]].weights, ""
    for length in (model.hparams.key_length, model.hparams.value_length):
        if length % block and not needs:
            needs = (
                f"heads whose length is a multiple of {block}, and those of this model have "
                f"{length}: leave it out"
            )
    if block > 1 and config.importance == "exact":
        needs = "flash attention, which exact importance does without: leave one of the two out"
    if needs:
        raise ConfigError(f"--kv {config.kv} needs {needs}")
