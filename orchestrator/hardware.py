"""What this machine has, and how a model is laid out in it: plain or managed, which
tiers, which slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from gguf_tools.experts import ExpertModel, Tier
from gguf_tools.layout import DOWN, slot_bytes
from gguf_tools.units import format_size
from orchestrator.config import Config
from orchestrator.errors import BudgetError, ConfigError, PolicyError
from orchestrator.policy import Policy, PolicySettings, known_policies, make_policy
from orchestrator.policy.base import ModelShape, SlotPlan
from orchestrator.policy.versions import resident_plan

PLAIN, LRU, DYMOE, DYNAEXQ = "plain", "lru", "dymoe", "dynaexq"
SKIP_TIER = "skip"
USUAL_HIGH = "q4_k"
USUAL_RETENTION = 0.75

# Everything that is neither weights nor KV nor growing with the batch: the interpreter,
# numpy, the libraries, thread stacks, tables; and, for each token of the vocabulary, its
# copies in Python and in llama.cpp. Measured: 50 MiB and 240 bytes without merges.
PROCESS_BYTES = 96 * 2**20
VOCAB_TOKEN_BYTES = 600
_HEADROOM_SHARE = 0.1
_HEADROOM_BYTES = (256 * 2**20, 2 * 2**30)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a probe found. memory_bytes is free memory, or what is left under a cgroup's
    limit where that is less."""

    memory_bytes: int

    @property
    def usable_bytes(self) -> int:
        """Free memory less a headroom for everything else that runs."""
        low, high = _HEADROOM_BYTES
        headroom = min(max(int(self.memory_bytes * _HEADROOM_SHARE), low), high)
        return max(0, self.memory_bytes - headroom)


def probe() -> Machine:
    """Reads this machine."""
    free = psutil.virtual_memory().available
    for limit, used in _cgroup_limits():
        free = min(free, max(0, limit - used))
    return Machine(free)


def _cgroup_limits(
    root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")
) -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be dropped) of every memory cgroup around this
    process; version 1 and 2."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        elif controllers == "":
            base, names = root, ("memory.max", "memory.current")
        else:
            continue
        folder = base / path.lstrip("/")
        while folder == base or base in folder.parents:
            found = _read_limit(folder, *names)
            if found is not None:
                limits.append(found)
            folder = folder.parent
    return limits


def _read_limit(folder: Path, limit_name: str, usage_name: str) -> tuple[int, int] | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        used = int((folder / usage_name).read_text())
        stat = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    if not limit.isdigit() or int(limit) >= 2**60:
        return None
    counters = dict(line.split(maxsplit=1) for line in stat if " " in line)
    prefix = "total_" if "total_inactive_file" in counters else ""
    droppable = sum(int(counters.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
    return int(limit), max(0, used - droppable)


def context_tokens(model: ExpertModel, config: Config) -> int:
    """The context to make: what was asked for, as far as the model was trained for it."""
    return min(config.ctx, model.context_length) if model.context_length else config.ctx


def vocabulary_size(model: ExpertModel) -> int:
    """Tokens that the model's vocabulary lists."""
    return len(model.metadata.get("tokenizer.ggml.tokens", ()))


def compute_bytes(model: ExpertModel, config: Config, n_ctx: int) -> int:
    """Scratch that llama.cpp needs to compute one batch of n_ubatch tokens: an upper estimate.

    Per token, in float32: the attention mask over the context, in two precisions; the
    residual stream; the larger of attention's rows and the two sets of rows of the k experts
    that live at once, and their quantized copies; and the logits of tokens with an output.
    """
    tokens = min(config.n_ubatch, n_ctx)
    n_ff = max(shape[0] for layer in model.shapes if (shape := layer[DOWN]) is not None)
    heads = max(model.n_head) + 2 * max(model.n_head_kv)
    attention = 3 * heads * max(model.key_length, model.value_length)
    experts = model.n_expert_used * (n_ff + model.embedding_length)
    floats = 1.5 * n_ctx + 4 * model.embedding_length + max(attention, 2 * experts) + 0.5 * experts
    outputs = max(tokens if config.logits_all else 1, 1 + config.sequences)
    # the attention weights of the queries that token importance is taken from
    queries = {"window": min(config.importance_window, tokens), "exact": 2 * tokens, "load": 0}
    weights = queries[config.importance] * n_ctx * max(model.n_head)
    return 4 * (int(tokens * floats) + 2 * outputs * vocabulary_size(model) + weights)


def scratch_bytes(model: ExpertModel, config: Config) -> int:
    """All that a model takes beside its weights and its KV cache, as the planner counts it."""
    return (
        PROCESS_BYTES
        + VOCAB_TOKEN_BYTES * vocabulary_size(model)
        + compute_bytes(model, config, context_tokens(model, config))
    )


class Placed(Protocol):
    """Where the experts of one (layer, kind, tier) lie: gguf_tools.experts.Slice."""

    @property
    def offset(self) -> int: ...
    @property
    def expert_bytes(self) -> int: ...


class Experts(Protocol):
    """What ExpertModel and a recorded trace both know of a model."""

    @property
    def n_expert(self) -> int: ...
    @property
    def n_expert_used(self) -> int: ...
    @property
    def tiers(self) -> Sequence[Tier]: ...
    @property
    def slices(self) -> Sequence[Sequence[Sequence[Placed | None]]]: ...


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


def model_shape(model: Experts, tiers: tuple[int, ...]) -> ModelShape:
    """The model as policies see it, reduced to some of its tiers."""
    slots = []
    for layer in model.slices:
        by_tier = []
        for tier in tiers:
            sizes = {}
            for kind, slices in enumerate(layer):
                each = slices[tier]
                if each is not None:
                    sizes[kind] = slot_bytes(each.offset, each.expert_bytes, model.n_expert)
            by_tier.append(sizes)
        slots.append(tuple(by_tier))
    names = tuple(model.tiers[tier].name for tier in tiers)
    return ModelShape(model.n_expert, model.n_expert_used, names, tuple(slots))


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

    if _wants_plain(config, model):
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
    name, tiers = _choose(config, model, budget)
    shape = model_shape(model, tiers)
    settings = PolicySettings(
        retention=_retention(config, tiers),
        skip_low=config.low_tier == SKIP_TIER,
        prefetch=prefetch_mode(config),
        renormalize=config.renormalize,
        schedule=config.schedule,
        heavy_hitters=config.heavy_hitters,
        prompts_pass=config.prompts_pass,
        exact=config.exact_tiers,
        update_steps=config.update_steps,
        hotness_decay=config.hotness_decay,
        hysteresis=config.hysteresis,
        rank_slack=config.rank_slack,
        hot_experts=config.hot_experts,
    )
    policy = make_policy(name, shape, settings)
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


# Why a policy has no use for which options.
_UNUSED: dict[str | None, tuple[str, tuple[str, ...]]] = {
    PLAIN: ("runs the best precision alone", ("low", "low_tier", "retention")),
    LRU: ("runs one precision", ("low", "low_tier", "retention")),
    DYNAEXQ: ("fills the budget with high copies", ("retention",)),
}


def prefetch_mode(config: Config) -> str:
    """ "auto", "on" or "off": what was asked for, as far as there is a look-ahead and what is
    computed may depend on what is in memory."""
    return config.prefetch if config.n_ahead and not config.exact_tiers else "off"


def check_unused(config: Config) -> None:
    """Raises ConfigError for an option that the policy asked for has no use for.

    For what a command line asks for at once: a policy that is changed later, to compare, just
    leaves such options alone.
    """
    if config.policy != DYNAEXQ and config.profile is not None:
        raise ConfigError("--profile is for --policy dynaexq: leave it out, or ask for that policy")
    if config.renormalize and config.low_tier != SKIP_TIER:
        raise ConfigError("--renormalize is for --low-tier skip: leave it out, or ask for that")
    if config.policy not in _UNUSED:
        return
    reason, unused = _UNUSED[config.policy]
    for name in unused:
        if getattr(config, name) is not None:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option} has no effect with --policy {config.policy}, which {reason}: leave one "
                f"of the two out"
            )


