"""How a model is laid out in memory: plain or managed, which tiers, which slots; how long a context
and how large a micro-batch, where these were not asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gguf_tools.experts import KV_TYPES, ExpertModel
from gguf_tools.file.layout import BLOCK
from gguf_tools.units import format_size
from orchestrator.allocation.slots import FileTier, ModelShape, SlotPlan
from orchestrator.config import Config
from orchestrator.errors import BudgetError, ConfigError
from orchestrator.memory.choice import Choice, choose, make_policy, wants_plain
from orchestrator.memory.footprint import (
    PROMPT_MARKS,
    PROMPT_SHARE,
    SIZES,
    alignment_bytes,
    attention_weights,
    compute_bytes,
    context_tokens,
    copying_bytes,
    device_shape,
    embedding_bytes,
    exchange_bytes,
    kernel_bytes,
    look_ahead_bytes,
    model_shape,
    part_bytes,
    process_bytes,
    step_tokens,
)
from orchestrator.memory.machine import Device, Machine
from orchestrator.memory.shared import CELL_STEP, SharedMemory, longest_context
from orchestrator.policy import BASELINE, DEFAULT, PLAIN, Policy, policy_class
from orchestrator.policy.base import Learns, Wants

# Bytes of scratch for a context of so many tokens and so many at once.
GraphBytes = Callable[[int, int], int | None]
# Tells a policy, before it plans, what is known of the model in these tiers.
Teach = Callable[[Policy, tuple[str, ...]], None]

# The KV cache may take this share of what is left behind the weights that are not experts. The
# expert cache hits about as often with the other fifteen sixteenths, and a step reads the KV cache
# only as far as it is filled.
SHARE = 1 / 16

# Tokens of an answer for each token of its prompt. The medians of conversations in Splitwise
# (ISCA 2024, Figure 3) are 129 and 1,020 tokens.
ANSWER_SHARE = 1 / 8
# How often an expert without a slot is used, relative to the mean of all. Such experts are those
# that were used least; half is on the safe side (docs/experiments/prompts.md, "Micro-batches by
# memory").
ABSENT_USE = 1 / 2


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where everything goes. Sizes in bytes.

    n_ubatch: tokens of a prompt that are computed at once. tiers: the tiers of the file in use,
    best first; skip: experts may be skipped; policy, shape and slots are None in plain mode.
    ram_bytes is the cap over all that the host's memory takes.

    prompt_bytes: of the host's memory, for prompts that were read before; copying_bytes: the part
    of it that copying them takes.

    On a device, dense_bytes, kv_bytes, scratch_bytes and the slots are its memory, capped by
    vram_bytes; host_bytes is then the cache of experts in the host's memory behind it. budget_bytes
    is the cap of the slots where one was asked for, else what they take.
    """

    managed: bool
    reason: str
    n_ctx: int
    n_ubatch: int
    tiers: tuple[FileTier, ...]
    tier_names: tuple[str, ...]
    ram_bytes: int
    dense_bytes: int
    kv_bytes: int
    scratch_bytes: int
    expert_bytes: int
    skip: bool = False
    budget_bytes: int = 0
    policy: Policy | None = None
    shape: ModelShape | None = None
    slots: SlotPlan | None = None
    device: Device | None = None
    vram_bytes: int = 0
    host_bytes: int = 0
    prompt_bytes: int = 0
    copying_bytes: int = 0
    shared: SharedMemory | None = None

    def micro_batch(self, n_cells: int, n_tokens: int) -> int:
        """How many of n_tokens of a prompt behind n_cells of context are read at once."""
        return self.shared.micro_batch(n_cells, n_tokens) if self.shared else self.n_ubatch

    def slots_behind(self, n_cells: int) -> SlotPlan | None:
        """What of the slots an answer has with so much of the context in use."""
        if self.shared is None or self.slots is None:
            return self.slots
        share = min(1.0, self.shared.slots(n_cells, 1) / self.slots.total_bytes)
        groups = (replace(g, n_slots=max(1, int(share * g.n_slots))) for g in self.slots.groups)
        return replace(self.slots, groups=tuple(groups))

    @property
    def total_bytes(self) -> int:
        """The most that the model takes of the memory that its experts live in."""
        experts = self.slots.total_bytes if self.slots else self.expert_bytes
        prompts = 0 if self.device else self.prompt_bytes
        return self.dense_bytes + self.kv_bytes + self.scratch_bytes + prompts + experts

    @property
    def absent_bytes(self) -> int:
        """How far the slots fall short of every expert in the best tier in use; 0 where each
        expert is in memory."""
        whole = self.policy is not None and self.policy.wants.all_resident
        if self.slots is None or self.shape is None or whole:
            return 0
        return max(0, self.shape.all_slot_bytes() - self.slots.total_bytes)

    def started(self, uses: np.ndarray | None = None) -> np.ndarray:
        """The tier in which each expert starts, [n_layers, n_expert], as its place among those in
        use; for a policy that keeps all experts in memory. uses: in the place of what it has
        learned. A copy of the policy is asked."""
        assert self.policy is not None and self.shape is not None
        policy, shape = deepcopy(self.policy), self.shape
        if uses is not None and isinstance(policy, Learns):
            policy.set_hotness(uses)
        found = np.full((shape.n_layers, shape.n_expert), len(shape.tiers) - 1)
        for layer, expert, tier in policy.start():
            found[layer, expert] = tier
        return found


