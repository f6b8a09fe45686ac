"""The memory that experts live in, and what else of a model lies there."""

from __future__ import annotations

from dataclasses import dataclass

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import KINDS, POOL_ALIGNMENT
from gguf_tools.units import format_size
from orchestrator.config import Config
from orchestrator.errors import BudgetError
from orchestrator.memory.footprint import (
    attention_weights,
    compute_bytes,
    embedding_bytes,
    kernel_bytes,
    look_ahead_bytes,
    model_shape,
    process_bytes,
    step_tokens,
)
from orchestrator.memory.hardware import Machine
from orchestrator.policy import DEFAULT, policy_class

# Scratch that llama.cpp was seen to take beyond the estimate; and scratch in the host's memory as
# it counts it, None for an estimate.
Graph = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that experts live in, and what else of the model lies there."""

    option: str  # that caps it
    free: str  # what it is called without that option
    asked: int | None
    cap: int
    dense: int
    kv: int
    scratch: int
    compute: int  # the part of scratch that graphs take
    prompts: int = 0

    @property
    def fixed(self) -> int:
        return self.dense + self.kv + self.scratch + self.prompts

    @property
    def given(self) -> str:
        """The cap that binds, for a message."""
        size = format_size(self.cap)
        return f"{self.option} {size}" if self.asked == self.cap else f"{self.free} {size},"


def room_of(
    config: Config,
    model: ExpertModel,
    machine: Machine,
    n_ctx: int,
    ram: int,
    graph: Graph,
    plain: bool = False,
    prompts: int = 0,
) -> Room:
    """graph: plan_memory's more_scratch, and what its graph_bytes says. plain: as upstream runs it,
    without our executor on a device."""
    dense, kv = model.dense_bytes, model.kv_bytes(n_ctx, config.kv)
    more_scratch, graph_bytes = graph
    compute = compute_bytes(model, config, n_ctx, graph_bytes) + more_scratch
    device = machine.device
    may_look = False
    if not plain:
        wants = policy_class(config.policy or DEFAULT).wants
        may_look = bool(wants.asked_in)
    ahead = look_ahead_bytes(model) if may_look else 0
    if device is None:
        scratch = process_bytes(model, config) + compute + ahead
        free = "free memory,"
        return Room("--ram", free, config.ram, ram, dense, kv, scratch, compute, prompts)
    asked = config.vram
    cap = min(asked, device.memory_bytes) if asked else device.usable_bytes
    flash = device.flash and config.importance != "exact"
    if not flash:  # the weights, and the mask in two precisions
        tokens = step_tokens(config, n_ctx)
        compute += 4 * (attention_weights(model, config, n_ctx) + tokens * n_ctx)
    # without a cap, ggml's pool makes room for itself where the device is full
    kernels = kernel_bytes(model, config, n_ctx, flash, piles=plain and asked is not None)
    scratch = compute + kernels + _alignment(model) + ahead
    free = f"free memory of {device.name},"
    return Room("--vram", free, asked, cap, dense, kv, scratch, compute)


def _alignment(model: ExpertModel) -> int:
    """What starting each pool of slots at a boundary costs at most."""
    return POOL_ALIGNMENT * len(model.slices) * len(KINDS) * len(model.tiers)


def host_bytes(
    config: Config, model: ExpertModel, tiers: tuple[int, ...], ram: int, near: int = 0
) -> int:
    """The cache of experts in the host's memory behind a device: what is left there, as far as
    there are experts. near: bytes of slots there, with what their products take. Raises BudgetError
    where not even reads in flight find room."""
    fixed = process_bytes(model, config, on_gpu=True) + embedding_bytes(model) + near
    shape = model_shape(model, tiers)
    slots = {size for layer in shape.slots for sizes in layer for size in sizes.values()}
    # every size has slots of its own, two at least
    in_flight = max(2 * config.io_threads * max(slots), 2 * sum(slots))
    every = sum(model_shape(model, (tier,)).all_slot_bytes() for tier in tiers)
    if ram - fixed < in_flight:
        needed = fixed + in_flight
        raise BudgetError(
            f"--ram {format_size(ram)} is too little beside a GPU: the smallest that works is "
            f"{format_size(needed, up=True)}",
            needed,
        )
    return min(ram - fixed, every + in_flight)
