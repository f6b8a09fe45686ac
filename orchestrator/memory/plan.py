"""How a model is laid out in memory: plain or managed, which tiers, which slots."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from gguf_tools.experts import KV_TYPES, ExpertModel
from gguf_tools.file.layout import BLOCK
from gguf_tools.units import format_size
from orchestrator.allocation.slots import FileTier, ModelShape, SlotPlan
from orchestrator.config import Config
from orchestrator.errors import BudgetError, ConfigError
from orchestrator.memory.choice import choose, make_policy, wants_plain
from orchestrator.memory.context_length import longest_affordable
from orchestrator.memory.footprint import (
    context_tokens,
    copying_bytes,
    device_shape,
    exchange_bytes,
    model_shape,
    process_bytes,
    prompt_bytes,
    step_tokens,
)
from orchestrator.memory.hardware import Device, Machine
from orchestrator.memory.micro_batch import SIZES, best_plan
from orchestrator.memory.room import Graph, Room, host_bytes, room_of
from orchestrator.policy import BASELINE, PLAIN, Policy, policy_class

# Bytes of scratch for a context of so many tokens and so many at once.
GraphBytes = Callable[[int, int], int | None]
# Tells a policy, before it plans, what is known of the model in these tiers.
Teach = Callable[[Policy, tuple[str, ...]], None]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where everything goes. Sizes in bytes.

    n_ubatch: tokens of a prompt that are computed at once. tiers: the tiers of the file in use,
    best first; skip: experts may be skipped; policy, shape and slots are None in plain mode.
    ram_bytes is the cap over all that the host's memory takes.

    prompt_bytes: of the host's memory, for prompts that were read before; copying_bytes: the part
    of it that copying them takes.

    On a device, dense_bytes, kv_bytes, scratch_bytes and the slots are its memory, capped by
    vram_bytes; host_bytes is then the cache of experts in the host's memory behind it, and
    llama_bytes what llama.cpp counts of the device's: weights, cache and scratch of its graphs.
    budget_bytes is the cap of the slots.
    """

    managed: bool
    reason: str
    n_ctx: int
    n_ubatch: int
    tiers: tuple[FileTier, ...]
    skip: bool
    tier_names: tuple[str, ...]
    ram_bytes: int
    dense_bytes: int
    kv_bytes: int
    scratch_bytes: int
    expert_bytes: int
    budget_bytes: int
    policy: Policy | None
    shape: ModelShape | None
    slots: SlotPlan | None
    device: Device | None = None
    vram_bytes: int = 0
    host_bytes: int = 0
    llama_bytes: int = 0
    prompt_bytes: int = 0
    copying_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The most that the model takes of the memory that its experts live in."""
        experts = self.slots.total_bytes if self.slots else self.expert_bytes
        prompts = 0 if self.device else self.prompt_bytes
        return self.dense_bytes + self.kv_bytes + self.scratch_bytes + prompts + experts

    @property
    def absent_bytes(self) -> int:
        """Experts in the best tier in use that have no slot; 0 where each is in memory."""
        whole = self.policy is not None and self.policy.wants.all_resident
        if self.slots is None or self.shape is None or whole:
            return 0
        return max(0, self.shape.all_slot_bytes() - self.slots.total_bytes)


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

    Without a policy: the plain upstream path where everything fits and neither a low tier
    nor expert slots are asked for; else the baseline where the high tier fits whole, so that
    there is nothing to decide; else the default policy. That is lossless unless less is asked for.

    Where no context was asked for, it is the longest one that costs little, and the least one
    where the policy has no room beside that. Where no micro-batch was asked for, and no cap on
    slots alone, the experts that are absent decide it (orchestrator.memory.micro_batch).

    more_scratch: bytes that llama.cpp was seen to take beyond the estimate. graph_bytes: scratch
    in the host's memory as llama.cpp counts it for a context of so many tokens and so many at once,
    in the place of an estimate; None where it cannot say. teach: tells the policy what earlier runs
    learned of the model, which plans may go by.

    Raises BudgetError naming the smallest budget that works, PolicyError and ConfigError
    for a policy or tiers that do not go with the model.
    """
    _check_kv(config, model)
    if config.policy not in (None, PLAIN):
        policy_class(config.policy or "")  # raises for an unknown one

    def graph(n_ctx: int, n_ubatch: int) -> Graph:
        return more_scratch, graph_bytes(n_ctx, n_ubatch) if graph_bytes else None

    def with_micro_batch(n_ubatch: int) -> MemoryPlan | None:
        """As `smallest`, and nothing else of it changes."""
        if n_ubatch > smallest.n_ctx:
            return None
        changed = replace(config, ubatch=n_ubatch)
        scratch, n_ctx = graph(smallest.n_ctx, n_ubatch), smallest.n_ctx
        try:
            kept = smallest.prompt_bytes
            return _plan_memory(changed, model, machine, scratch, n_ctx, kept, teach)
        except BudgetError:
            return None

    asked_for = config.ubatch is not None or config.expert_ram is not None
    config = replace(config, ubatch=config.ubatch or SIZES[0])
    smallest = _plan_with_context(config, model, machine, graph, teach)
    if asked_for:
        return smallest
    return best_plan(smallest, with_micro_batch, model.n_expert_used / model.n_expert)


