"""How a model is laid out in memory: plain or managed, which tiers, which slots."""

from __future__ import annotations

from dataclasses import dataclass

from gguf_tools.experts import ExpertModel
from gguf_tools.units import format_size
from orchestrator.choice import LRU, PLAIN, choose, policy_settings, prefetch_mode, wants_plain
from orchestrator.config import Config
from orchestrator.errors import BudgetError, ConfigError, PolicyError
from orchestrator.footprint import context_tokens, model_shape, scratch_bytes
from orchestrator.hardware import Machine
from orchestrator.native import Slices, StoreSpec
from orchestrator.policy import Policy, PolicySettings, known_policies, make_policy
from orchestrator.policy.base import ModelShape, SlotPlan


@dataclass(frozen=True, slots=True)
class Plan:
    """Where everything goes. Sizes in bytes.

    tiers: the file's tier indices in use, best first; policy, shape and slots are None in
    plain mode. ram_bytes is the cap over all of it; budget_bytes that of the slots.
    """

    managed: bool
    reason: str
    n_ctx: int
    tiers: tuple[int, ...]
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

    @property
    def total_bytes(self) -> int:
        """The most that the model takes."""
        experts = self.slots.total_bytes if self.slots else self.expert_bytes
        return self.dense_bytes + self.kv_bytes + self.scratch_bytes + experts


def make_plan(config: Config, model: ExpertModel, machine: Machine) -> Plan:
    """Lays the model out in memory.

    Without a policy: the plain upstream path where everything fits and neither a low tier
    nor expert slots are asked for; else lru where the high tier fits whole, so that there is
    nothing to decide; else dymoe. That is lossless where the file has one tier and none is
    skipped: the default retention is 1 there.

    Raises BudgetError naming the smallest budget that works, PolicyError and ConfigError
    for a policy or tiers that do not go with the model.
    """
    if config.policy is not None and config.policy not in known_policies():
        raise PolicyError(f"unknown policy '{config.policy}'; known: {', '.join(known_policies())}")
    ram = min(config.ram, machine.memory_bytes) if config.ram else machine.usable_bytes
    n_ctx = context_tokens(model, config)
    dense, kv = model.dense_bytes, model.kv_bytes(n_ctx)
    scratch = scratch_bytes(model, config)
    rest = ram - dense - kv - scratch

    if wants_plain(config, model):
        needed = dense + kv + scratch + model.tier_bytes[0]
        fits = needed <= ram
        if not fits and config.policy == PLAIN and config.ram:
            raise BudgetError(
                f"{_given(config, ram)} is too little for the policy plain, which keeps everything "
                f"in memory: it needs {needed} bytes ({format_size(needed)}); the other policies "
                f"keep experts on disk",
                needed,
            )
        if fits or config.policy == PLAIN:
            amounts = f"{format_size(needed)} of {format_size(ram)}"
            reason = f"everything fits ({amounts})" if fits else f"asked for ({amounts})"
            return Plan(
                managed=False,
                reason=reason,
                n_ctx=n_ctx,
                tiers=(0,),
                tier_names=(model.tiers[0].name,),
                ram_bytes=ram,
                dense_bytes=dense,
                kv_bytes=kv,
                scratch_bytes=scratch,
                expert_bytes=model.tier_bytes[0],
                budget_bytes=0,
                policy=None,
                shape=None,
                slots=None,
            )

    budget = (
        min(config.expert_ram, rest)
        if config.expert_ram and config.ram
        else (config.expert_ram or rest)
    )
    name, tiers = choose(config, model, budget)
    shape = model_shape(model, tiers)
    policy = make_policy(name, shape, policy_settings(config, tiers))
    try:
        slots = policy.plan(max(0, budget))
    except BudgetError as error:
        fixed = dense + kv + scratch
        raise _too_small(config, name, shape, error.needed_bytes, fixed, ram) from None
    asked = config.expert_ram or config.ram
    return Plan(
        managed=True,
        reason=policy.describe(),
        n_ctx=n_ctx,
        tiers=tiers,
        tier_names=shape.tiers,
        ram_bytes=ram,
        dense_bytes=dense,
        kv_bytes=kv,
        scratch_bytes=scratch,
        expert_bytes=sum(model.tier_bytes[tier] for tier in tiers),
        budget_bytes=budget if asked else slots.total_bytes,
        policy=policy,
        shape=shape,
        slots=slots,
    )