def _retention(config: Config, tiers: tuple[int, ...]) -> float:
    """What was asked for; else 1 where there is nothing below the high tier."""
    if config.retention is not None:
        return config.retention
    return 1.0 if len(tiers) == 1 and config.low_tier != SKIP_TIER else USUAL_RETENTION


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


def _wants_plain(config: Config, model: ExpertModel) -> bool:
    """Whether the plain path could serve what is asked for, were there memory enough."""
    best = config.high_tier is None or model.tier_index(config.high_tier) == 0
    if config.policy == PLAIN:
        if not best or config.force_managed or config.expert_ram:
            raise ConfigError(
                "the plain path runs the best tier of the file and no expert slots: leave out "
                "--high-tier and --expert-ram, or choose another policy"
            )
        return True
    low_asked = config.low is not None or config.low_tier is not None
    managed = config.force_managed or config.expert_ram is not None or low_asked
    return config.policy is None and best and not managed


def _choose(config: Config, model: ExpertModel, budget: int) -> tuple[str, tuple[int, ...]]:
    """(policy name, file tier indices) where the user left them open."""
    names = [tier.name for tier in model.tiers]
    # Experts below the high tier, as far as the user said: a tier of that name, or any.
    named = None
    if config.policy != LRU and config.low_tier not in (None, SKIP_TIER):
        named = model.tier_index(config.low_tier or "")
    if config.high_tier is not None:
        high = model.tier_index(config.high_tier)
    elif config.policy == DYNAEXQ and len(names) > 1:
        high = _above_what_fits(model, budget) if named is None else max(0, named - 1)
    else:
        high = _best_that_fits(config, model, budget, named)
    low = named if named is not None else high + 1 if high + 1 < len(names) else None
    if low is not None and low <= high:
        raise PolicyError(
            f"the low tier {names[low]} is not below the high tier {names[high]}; the file "
            f"holds {', '.join(names)}, best first"
        )
    if config.policy is not None:
        name = config.policy
    elif config.low is not None or config.low_tier is not None or config.retention is not None:
        name = DYMOE
    else:
        name = LRU if _slots_of_all(model, high) <= budget else DYMOE
    if name == LRU or low is None or config.low_tier == SKIP_TIER:
        return name, (high,)
    return name, (high, low)


def _best_that_fits(config: Config, model: ExpertModel, budget: int, low: int | None) -> int:
    """The best tier where all of it fits, else q4_k where the file has it above a low tier that
    was asked for, else the best one after all."""
    names = [tier.name for tier in model.tiers]
    if _slots_of_all(model, 0) <= budget or USUAL_HIGH not in names:
        return 0
    usual = names.index(USUAL_HIGH)
    above = usual < (len(names) - 1 if low is None else low)
    return usual if above or (low is None and config.low is None) else 0


def _above_what_fits(model: ExpertModel, budget: int) -> int:
    """The tier above the best one whose copies all fit; else the one above the lowest."""
    above = range(len(model.tiers) - 1)
    fits = (at for at in above if resident_plan(model_shape(model, (at, at + 1)), budget, None))
    return next(fits, above[-1])


def _slots_of_all(model: ExpertModel, tier: int) -> int:
    """Bytes of slots for every expert in one tier."""
    shape = model_shape(model, (tier,))
    layers = range(shape.n_layers)
    return shape.n_expert * sum(shape.expert_slot_bytes(layer, 0) for layer in layers)
