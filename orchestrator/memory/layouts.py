"""How slots hold experts: as in the file, or in the CPU's own layout, in which eight rows of a
matrix are interleaved for upstream's repacked kernels; and what the host takes to compute them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import GGMLType
from orchestrator.config import Config
from orchestrator.memory.machine import AUTO
from orchestrator.memory.plan import MemoryPlan
from orchestrator.native import Library, ProductTime, Slices, StoreSpec

# A type and a shape of experts to what their product takes.
TimeProduct = Callable[[int, tuple[int, int]], ProductTime | None]

# A token that needs an expert waits until it is laid out, too, and so streaming is slower with the
# CPU's layout even for types whose layout pays after one use (docs/experiments/layouts.md).
RESIDENT_SHARE = 0.99


def wants_own_layout(config: Config, plan: MemoryPlan) -> bool:
    """Whether the CPU's own layout is asked for, or pays with what this plan keeps in memory."""
    if config.layout != "auto":
        return config.layout == "cpu"
    if config.use_extra_bufts is False or plan.slots is None:
        return False
    placement = plan.placement
    if placement is not None and placement.wants.all_resident:
        # Versions change in the background and seldom, unless tokens wait for them.
        return placement.wants.transition_rate > 0
    return plan.slots.total_bytes >= RESIDENT_SHARE * plan.expert_bytes


def with_layouts(
    spec: StoreSpec, config: Config, model: ExpertModel, plan: MemoryPlan, library: Library
) -> StoreSpec:
    """The store whose slots hold what this CPU has a layout of its own for in that layout, where
    the plan wants it. On a device experts are as in the file."""
    if plan.device is not None or not wants_own_layout(config, plan):
        return spec

    def laid_out(layer: int, kind: int, each: Slices) -> Slices:
        shape = model.shapes[layer][kind]
        if shape is None or not library.interleaves(each.type, *shape):
            return each
        return replace(each, interleaved_rows=shape[1])

    return spec.with_slices(laid_out)


def with_product_times(spec: StoreSpec, model: ExpertModel, timed: TimeProduct) -> StoreSpec:
    """A store's spec with what the host takes to compute each expert, for misses by speeds. timed:
    a product of experts of a type and a shape (row length, rows), None where the host has none."""
    if spec.misses.mode != AUTO or not spec.misses.copy:
        return spec
    found: dict[tuple[int, tuple[int, int]], ProductTime | None] = {}

    def with_time(layer: int, kind: int, each: Slices) -> Slices:
        shape = model.shapes[layer][kind]
        assert shape is not None
        at = each.type, shape
        if at not in found:
            found[at] = timed(*at)
        took = found[at]
        return replace(each, compute_us=took.each_us if took else 0.0)

    spec = spec.with_slices(with_time)
    wake_us = max((took.wake_us for took in found.values() if took), default=0.0)
    misses = replace(spec.misses, round_trip_us=spec.misses.round_trip_us + wake_us)
    return replace(spec, misses=misses)


def layout_text(spec: StoreSpec) -> str:
    """For the mode line: the types that slots hold in the CPU's own layout."""
    slices = [each for _, layer in spec.layers for each in layer.values()]
    types = sorted({GGMLType(each.type).name.lower() for each in slices if each.interleaved_rows})
    return f", {' and '.join(types)} in this CPU's own layout" if types else ""