def _plan_with_context(
    config: Config,
    model: ExpertModel,
    machine: Machine,
    graph: Callable[[int, int], Graph],
    teach: Teach | None,
) -> MemoryPlan:
    """The plan of a config that says its micro-batch."""
    least = context_tokens(model, config)

    def scratch(n_ctx: int) -> Graph:
        return graph(n_ctx, step_tokens(config, n_ctx))

    n_ctx = least if config.ctx else _affordable_context(config, model, machine, scratch(least))
    prompts = _prompt_bytes(config, model, machine, scratch(n_ctx), n_ctx)
    asked = config.cache_ram or 0
    fewer = ((each, asked + copying_bytes(model, config, each)) for each in (n_ctx, least))
    *wanted, last = dict.fromkeys([(n_ctx, prompts), *fewer])
    for length, kept in wanted:
        with suppress(BudgetError):
            return _plan_memory(config, model, machine, scratch(length), length, kept, teach)
    length, kept = last
    return _plan_memory(config, model, machine, scratch(length), length, kept, teach)


def _check_kv(config: Config, model: ExpertModel) -> None:
    """Raises ConfigError for keys and values in blocks that cannot be."""
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


def _prompt_bytes(
    config: Config, model: ExpertModel, machine: Machine, graph: Graph, n_ctx: int
) -> int:
    """The memory for prompts beside a context of this many tokens. What fits whole without them
    still does."""
    plain = wants_plain(config, model)
    room = room_of(config, model, machine, n_ctx, _ram_cap(config, machine), graph, plain)
    left = room.cap - room.fixed
    if machine.device:
        left = spare = _ram_cap(config, machine) - process_bytes(model, config, on_gpu=True)
    else:
        spare = left - model.tier_bytes[0]
    if not plain or spare < 0:
        spare = left
    return prompt_bytes(model, config, n_ctx, left, spare)


def _affordable_context(config: Config, model: ExpertModel, machine: Machine, graph: Graph) -> int:
    """The context where none was asked for. Where everything fits beside the least one, it still
    does beside this one."""
    ram = _ram_cap(config, machine)
    plain = wants_plain(config, model)
    least = context_tokens(model, config)
    most = model.hparams.context_length * (1 + config.sequences)

    def estimated(n_ctx: int) -> int:
        return room_of(config, model, machine, n_ctx, ram, (graph[0], None), plain).fixed

    room, at_least = room_of(config, model, machine, least, ram, graph, plain), estimated(least)
    other = room.fixed - room.kv
    left = room.cap - other
    spare = left - room.kv - model.tier_bytes[0]
    if not plain or spare < 0:
        spare = left
    return longest_affordable(least, most, lambda n: room.kv + estimated(n) - at_least, left, spare)


def _ram_cap(config: Config, machine: Machine) -> int:
    return min(config.ram, machine.memory_bytes) if config.ram else machine.usable_bytes