def _given(config: Config, ram: int) -> str:
    """The cap that binds, for a message."""
    what = "--ram" if config.ram == ram else "free memory,"
    return f"{what} {format_size(ram)}"


def _too_small(
    config: Config, name: str, shape: ModelShape, slots: int, fixed: int, ram: int
) -> BudgetError:
    """slots: what the named policy needs at least; fixed: everything else."""
    expert_ram = config.expert_ram
    by_slots = expert_ram is not None and (config.ram is None or expert_ram < slots)
    other = ""
    if name != LRU:
        least = _least_slots(LRU, shape)
        if least < slots:
            other = f"; --policy lru works from {least if by_slots else fixed + least} bytes"
    if expert_ram is not None and by_slots:
        return BudgetError(
            f"--expert-ram {format_size(expert_ram)} is too small: the smallest that works "
            f"with the policy {name} is {slots} bytes ({format_size(slots)}){other}",
            slots,
        )
    needed = fixed + slots
    return BudgetError(
        f"{_given(config, ram)} is too little: the smallest --ram that works with the policy "
        f"{name} is {needed} bytes ({format_size(needed)}: {format_size(fixed)} for dense weights, "
        f"KV cache and scratch, {format_size(slots)} for the fewest experts; a smaller --ctx needs "
        f"less){other}",
        needed,
    )


def _least_slots(name: str, shape: ModelShape) -> int:
    try:
        return make_policy(name, shape, PolicySettings()).plan(0).total_bytes
    except BudgetError as error:
        return error.needed_bytes


def store_spec(config: Config, model: ExpertModel, plan: Plan) -> StoreSpec:
    """The native store's layout: the plan's tiers renumbered from 0."""
    if plan.slots is None:
        raise ConfigError("the plain path has no store")
    layers = []
    for layer, (il, kinds) in enumerate(zip(model.layer_ids, model.slices, strict=True)):
        slices = {}
        for kind, by_tier in enumerate(kinds):
            for tier, file_tier in enumerate(plan.tiers):
                each = by_tier[file_tier]
                if each is not None:
                    group = plan.slots.group_of[layer, kind, tier]
                    slices[kind, tier] = Slices(
                        each.file_index, each.offset, each.expert_bytes, int(each.type), group
                    )
        layers.append((il, slices))
    prefetches = (
        plan.policy is not None and plan.policy.needs_callback and prefetch_mode(config) != "off"
    )
    return StoreSpec(
        files=tuple(model.files),
        layers=tuple(layers),
        groups=tuple((group.slot_bytes, group.n_slots) for group in plan.slots.groups),
        budget_bytes=plan.budget_bytes,
        n_tiers=len(plan.tiers),
        n_expert=model.n_expert,
        n_expert_used=model.n_expert_used,
        max_tokens=min(config.n_ubatch, plan.n_ctx),
        n_ahead=config.n_ahead if prefetches else 0,
        n_io_threads=config.io_threads,
        direct_io=config.direct_io,
        n_passing=tuple(group.n_passing for group in plan.slots.groups),
        importance_window=importance_window(config, plan),
        exact_tiers=config.exact_tiers and plan.policy is not None and plan.policy.needs_callback,
    )


def importance_window(config: Config, plan: Plan) -> int:
    """Queries whose attention makes a prompt's token scores: 0 none, -1 all."""
    if plan.policy is None or not plan.policy.needs_importance:
        return 0
    return {"window": config.importance_window, "exact": -1, "load": 0}[config.importance]