def plan_memory(
    config: Config,
    model: ExpertModel,
    machine: Machine,
    more_scratch: int = 0,
    graph_bytes: GraphBytes | None = None,
    teach: Teach | None = None,
) -> MemoryPlan:
    """Lays the model out in memory: that of the machine's device, where it has one, with the
    host's behind it.

    Without a policy: the plain upstream path where everything fits and nothing asks for less or for
    slots; else the baseline where the high tier fits whole and nothing asks for less, so that there
    is nothing to decide; else the default policy. That is lossless unless less is asked for.

    Where no context was asked for, it is the longest one that costs little, and the least one
    where the policy has no room beside that. Where no micro-batch was asked for, and no cap on
    slots alone, the experts that are absent decide it (read_per_prompt_token).

    more_scratch: bytes that llama.cpp was seen to take beyond the estimate. graph_bytes: scratch
    in the host's memory as llama.cpp counts it for a context of so many tokens and so many at once,
    in the place of an estimate; None where it cannot say. teach: tells the policy what earlier runs
    learned of the model, which plans may go by.

    Raises BudgetError naming the smallest budget that works, PolicyError and ConfigError
    for a policy, tiers, or a precision of keys and values that do not go with the model.
    """
    _check_kv(config, model)
    if config.policy not in (None, PLAIN):
        policy_class(config.policy or "")  # raises for an unknown one
    ways = _Ways(config, model, machine, more_scratch, graph_bytes, teach)
    plain = config.policy == PLAIN
    if config.conversations and not (plain or config.expert_ram or machine.device):
        shared = ways.shared()
        if shared is not None:
            return shared
    smallest = ways.with_context()
    if config.ubatch is not None or config.expert_ram is not None:
        return smallest
    return ways.with_micro_batch(smallest)


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that experts live in, and what else of the model lies there beside a context of
    n_ctx tokens, in bytes. plain: as upstream runs it."""

    n_ctx: int
    plain: bool
    option: str  # that caps it
    free: str  # what it is called without that option
    asked: int | None
    cap: int
    dense: int
    kv: int
    scratch: int
    compute: int  # the part of scratch that graphs take

    @property
    def fixed(self) -> int:
        """All that is not experts, nor prompts that were read before."""
        return self.dense + self.kv + self.scratch

    @property
    def given(self) -> str:
        """The cap that binds, for a message."""
        size = format_size(self.cap)
        return f"{self.option} {size}" if self.asked == self.cap else f"{self.free} {size},"


@dataclass(frozen=True)
class _Ways:
    """The ways to lay one model out. Each policy is made and told what is known once, and `plan`
    changes it. So the plan that is taken is made last."""

    config: Config
    model: ExpertModel
    machine: Machine
    more_scratch: int
    graph_bytes: GraphBytes | None
    teach: Teach | None
    policies: dict[Choice, Policy] = field(default_factory=dict)

    @property
    def ram(self) -> int:
        """The cap on what the host's memory takes."""
        asked, machine = self.config.ram, self.machine
        return min(asked, machine.memory_bytes) if asked else machine.usable_bytes

    def room(self, n_ctx: int, plain: bool | None = None, counted: bool = True) -> Room:
        """Beside a context of this many tokens. plain: whether as upstream runs it; None: as the
        config asks. counted: scratch is what llama.cpp counts, where that is known."""
        config, model, device = self.config, self.model, self.machine.device
        if plain is None:
            plain = wants_plain(config, model)
        tokens = step_tokens(config, n_ctx)
        graph = self.graph_bytes(n_ctx, tokens) if counted and self.graph_bytes else None
        compute = compute_bytes(model, config, n_ctx, graph) + self.more_scratch
        wants = policy_class(config.policy or DEFAULT).wants if not plain else Wants()
        ahead = look_ahead_bytes(model) if wants.asked_in else 0
        dense = model.dense_bytes - (0 if plain else model.lookup_bytes)
        kv = model.kv_bytes(n_ctx, config.kv)
        if device is None:
            scratch = process_bytes(model, config) + compute + ahead
            cap = "--ram", "free memory,", config.ram, self.ram
            return Room(n_ctx, plain, *cap, dense, kv, scratch, compute)
        flash = device.flash and config.importance != "exact"
        if not flash:  # the weights, and the mask in two precisions
            compute += 4 * (attention_weights(model, config, n_ctx) + tokens * n_ctx)
        # Without a cap, ggml's pool makes room for itself where the device is full.
        piles = plain and config.vram is not None
        kernels = kernel_bytes(model, config, n_ctx, flash, piles)
        scratch = compute + kernels + alignment_bytes(model) + ahead
        most = min(config.vram, device.memory_bytes) if config.vram else device.usable_bytes
        cap = "--vram", f"free memory of {device.name},", config.vram, most
        return Room(n_ctx, plain, *cap, dense, kv, scratch, compute)

    def with_context(self) -> MemoryPlan:
        """With the context and the memory for prompts that were asked for, or that cost little;
        with less of these where the policy has no room beside them."""
        config, model = self.config, self.model
        least = context_tokens(model, config)
        small = room = self.room(least)
        if not config.ctx:
            n_ctx = self._affordable_context(small)
            room = small if n_ctx == least else self.room(n_ctx)
        ways = [(room, self._prompt_bytes(room))]
        for each in (room, small):
            asked = (config.cache_ram or 0) + copying_bytes(model, config, each.n_ctx)
            if (each, asked) not in ways:
                ways.append((each, asked))
        for each, prompts in ways[:-1]:
            with suppress(BudgetError):
                return self.plan(each, prompts)
        return self.plan(*ways[-1])

    def shared(self) -> MemoryPlan | None:
        """The plan whose context and scratch take from the slots what they need when they need it;
        None where everything fits, and for a policy that keeps every expert in memory.

        Raises BudgetError for a context that was asked for and is too long, with the longest one.
        """
        config, model = self.config, self.model
        usual = self.room(context_tokens(model, config))
        if self._spare(usual) is not None:
            return None
        room = self.room(max(CELL_STEP, step_tokens(config, usual.n_ctx)), plain=False)
        plan = None
        for prompts in (self._prompt_bytes(usual), config.cache_ram or 0):
            with suppress(BudgetError):
                plan = plan or self.plan(room, prompts)
        if plan is None or plan.policy is None or plan.slots is None:
            return None  # what would be enough is said for the usual context
        if type(plan.policy).wants.all_resident:
            return None
        return self._sharing(plan, plan.policy, plan.slots, room)

    def _sharing(self, plan: MemoryPlan, policy: Policy, slots: SlotPlan, room: Room) -> MemoryPlan:
        config, model = self.config, self.model
        n_each = 1 + config.sequences
        own_length = model.hparams.context_length * n_each
        most = context_tokens(model, replace(config, ctx=config.ctx or own_length or None))
        each = most // n_each if config.ctx else 0
        own = room.cap - room.fixed - plan.prompt_bytes  # of slots, beside an empty context
        copied = copying_bytes(model, config, room.n_ctx)
        least, at_once = config.ubatch or SIZES[0], config.ubatch or SIZES[-1]
        sizes = {least} | {size for size in SIZES if size <= min(at_once, most)}
        shared = SharedMemory(
            own + room.kv + room.compute,
            max(least_slots(policy), sum(group.slot_bytes for group in slots.groups)),
            policy.shape.all_slot_bytes(),
            (room.kv + copied) / room.n_ctx,
            {size: self._scratch(size, most) for size in sorted(sizes)},
            # Values that are transposed grow by a page for each of their dimensions.
            CELL_STEP if config.importance != "exact" else 8 * CELL_STEP,
        )
        longest = shared.longest(most)
        if longest < each:
            raise BudgetError(
                f"--ctx {each} is too long for {room.given.rstrip(',')}: the longest context "
                f"beside the fewest experts of the policy {policy.name} has {longest} tokens",
                room.cap + shared.least_slots - shared.slots(each, least),
            )
        # A larger one may have room for a prompt that is shorter than itself, and none for its own.
        scratch = {n: each for n, each in shared.scratch.items() if n in shared.may_read(n)}
        shared = replace(shared, scratch=scratch)
        return replace(plan, n_ctx=longest, n_ubatch=max(scratch), shared=shared)

    def _scratch(self, n_tokens: int, most: int) -> tuple[int, float]:
        """What graphs take of so many tokens at once, as SharedMemory has it. It is the largest of
        sums that grow evenly with the context, so it is never above the line from the shortest to
        the longest one."""
        with_size = replace(self, config=replace(self.config, ubatch=n_tokens))
        short, long = max(CELL_STEP, n_tokens), max(most, n_tokens + CELL_STEP)
        first, last = (with_size.room(n, plain=False).compute for n in (short, long))
        each = max(0.0, (last - first) / (long - short))
        return int(first - each * short), each

    def _affordable_context(self, least: Room) -> int:
        """The context where none was asked for. Where everything fits beside the least one, it
        still does beside this one; a conversation gets the longest such, since it takes nothing
        until it is used."""
        most = self.model.hparams.context_length * (1 + self.config.sequences)
        at_least = self.room(least.n_ctx, counted=False).fixed
        left, spare = least.cap - (least.fixed - least.kv), self._spare(least)
        allowed = least.kv + (left if spare is None else spare)
        if spare is not None and self.config.conversations and not self.machine.device:
            allowed -= self._prompt_bytes(least)
        else:
            allowed = min(int(left * SHARE), allowed)

        def too_long(n_ctx: int) -> bool:
            return least.kv + self.room(n_ctx, counted=False).fixed - at_least > allowed

        return max(least.n_ctx, longest_context(most, CELL_STEP, too_long))

    def _prompt_bytes(self, room: Room) -> int:
        """What prompts that were read before may take of the host's memory: what was asked for,
        or, for conversations, one more context and some marks, as far as that costs little and
        what fits whole still does; and what copying one to a file takes."""
        config, model = self.config, self.model
        copying = copying_bytes(model, config, room.n_ctx)
        if config.cache_ram is not None:
            return config.cache_ram + copying
        if not config.conversations:
            return copying
        left, spare = room.cap - room.fixed, self._spare(room)
        if self.machine.device:
            left, spare = self.ram - process_bytes(model, config, on_gpu=True), None
        wanted = room.kv + PROMPT_MARKS * part_bytes(model, config)
        most = (left if spare is None else spare) - copying
        return copying + max(0, min(wanted, int(left * PROMPT_SHARE), most))

    def _spare(self, room: Room) -> int | None:
        """How many more bytes may be taken without turning a model that fits whole into a managed
        one; None where it does not fit whole."""
        spare = room.cap - room.fixed - self.model.tier_bytes[0]
        return spare if room.plain and spare >= 0 else None

    def with_micro_batch(self, smallest: MemoryPlan) -> MemoryPlan:
        """The plan with which least is read: of `smallest`, whose micro-batch is the smallest, and
        of those with larger ones, as far as memory and context have room.

        A micro-batch of hundreds of tokens uses nearly every expert, so it reads each one that has
        no slot, once. Larger ones are fewer; their scratch takes slots from experts. It grows
        evenly with the micro-batch, so that the bytes that are read fall at first, then rise:
        beyond the best one, each next size costs more in slots than it saves in passes. Where
        nothing is absent no larger one is tried.
        """
        used_share = self.model.n_expert_used / self.model.n_expert
        n_ctx, prompts = smallest.n_ctx, smallest.prompt_bytes

        def read(plan: MemoryPlan) -> float:
            return read_per_prompt_token(plan.n_ubatch, plan.absent_bytes, used_share)

        best, least = self, read(smallest)
        if not least:
            return smallest
        for n_tokens in SIZES[1:]:
            if n_tokens > n_ctx:
                break
            larger = replace(self, config=replace(self.config, ubatch=n_tokens))
            try:
                found = read(larger.plan(larger.room(n_ctx), prompts))
            except BudgetError:
                break
            if found >= least:
                break
            best, least = larger, found
        return best.plan(best.room(n_ctx), prompts)

    def plan(self, room: Room, prompts: int) -> MemoryPlan:
        """The plan in such a room, with so many bytes for prompts."""
        config, tier_bytes, device = self.config, self.model.tier_bytes, self.machine.device
        beside = 0 if device else prompts
        if room.plain:
            needed = room.fixed + beside + tier_bytes[0]
            fits = needed <= room.cap
            if not fits and config.policy == PLAIN and room.asked:
                raise BudgetError(
                    f"{room.given} is too little for the policy plain, which keeps everything "
                    f"in memory: it needs at least {format_size(needed, up=True)}; the "
                    f"other policies keep experts on disk",
                    needed,
                )
            if fits or config.policy == PLAIN:
                amounts = f"{format_size(needed)} of {format_size(room.cap)}"
                reason = f"everything fits ({amounts})" if fits else f"asked for ({amounts})"
                return self._plan(room, prompts, (FileTier(0),), managed=False, reason=reason)
            room = self.room(room.n_ctx, plain=False)

        rest = room.cap - room.fixed - beside
        budget = config.expert_ram or rest
        if room.asked:
            budget = min(budget, rest)
        choice = choose(config, self.model, self._shape, budget)
        if choice not in self.policies:
            self.policies[choice] = made = make_policy(config, choice, self._shape(choice.tiers))
            if self.teach is not None:
                self.teach(made, made.shape.tiers)
        policy = self.policies[choice]
        try:
            slots = policy.plan(max(0, budget))
        except BudgetError as error:
            raise self._too_small(policy, error.needed_bytes, room, beside) from None
        return self._plan(
            room,
            prompts,
            choice.tiers,
            managed=True,
            reason=policy.describe(),
            skip=choice.skip,
            budget_bytes=budget if config.expert_ram or room.asked else slots.total_bytes,
            policy=policy,
            shape=policy.shape,
            slots=slots,
            host_bytes=self._host_bytes(choice.tiers, slots, room, prompts) if device else 0,
        )

    def _plan(
        self, room: Room, prompts: int, tiers: tuple[FileTier, ...], **managed: Any
    ) -> MemoryPlan:
        config, model, device = self.config, self.model, self.machine.device
        return MemoryPlan(
            n_ctx=room.n_ctx,
            n_ubatch=step_tokens(config, room.n_ctx),
            tiers=tiers,
            tier_names=tuple(model.tiers[tier].name for tier in tiers),
            ram_bytes=self.ram,
            dense_bytes=room.dense,
            kv_bytes=room.kv,
            scratch_bytes=room.scratch,
            expert_bytes=sum(model.tier_bytes[tier] for tier in tiers),
            device=device,
            vram_bytes=room.cap if device else 0,
            prompt_bytes=prompts,
            copying_bytes=copying_bytes(model, config, room.n_ctx),
            **managed,
        )

    def _shape(self, tiers: tuple[FileTier, ...]) -> ModelShape:
        of = device_shape if self.machine.device else model_shape
        return of(self.model, tiers)

    def _host_bytes(self, tiers: tuple[int, ...], slots: SlotPlan, room: Room, prompts: int) -> int:
        """The cache of experts in the host's memory behind a device, beside slots there: what is
        left, as far as there are experts. Raises BudgetError where not even reads in flight find
        room."""
        config, model, near = self.config, self.model, slots.host_bytes
        if near:
            groups = slots.groups
            staged = {tier for (*_, tier), at in slots.group_of.items() if not groups[at].on_host}
            tiers = tuple(tiers[tier] for tier in sorted(staged))
            near += exchange_bytes(model, step_tokens(config, room.n_ctx))
        fixed = process_bytes(model, config, on_gpu=True) + embedding_bytes(model) + near
        sizes = {
            size
            for layer in model_shape(model, tiers).slots
            for kinds in layer
            for size in kinds.values()
        }
        # every size has slots of its own, two at least
        in_flight = max(2 * config.io_threads * max(sizes), 2 * sum(sizes))
        ram = self.ram - prompts
        if ram - fixed < in_flight:
            needed = fixed + in_flight
            raise BudgetError(
                f"--ram {format_size(ram)} is too little beside a GPU: the smallest that works is "
                f"{format_size(needed, up=True)}",
                needed,
            )
        every = sum(model_shape(model, (tier,)).all_slot_bytes() for tier in tiers)
        return min(ram - fixed, every + in_flight)

    def _too_small(self, policy: Policy, slots: int, room: Room, beside: int) -> BudgetError:
        """slots: what the policy needs at least, beside the room and so many bytes for prompts."""
        expert_ram = self.config.expert_ram
        by_slots = expert_ram is not None and (room.asked is None or expert_ram < slots)
        other = ""
        if policy.name != BASELINE:
            least = least_slots(policy_class(BASELINE)(policy.shape))
            if least < slots:
                # The baseline takes no token importance.
                usual = replace(self, config=self.config.compared(policy=BASELINE))
                fixed = usual.room(room.n_ctx, plain=False).fixed + beside
                from_bytes = least if by_slots else fixed + least
                other = f"; --policy {BASELINE} works from {format_size(from_bytes, up=True)}"
        if expert_ram is not None and by_slots:
            return BudgetError(
                f"--expert-ram {format_size(expert_ram)} is too small: the smallest that works "
                f"with the policy {policy.name} is {format_size(slots, up=True)}{other}",
                slots,
            )
        fixed = room.fixed + beside
        needed = fixed + slots
        return BudgetError(
            f"{room.given} is too little: the smallest {room.option} that works with the policy "
            f"{policy.name} is {format_size(needed, up=True)} ({format_size(fixed)} for dense "
            f"weights, KV cache and scratch, {format_size(slots)} for the fewest experts; a "
            f"smaller --ctx needs less){other}",
            needed,
        )