def _plan_memory(
    config: Config,
    model: ExpertModel,
    machine: Machine,
    graph: Graph,
    n_ctx: int,
    prompts: int,
    teach: Teach | None,
) -> MemoryPlan:
    """As plan_memory, with a context of this many tokens, and so many bytes for prompts."""
    device = machine.device
    ram = _ram_cap(config, machine)
    plain = wants_plain(config, model)
    room = room_of(config, model, machine, n_ctx, ram, graph, plain, prompts)
    rest = room.cap - room.fixed

    def shape_of(tiers: tuple[FileTier, ...]) -> ModelShape:
        return device_shape(model, tiers) if device else model_shape(model, tiers)

    def plan(
        managed: bool, reason: str, tiers: tuple[FileTier, ...], skip: bool = False, **fields: Any
    ) -> MemoryPlan:
        return MemoryPlan(
            managed=managed,
            reason=reason,
            n_ctx=n_ctx,
            n_ubatch=step_tokens(config, n_ctx),
            tiers=tiers,
            skip=skip,
            tier_names=tuple(model.tiers[tier].name for tier in tiers),
            ram_bytes=ram,
            dense_bytes=room.dense,
            kv_bytes=room.kv,
            scratch_bytes=room.scratch,
            expert_bytes=sum(model.tier_bytes[tier] for tier in tiers),
            device=device,
            vram_bytes=room.cap if device else 0,
            llama_bytes=room.dense + room.kv + room.compute,
            prompt_bytes=prompts,
            copying_bytes=copying_bytes(model, config, n_ctx),
            **fields,
        )

    if plain:
        needed = room.fixed + model.tier_bytes[0]
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
            return plan(
                False, reason, (FileTier(0),), budget_bytes=0, policy=None, shape=None, slots=None
            )
        room = room_of(config, model, machine, n_ctx, ram, graph, prompts=prompts)
        rest = room.cap - room.fixed

    budget = (
        min(config.expert_ram, rest)
        if config.expert_ram and room.asked
        else (config.expert_ram or rest)
    )
    choice = choose(config, model, shape_of, budget)
    shape = shape_of(choice.tiers)
    policy = make_policy(config, choice, shape)
    if teach is not None:
        teach(policy, shape.tiers)
    try:
        slots = policy.plan(max(0, budget))
    except BudgetError as error:
        # The baseline takes no token importance.
        usual = config.compared(policy=BASELINE)
        fixed = room_of(usual, model, machine, n_ctx, ram, graph, prompts=prompts).fixed
        raise _too_small(config, policy.name, shape, error.needed_bytes, room, fixed) from None
    asked = config.expert_ram or room.asked
    return plan(
        True,
        policy.describe(),
        choice.tiers,
        choice.skip,
        budget_bytes=budget if asked else slots.total_bytes,
        policy=policy,
        shape=shape,
        slots=slots,
        host_bytes=_cache_bytes(config, model, choice.tiers, ram - prompts, slots, n_ctx)
        if device
        else 0,
    )


def _cache_bytes(
    config: Config,
    model: ExpertModel,
    tiers: tuple[int, ...],
    ram: int,
    slots: SlotPlan,
    n_ctx: int,
) -> int:
    """The cache of experts behind a device, beside slots in the host's memory, if there are."""
    near = slots.host_bytes
    if near:
        staged = sorted(
            {tier for (_, _, tier), at in slots.group_of.items() if not slots.groups[at].on_host}
        )
        tiers = tuple(tiers[tier] for tier in staged)
        near += exchange_bytes(model, step_tokens(config, n_ctx))
    return host_bytes(config, model, tiers, ram, near)


def _too_small(
    config: Config, name: str, shape: ModelShape, slots: int, room: Room, usual_fixed: int
) -> BudgetError:
    """slots: what the named policy needs at least. usual_fixed: bytes beside the slots with the
    baseline."""
    expert_ram = config.expert_ram
    by_slots = expert_ram is not None and (room.asked is None or expert_ram < slots)
    other = ""
    if name != BASELINE:
        least = _least_slots(policy_class(BASELINE), shape)
        if least < slots:
            from_bytes = least if by_slots else usual_fixed + least
            other = f"; --policy {BASELINE} works from {format_size(from_bytes, up=True)}"
    if expert_ram is not None and by_slots:
        return BudgetError(
            f"--expert-ram {format_size(expert_ram)} is too small: the smallest that works "
            f"with the policy {name} is {format_size(slots, up=True)}{other}",
            slots,
        )
    needed = room.fixed + slots
    return BudgetError(
        f"{room.given} is too little: the smallest {room.option} that works with the policy "
        f"{name} is {format_size(needed, up=True)} ({format_size(room.fixed)} for dense "
        f"weights, KV cache and scratch, {format_size(slots)} for the fewest experts; a smaller "
        f"--ctx needs less){other}",
        needed,
    )


def _least_slots(policy: type[Policy], shape: ModelShape) -> int:
    try:
        return policy(shape).plan(0).total_bytes
    except BudgetError as error:
        return error.needed_bytes
