"""Layout of experts in slots.

It is that of the file, or the CPU's own layout, which interleaves eight rows for llama.cpp's
repacked kernels. Also the compute times of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import GGMLType
from orchestrator.config import Config
from orchestrator.native import Library, ProductTime, Slices, StoreSpec
from orchestrator.plan.machine import AUTO
from orchestrator.plan.records import Plan

# Returns the time of a product of experts from their type and shape.
TimeProduct = Callable[[int, tuple[int, int]], ProductTime | None]

# The share of resident experts from which the CPU's own layout is used. A token also waits for the
# conversion of a missing expert. Reading experts from disk is therefore slower with this layout,
# even for types whose first use compensates for it (docs/experiments/engine.md).
RESIDENT_SHARE = 0.99


def wants_own_layout(config: Config, plan: Plan) -> bool:
    """Return whether experts in memory should have the CPU's own layout, not that of the file.

    The CPU's own layout interleaves matrix rows for llama.cpp's repacked kernels. `--layout cpu`
    requests it. With `--layout auto`, the result is True if the layout is faster for the plan. It
    is slower if experts are often read from disk, because each of them must be converted.
    """
    if config.layout != "auto":
        return config.layout == "cpu"
    if config.use_extra_bufts is False or plan.slots is None:
        return False
    placement = plan.placement
    if placement is not None and placement.wants.all_resident:
        # Tiers change rarely and in the background, unless tokens wait for them.
        return placement.wants.transition_rate > 0
    return plan.slots.total_bytes >= RESIDENT_SHARE * plan.expert_bytes


def with_layouts(
    spec: StoreSpec, config: Config, model: ExpertModel, plan: Plan, library: Library
) -> StoreSpec:
    """Return `spec`, the parameters of an expert store, with a memory layout for each matrix.

    A matrix keeps the layout of the file, or its rows are interleaved for faster CPU kernels. The
    function `wants_own_layout` decides whether rows are interleaved. Matrices that the library
    cannot interleave, and all experts on a GPU, keep the layout of the file.
    """
    if plan.device is not None or not wants_own_layout(config, plan):
        return spec

    def laid_out(layer: int, kind: int, each: Slices) -> Slices:
        shape = model.shapes[layer][kind]
        if shape is None or not library.interleaves(each.type, *shape):
            return each
        return replace(each, interleaved_rows=shape[1])

    return spec.with_slices(laid_out)


def with_product_times(spec: StoreSpec, model: ExpertModel, timed: TimeProduct) -> StoreSpec:
    """Return the parameters `spec` of an expert store, with the host's time for each expert matrix.

    It is the time in which the CPU multiplies the matrix with the activations of one token. If an
    expert is not in GPU memory, the store compares the sum of these times for the expert's matrices
    with the time to copy the expert to the GPU.

    It compares them only with `--misses auto` and a known speed of copies. In other cases, `spec`
    is returned unchanged.

    timed: a function that returns the host's time for a matrix, or None if the host cannot compute
    it. Its arguments are the matrix's quantization type and shape (row length, number of rows).
    """
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
    """Return a phrase for the status line, such as ", experts of type q4_k repacked for this CPU".

    The phrase names the quantization types of the experts whose matrix rows are interleaved in
    memory, for faster CPU kernels. It is empty if no experts have interleaved rows.
    """
    slices = [each for _, layer in spec.layers for each in layer.values()]
    types = sorted({GGMLType(each.type).name.lower() for each in slices if each.interleaved_rows})
    return f", experts of type {' and '.join(types)} repacked for this CPU" if types else ""