def read_per_prompt_token(n_tokens: int, absent_bytes: int, used_share: float) -> float:
    """Bytes that are read for one token of a prompt and for the answer tokens that come with it:

        A / u + a * c * A * k / n

    A = absent_bytes: experts without a slot, which are fewer where less is scratch. u = n_tokens of
    a micro-batch, which reads all of A. a = ANSWER_SHARE: tokens of an answer for one of the
    prompt. A token of an answer uses k / n = used_share of the experts, and c = ABSENT_USE says how
    often those without a slot.
    """
    return absent_bytes * (1 / n_tokens + ANSWER_SHARE * ABSENT_USE * used_share)


def least_slots(policy: Policy) -> int:
    """Bytes of the fewest slots with which a policy works."""
    try:
        return deepcopy(policy).plan(0).total_bytes
    except BudgetError as error:
        return error.needed_bytes


def _check_kv(config: Config, model: ExpertModel) -> None:
    """Raises ConfigError where keys and values cannot be stored in blocks of this type."""
    block = BLOCK[KV_TYPES[config.kv]].weights
    if block == 1:
        return
    if config.importance == "exact":
        raise ConfigError(
            f"--kv {config.kv} needs flash attention, which exact importance does without: leave "
            f"one of the two out"
        )
    for length in (model.hparams.key_length, model.hparams.value_length):
        if length % block:
            raise ConfigError(
                f"--kv {config.kv} needs heads whose length is a multiple of {block}, and those of "
                f"this model have {length}: leave it out"
            )
